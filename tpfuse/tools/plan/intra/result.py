"""What a search has found, in words, and why: the layouts of all ops, each change of layout that is paid, and what any
other layout of an op would cost beside it."""

from typing import Any, NamedTuple

from ...ledger.text import duration, quantity, table
from .problem import Found
from .signatures import FORKED, Layout
from .space import Space, Strategy

FOOTNOTE = f"{FORKED}: its gradient is Partial"
SHOWN = 6  # strategies of an op in a table: the fastest


def words(layout: Layout) -> str:
    """Returns ("Shard(1)", "Partial") as text."""
    return ", ".join(layout)


class Chosen(NamedTuple):
    """An op's layout; ``seconds`` and ``sent`` bytes without conversions, ``memory`` of its parameters' state."""

    op: str
    input: Layout
    weight: Layout | None
    output: Layout
    seconds: float
    sent: float
    memory: float


class Paid(NamedTuple):
    """A change of layout between two ops; ``forward`` and ``backward``: its collectives with the axis of each."""

    source: str
    to: str
    start: Layout
    end: Layout
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    sent: float
    seconds: float


class Result(NamedTuple):
    """``seconds`` of forward and backward, ``sent`` bytes and ``memory`` in bytes of a rank; ``parts``: seconds by
    PARTS."""

    seconds: float
    sent: float
    memory: float
    parts: dict[str, float]
    ops: tuple[Chosen, ...]
    conversions: tuple[Paid, ...]

    @classmethod
    def of(cls, space: Space, found: Found) -> "Result":
        """Returns what was found, in words."""
        ops, paid = [], []
        for op, s in zip(space.graph.ops, space.chosen(found)):
            weight = s.weight if op.weights else None
            seconds = s.computes + s.sums
            ops.append(Chosen(op.name, s.input, weight, s.output, seconds=seconds, sent=s.sent, memory=s.memory))
        for edge, steps in space.paid(found):
            named = [(space.graph.ops[edge.source].name, space.graph.ops[edge.to].name)]
            there = tuple(f"{t.step.forward} ({t.axis})" for t in steps if t.step.forward)
            back = tuple(f"{t.step.backward} ({t.axis})" for t in reversed(steps) if t.step.backward)
            sent, seconds = sum(t.sent for t in steps), sum(t.seconds for t in steps)
            ends = steps[0].start, steps[-1].end
            paid.append(Paid(*named[0], *ends, forward=there, backward=back, sent=sent, seconds=seconds))
        sent = sum(c.sent for c in ops) + sum(p.sent for p in paid)
        return cls(found.seconds, sent, found.memory, space.parts(found), tuple(ops), tuple(paid))

    def text(self) -> str:
        """Returns two tables: the ops, and the conversions between them."""
        rows = [
            (c.op, words(c.input), words(c.weight or ()), words(c.output), duration(c.seconds), quantity(c.memory, "B"))
            for c in self.ops
        ]
        changes = [
            (
                f"{p.source} -> {p.to}",
                f"{words(p.start)} -> {words(p.end)}",
                " ".join(p.forward) or "-",
                " ".join(p.backward) or "-",
                quantity(p.sent, "B"),
                duration(p.seconds),
            )
            for p in self.conversions
        ]
        return "\n\n".join(
            [
                table(("op", "input", "weight", "output", "takes", "state"), rows),
                table(("layout changes", "from -> to", "forward (axis)", "backward (axis)", "sent", "takes"), changes),
            ]
        )

    def json(self) -> dict[str, Any]:
        """Returns plain numbers and lists."""
        plain = self._asdict()
        plain["ops"] = [c._asdict() for c in self.ops]
        plain["conversions"] = [p._asdict() for p in self.conversions]
        return plain


class Candidate(NamedTuple):
    """A strategy of an op, beside what was chosen for all others: bytes sent in conversions and for its weights'
    gradients, seconds with both, and whether it is the one that was chosen."""

    op: str
    strategy: Strategy
    converted: float
    seconds: float
    chosen: bool


def candidates(space: Space, found: Found) -> list[Candidate]:
    """Returns every strategy of every op, fastest first op by op."""
    chosen, every = space.chosen(found), []
    for k, op in enumerate(space.graph.ops):
        rows = []
        for i, strategy in enumerate(space.strategies[k]):
            sent, seconds = 0.0, strategy.computes + strategy.sums
            for edge in space.problem.edges:
                if k in (edge.source, edge.to):
                    ends = [strategy if end == k else chosen[end] for end in (edge.source, edge.to)]
                    ways = space.ways(space.graph.ops[edge.source].output)
                    a, b = ways.place[ends[0].output], ways.place[ends[1].input]
                    sent, seconds = sent + float(ways.sent[a, b]), seconds + float(ways.seconds[a, b])
            rows.append(Candidate(op.name, strategy, sent, seconds, chosen=i == found.pick[k]))
        every += sorted(rows, key=lambda row: row.seconds)
    return every


def explain(space: Space, found: Found) -> str:
    """Returns a table of each op's strategies, at most SHOWN of an op, with the chosen ones marked."""
    rows = []
    every = candidates(space, found)
    for op in space.graph.ops:
        mine = [c for c in every if c.op == op.name]
        for place, c in enumerate(mine):
            if place < SHOWN or c.chosen:
                s = c.strategy
                layouts = words(s.input), words(s.weight) if op.weights else "", words(s.output)
                sent = quantity(c.converted, "B"), quantity(s.sent, "B")
                mark = "*" if c.chosen else ""
                rows.append((mark, op.name, *layouts, *sent, duration(c.seconds), quantity(s.memory, "B")))
    header = ("", "op", "input", "weight", "output", "sent in conversions", "for gradients", "takes", "state")
    return table(header, rows)


def difference(space: Space, found: Found, other: Found) -> str:
    """Returns which ops have another layout, and which."""
    ends = zip(space.graph.ops, space.chosen(found), space.chosen(other))
    changed = [f"{op.name} {words(there.input)} -> {words(there.output)}" for op, here, there in ends if here != there]
    return "; ".join(changed)
