"""Reports of a solution: the layouts of all ops, each change of layout with its cost, and the cost of any other layout
of an op."""

from typing import NamedTuple

from ...ledger.text import duration, quantity, table
from .problem import Solution
from .signatures import FORKED, Layout
from .space import SCHEMES, Space, Strategy

FOOTNOTE = f"{FORKED}: its gradient is Partial"
SHOWN = 6  # strategies of an op in a table: the fastest


def _text(layout: Layout) -> str:
    return ", ".join(layout)


class OpLayout(NamedTuple):
    """An op's layout; ``seconds`` and ``sent`` bytes without conversions, ``memory`` of its parameters' state."""

    op: str
    input: Layout
    weight: Layout | None
    output: Layout
    seconds: float
    sent: float
    memory: float


class LayoutChange(NamedTuple):
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
    """A solution by name: seconds of forward and backward, bytes that a rank sends and its memory in bytes; ``parts``:
    seconds by PARTS."""

    seconds: float
    sent: float
    memory: float
    parts: dict[str, float]
    ops: tuple[OpLayout, ...]
    conversions: tuple[LayoutChange, ...]

    @classmethod
    def of(cls, space: Space, solution: Solution) -> "Result":
        ops, changes = [], []
        for op, s in zip(space.graph.ops, space.chosen(solution)):
            weight = s.weight if op.weights else None
            ops.append(
                OpLayout(op.name, s.input, weight, s.output, seconds=s.computes + s.sums, sent=s.sent, memory=s.memory)
            )
        for edge, steps in space.changes(solution):
            change = LayoutChange(
                space.graph.ops[edge.source].name,
                space.graph.ops[edge.to].name,
                steps[0].start,
                steps[-1].end,
                forward=tuple(f"{s.collectives.forward} ({s.axis})" for s in steps if s.collectives.forward),
                backward=tuple(f"{s.collectives.backward} ({s.axis})" for s in steps[::-1] if s.collectives.backward),
                sent=sum(s.sent for s in steps),
                seconds=sum(s.seconds for s in steps),
            )
            changes.append(change)
        sent = sum(op.sent for op in ops) + sum(change.sent for change in changes)
        return cls(solution.seconds, sent, solution.memory, space.parts(solution), tuple(ops), tuple(changes))

    def text(self) -> str:
        """Returns two tables: the ops, and the conversions between them."""
        rows = [
            (c.op, _text(c.input), _text(c.weight or ()), _text(c.output), duration(c.seconds), quantity(c.memory, "B"))
            for c in self.ops
        ]
        changes = [
            (
                f"{p.source} -> {p.to}",
                f"{_text(p.start)} -> {_text(p.end)}",
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

    def json(self) -> dict[str, object]:
        plain = self._asdict()
        plain["ops"] = [c._asdict() for c in self.ops]
        plain["conversions"] = [p._asdict() for p in self.conversions]
        return plain


def runs_as(space: Space, solution: Solution) -> str:
    """Returns the ranks under which the library runs a solution, or the ops that it lays out otherwise."""
    split = space.split(solution)
    if split is None:
        axes = enumerate(space.followed(solution))
        others = (f"{', '.join(ops)} on axis {k}, else {scheme}" for k, (scheme, ops) in axes if ops)
        return f"not built: {'; '.join(others)}"
    pieces = f', cp=mesh["cp"], cp_kind="{split.cp_kind}"' if split.cp > 1 else ""
    sizes = ", ".join(f"{scheme} {getattr(split, scheme)}" for scheme in SCHEMES)
    return f'TensorParallel(mesh["tp"], sequence_parallel=True{pieces}) on a mesh of {sizes}'


class Candidate(NamedTuple):
    """A strategy of an op while all other ops keep theirs: bytes sent in conversions, seconds with conversions and sums
    of its weights' gradients, and whether it is the solution's."""

    op: str
    strategy: Strategy
    converted: float
    seconds: float
    chosen: bool


def candidates(space: Space, solution: Solution) -> list[Candidate]:
    """Returns all strategies of all ops, op by op, the fastest of an op at the front."""
    chosen, all_rows = space.chosen(solution), []
    for k, op in enumerate(space.graph.ops):
        rows = []
        for i, strategy in enumerate(space.strategies[k]):
            sent, seconds = 0.0, strategy.computes + strategy.sums
            for edge in space.problem.edges:
                if k in (edge.source, edge.to):
                    ends = [strategy if end == k else chosen[end] for end in (edge.source, edge.to)]
                    conversions = space.conversions(edge.source)
                    a, b = conversions.index[ends[0].output], conversions.index[ends[1].input]
                    sent += float(conversions.sent[a, b])
                    seconds += float(conversions.seconds[a, b])
            rows.append(Candidate(op.name, strategy, sent, seconds, chosen=i == solution.pick[k]))
        all_rows += sorted(rows, key=lambda row: row.seconds)
    return all_rows


def explain(space: Space, solution: Solution) -> str:
    """Returns a table of each op's strategies, at most SHOWN of an op, with the solution's marked."""
    rows, all_candidates = [], candidates(space, solution)
    for op in space.graph.ops:
        for rank, c in enumerate(c for c in all_candidates if c.op == op.name):
            if rank < SHOWN or c.chosen:
                s = c.strategy
                layouts = _text(s.input), _text(s.weight) if op.weights else "", _text(s.output)
                sent = quantity(c.converted, "B"), quantity(s.sent, "B")
                mark = "*" if c.chosen else ""
                rows.append((mark, op.name, *layouts, *sent, duration(c.seconds), quantity(s.memory, "B")))
    header = ("", "op", "input", "weight", "output", "sent in conversions", "for gradients", "takes", "state")
    return table(header, rows)


def difference(space: Space, one: Solution, two: Solution) -> str:
    """Returns the ops that have another layout in ``two``, with that layout."""
    ops = zip(space.graph.ops, space.chosen(one), space.chosen(two))
    return "; ".join(f"{op.name} {_text(b.input)} -> {_text(b.output)}" for op, a, b in ops if a != b)
