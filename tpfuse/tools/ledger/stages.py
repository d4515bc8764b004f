"""Every rank of a pipeline, in one process: its stages of the real model on meta tensors, and its list of actions.

One micro-batch runs through each stage under the ledger, pass by pass; the order says how often each pass runs, how
many micro-batches a rank keeps at a time, and what goes from rank to rank.  All of it is exact: a real rank does the
same, call by call and byte by byte.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ...kernels.runtime.deferred import WeightGradients
from ...layers.shards import same_on_replicas
from ...models.config.model import ModelConfig
from ...models.model import Model
from ...pipeline.action import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from ...pipeline.placement import Chunk, Stage
from ...pipeline.schedules import EVERY, Order, begun, order
from ...sequence_parallel.assumed import assumed_imbalance
from .dryrun import Plan, axis_of, check_experts, fake_world, planned_model
from .layer import token_ids
from .memory import StateBytes, saved_bytes, state_bytes
from .recorder import Entry, Ledger, Row, add_up
from .text import progress, quantity, table

Counts = dict[tuple[str, str, str], Row]  # by op, kind and the axis of a message


class Pipe(NamedTuple):
    """A model's spread over ``ranks``, as :func:`tpfuse.pipeline.order` and ``Stage`` take it."""

    ranks: int
    schedule: str = "1f1b"
    micro_batches: int = 8
    chunks: int | None = None


class StageRun(NamedTuple):
    """A micro-batch's calls of a stage, by pass, and bytes; the ``group`` of a message's call is the axis that it is
    over, "tp" or "cp".

    ``temporaries``: the most alive during a pass beyond what is saved, or of a backward pass, beyond its start.  The
    others are as of StageWork.
    """

    passes: Mapping[str, Sequence[Entry]]
    temporaries: Mapping[str, int]
    saved: int
    held: int
    rows: int


class StageWork(NamedTuple):
    """Costs of a micro-batch in one stage: each pass's ops, and bytes.

    ``saved``: kept from F to B or I.  ``held``: from I to W, by the gradients of weights that wait.  ``rows``: of h as
    it is sent to the next stage, and of its gradient.
    """

    chunk: Chunk
    passes: Mapping[str, Counts]
    saved: int
    held: int
    rows: int


class RankMessage(NamedTuple):
    """Messages of a step of one rank: "pp", "dp", "cp" or "tp", what they are, how many, and the bytes that it sends,
    or of a sum those that it gives to it."""

    over: str
    op: str
    calls: int
    bytes: int


class RankRun(NamedTuple):
    """A dry run's results, of one rank of a pipeline; without a flush of a step amid others.

    ``state``: with the weights and gradients of every version that the schedule keeps.
    ``copied``: gradients that the opposite rank has copies of; ``summed``: those that are summed over the replicas, all
    but of experts over replicas; how many, and their bytes.
    """

    rank: int
    plan: Plan
    order: Order
    stages: Mapping[tuple[int, int], StageWork]  # by chain and stage
    parameters: int
    state: StateBytes
    summed: tuple[int, int]
    copied: tuple[int, int]
    loss_bytes: int

    @property
    def actions(self) -> tuple[Action, ...]:
        return self.order.actions[self.rank]

    @property
    def step(self) -> dict[tuple[str, str, str, str], Row]:
        """Costs of a step on this rank, by pass, op, kind and the axis of a message; without the messages between
        stages."""
        sums: dict[tuple[str, str, str, str], Row] = {}
        for a in self.actions:
            for call, row in self.stages[a.chain, a.stage].passes[a.kind].items():
                key = a.kind, *call
                both = [sums.get(key, Row()), row]
                sums[key] = Row(*map(sum, zip(*both)))
        return sums

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.step.values())

    @property
    def alive(self) -> list[int]:
        """The bytes kept for backward at the end of each action: of every micro-batch in flight what its stage saves,
        or where its weight gradients wait, what these hold."""
        alive, ends = sum(self.stages[a.chain, a.stage].saved for a in begun(self.actions)), []
        for a in self.actions:
            work = self.stages[a.chain, a.stage]
            change = {FORWARD: work.saved, BACKWARD: -work.saved, INPUT: work.held - work.saved, WEIGHT: -work.held}
            alive += change[a.kind]
            ends.append(alive)
        return ends

    @property
    def peak(self) -> int:
        """The bytes of parameters, gradients, optimizer, and activations or, at the end of the step, the gradients of a
        copy on another rank."""
        held = sum(self.stages[a.chain, a.stage].saved for a in begun(self.actions))  # at the end, as at the beginning
        return self.state.total + max(*self.alive, held + self.copied[1])

    @property
    def messages(self) -> list[RankMessage]:
        rows = [self.stages[a.chain, a.stage].rows for a in self.actions if self._leaves(a)]
        messages = [RankMessage("pp", "send", len(rows), sum(rows))]
        if self.copied[0]:
            messages.append(RankMessage("pp", "send (gradients of copies)", *self.copied))
        messages.append(RankMessage("pp", "all_reduce (losses)", 1, self.loss_bytes))
        if self.plan.dp > 1:
            messages.append(RankMessage("dp", "all_reduce (gradients)", *self.summed))
            messages.append(RankMessage("dp", "all_reduce (losses, labels)", 2, self.loss_bytes + 8))
        sent = [(axis, f"{op} ({kind})", row) for (kind, op, _, axis), row in self.step.items() if row.wire]
        return messages + [RankMessage(axis, op, row.calls, row.wire) for axis, op, row in sent]

    def _leaves(self, a: Action) -> bool:
        """Returns True where another rank waits for an action's result."""
        neighbour = a.stage + {FORWARD: 1, BACKWARD: -1, INPUT: -1, WEIGHT: 0}[a.kind]
        places = self.order.ranks[a.chain]
        return a.kind != WEIGHT and 0 <= neighbour < len(places) and places[neighbour] != self.rank


def run(config: ModelConfig, plan: Plan, pipe: Pipe) -> list[RankRun]:
    """Runs each rank of a pipeline, whose micro-batches are ``plan.micro_batch`` sequences.

    ValueError, as at run time, for numbers that a schedule cannot do and sizes that cannot be split, and for an
    imbalance that the ranks cannot have.
    """
    check_experts(config, plan)
    ranks = list(range(pipe.ranks))
    return [_rank(config, plan, pipe, rank) for rank in progress(ranks, "dry run: rank", long=config.num_layers > 16)]


def _rank(config: ModelConfig, plan: Plan, pipe: Pipe, rank: int) -> RankRun:
    schedule = EVERY.get(pipe.schedule)
    actions = order(pipe.schedule, pipe.ranks, pipe.micro_batches, chunks=pipe.chunks)
    with fake_world(plan.tp, plan.dp, pipe.ranks, rank, cp=plan.cp) as mesh:
        stage = Stage(rank, pipe.ranks, pipe.schedule, pipe.chunks)
        model = planned_model(config, plan, mesh, stage)
        split = schedule is not None and schedule.split
        stages = {(c.chain, c.stage): _stage(model, c, plan, split=split) for c in model.stages.chunks}
        copied = [p.nbytes for name, p in model.named_parameters() if model.stages.copies_of(name) == 2]
        summed = [p.nbytes for p in same_on_replicas(model)]
        versions, state = actions.versions, state_bytes(model, optimizer=plan.optimizer)
        return RankRun(
            rank,
            plan._replace(cp_kind=model.tp.cp_kind),
            actions,
            stages,
            parameters=sum(p.numel() for p in model.parameters()),
            state=state._replace(parameters=versions * state.parameters, gradients=versions * state.gradients),
            summed=(len(summed), sum(summed)),
            copied=(len(copied), sum(copied)),
            loss_bytes=pipe.micro_batches * max(4, plan.dtype.itemsize),
        )


def run_stage(model: Any, chunk: Chunk, plan: Plan, *, split: bool) -> StageRun:
    """Runs a micro-batch through a stage; with ``split`` the gradients of weights wait.

    Gradients are added to those that parameters have, and stay.
    """
    ids, store = token_ids(plan.micro_batch, plan.seq), WeightGradients()
    (call,) = model.stages.micro_batches(model, 1, dict(input_ids=ids, labels=ids, loss_normalizer=1.0, first_sample=0))
    arguments = [x for x in tree_leaves(call) if isinstance(x, torch.Tensor)]
    h = torch.empty(call.rows.per_shard, model.config.hidden_size, dtype=plan.dtype, device="meta")
    x = None if chunk.is_first else torch.empty_like(h, requires_grad=True)
    ends, temporaries = [0], dict[str, int]()

    def end(kind: str, alive: int) -> None:
        """Records the bytes alive during a pass, beyond the ``alive`` that it begins or ends with."""
        ends.append(len(ledger.entries))
        temporaries[kind] = max(0, ledger.peak - alive)
        ledger.peak = ledger.live

    with Ledger() as ledger, assumed_imbalance(plan.imbalance):
        with saved_bytes(model, arguments) as saved, store.deferring() if split else contextlib.nullcontext():
            output = model.stages.run(model, chunk, x, call)
        end(FORWARD, saved())
        begun = ledger.live
        output.backward(None if chunk.is_last else h)
        end(INPUT, begun)
        begun = ledger.live
        excluded = {p.untyped_storage()._cdata for p in (*model.parameters(), *arguments)}
        held = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in store.held())}
        store.take()()
        end(WEIGHT, begun)
    entries = [e._replace(group=axis_of(e.group, model.tp)) if e.group else e for e in ledger.entries]
    _, forward, back, _ = ends
    return StageRun(
        {FORWARD: entries[:forward], BACKWARD: entries[forward:], INPUT: entries[forward:back], WEIGHT: entries[back:]},
        temporaries | {BACKWARD: max(temporaries[INPUT], temporaries[WEIGHT])},
        saved=saved(),
        held=sum(size for key, size in held.items() if key not in excluded),
        rows=h.numel() * h.element_size(),
    )


def _stage(model: Model, chunk: Chunk, plan: Plan, *, split: bool) -> StageWork:
    """Returns the sums of a stage's run."""
    ran = run_stage(model, chunk, plan, split=split)
    model.zero_grad()
    passes = {kind: _counts(entries) for kind, entries in ran.passes.items()}
    return StageWork(chunk, passes, saved=ran.saved, held=ran.held, rows=ran.rows)


def _counts(entries: Iterable[Entry]) -> Counts:
    """Returns the sums of entries that compute or send, by op, kind and axis."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for e in entries:
        if e.flops or e.wire:
            groups.setdefault((e.op, e.kind, e.group), []).append(e)
    return {key: add_up(group) for key, group in groups.items()}


# ---- as text and as numbers ----


def memory_table(ranks: list[RankRun]) -> str:
    rows = []
    for r in ranks:
        works = r.stages.values()
        rows.append(
            (
                r.rank,
                ", ".join(f"{w.chunk.layers[0]}-{w.chunk.layers[-1]}" for w in works),
                quantity(r.parameters),
                *(quantity(n, "B") for n in (r.state.parameters, r.state.gradients, r.state.optimizer)),
                " + ".join(quantity(w.saved, "B") for w in works),
                quantity(max(r.alive), "B"),
                quantity(r.peak, "B"),
            )
        )
    header = "rank", "layers", "parameters", "", "gradients", "optimizer", "saved a micro-batch", "at the peak", "peak"
    return table(header, rows)


def report(ranks: list[RankRun]) -> str:
    """Returns a dry run of a pipeline as text."""
    plan, order = ranks[0].plan, ranks[0].order
    head = (
        f"{order.schedule} over {len(ranks)} ranks of {plan.axes}, {order.micro_batches} micro-batches"
        f" of {plan.micro_batch} x {plan.seq} tokens; a step of each rank"
    )
    rows = [(r.rank, m.over, m.op, m.calls, quantity(m.bytes, "B")) for r in ranks for m in r.messages]
    flops = table(("rank", "computed"), [(r.rank, quantity(r.flops, "flop")) for r in ranks])
    messages = table(("rank", "over", "message", "calls", "bytes"), rows)
    return "\n\n".join([head, memory_table(ranks), flops, messages])


def as_json(ranks: list[RankRun]) -> list[dict[str, Any]]:
    return [
        dict(
            rank=r.rank,
            parameters=r.parameters,
            state=r.state._asdict() | dict(total=r.state.total),
            stages=[
                dict(
                    chain=w.chunk.chain,
                    stage=w.chunk.stage,
                    layers=list(w.chunk.layers),
                    saved=w.saved,
                    held=w.held,
                    sent=w.rows,
                )
                for w in r.stages.values()
            ],
            saved=max(r.alive),
            peak=r.peak,
            flops=r.flops,
            messages=[m._asdict() for m in r.messages],
        )
        for r in ranks
    ]
