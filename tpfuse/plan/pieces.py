"""What the pieces of a model cost, from dry runs of its real stages on meta tensors.

Four stages of a few blocks run under the ledger: the first, two in the middle of one block and of two, and the last.
Their differences are the pieces, call by call:

    block      the middle of two blocks less that of one
    border     the middle of one block less a block
    embedding  the first stage less its block
    head       the last stage less its block and the border

so that the pieces of any stage add up to what it runs, where norms that a fused op would have made stand alone at its
ends.  Bytes and flops of each call are linear in the rows: two runs give all micro-batches of several sequences.  A
single one, whose ids are copied less, and rows that tp does not divide have runs of their own.  Each call then takes
what the device needs for it.  Parameters have gradients already, which each micro-batch but a step's first adds to.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..kernels.runtime.errors import check
from ..ledger.aten import COMMUNICATION
from ..ledger.dryrun import Plan, fake_world
from ..ledger.layer import build, with_layers
from ..ledger.recorder import Entry
from ..ledger.stages import StageRun, run_stage
from ..models.config import ModelConfig
from ..parallel import TensorParallel
from ..pipeline.action import KINDS
from ..pipeline.order import SCHEDULES, placement
from ..pipeline.placement import Stage
from .cluster import Cluster
from .messages import over_tp
from .split import ATTENTION, GEMM, MEMORY, TP, Job, Piece, Pieces, Split

_FIRST, _MIDDLE, _TWO, _LAST = range(4)  # stages that are run
_LAYERS = 1, 1, 2, 1
Pair = tuple[int, int]  # at the two micro-batches of a Line


class Line(NamedTuple):
    """Micro-batches of ``base`` sequences and of ``step`` more, and how many steps from the base another lies."""

    base: int
    step: int
    steps: int

    def at(self, pair: Pair) -> int:
        """Returns the value there."""
        return pair[0] + (pair[1] - pair[0]) * self.steps

    def call(self, pair: tuple[Entry, Entry]) -> Entry:
        """Returns the call there."""
        one, two = pair
        numbers = "read", "written", "least", "flops", "wire", "scores"
        at: dict[str, Any] = {name: self.at((getattr(one, name), getattr(two, name))) for name in numbers}
        return one._replace(**at)


def line(job: Job, split: Split) -> Line:
    """Returns the line that a split's micro-batch lies on; of one that lies on none a line of one point."""
    unit = split.tp // math.gcd(job.seq, split.tp)  # sequences whose rows are cut evenly
    base = max(2, unit)
    if split.micro_batch < base or split.micro_batch % unit:
        return Line(split.micro_batch, 0, 0)
    return Line(base, unit, (split.micro_batch - base) // unit)


class Counted(NamedTuple):
    """A sum of stages' runs, some of them subtracted: how often each call occurs, at either micro-batch, and bytes."""

    passes: Mapping[str, Mapping[tuple[Entry, Entry], int]]
    saved: Pair
    held: Pair


class Runs(NamedTuple):
    """Pieces as counted; ``blocks`` by window.  ``beside``: of each stage that ran, the most bytes in a pass."""

    embedding: Counted
    blocks: Mapping[int | None, Counted]
    head: Counted
    border: Counted
    beside: Sequence[Pair]
    rows: Pair


class Parameters(NamedTuple):
    """Elements on a rank; ``shared``: of the head's, those that the embedding on the same rank has."""

    embedding: int
    block: int
    head: int
    border: int
    shared: int


class LedgerCosts:
    """The pieces of tpfuse's own models on a cluster, kept by what they depend on: a call costs a dry run only once.

    ValueError, as at run time, for sizes that cannot be split, and of the device for a dtype that it does not know.  It
    is called in a process that is in no process group.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._runs: dict[tuple[Any, ...], Runs] = {}
        self._parameters: dict[tuple[Any, ...], Parameters] = {}
        self._pieces: dict[tuple[Any, ...], Pieces] = {}

    def __call__(self, job: Job, split: Split) -> Pieces:
        chains = placement(split.schedule, split.pp, split.chunks)
        stages, layers = len(chains[0]), job.config.num_layers
        check(stages <= layers, f"plan: {layers} layers cannot be cut into {stages} stages")
        together = bool({chain[0] for chain in chains} & {chain[-1] for chain in chains})
        shape = job.config, job.seq, job.dtype, split.tp
        how = split.saving, split.full, SCHEDULES[split.schedule].split, split.micro_batch
        found = (*shape, *how, together)
        if found not in self._pieces:
            self._pieces[found] = self._priced(job, split, together)
        return self._pieces[found]

    def _priced(self, job: Job, split: Split, together: bool) -> Pieces:
        shape = job.config, job.seq, job.dtype, split.tp
        if shape not in self._parameters:
            self._parameters[shape] = parameters(job, split.tp)
        own = self._parameters[shape]
        where = line(job, split)
        key = *shape, split.saving, split.full, SCHEDULES[split.schedule].split, where[:2]
        if key not in self._runs:
            self._runs[key] = counted(job, split, where)
        runs = self._runs[key]

        def piece(of: Counted, stage: int, elements: int) -> Piece:
            calls = {kind: [(where.call(pair), n) for pair, n in of.passes[kind].items()] for kind in KINDS}
            return Piece(
                {kind: self._seconds(calls[kind], job.dtype, split) for kind in KINDS},
                saved=where.at(of.saved),
                held=where.at(of.held),
                transient=where.at(runs.beside[stage]),
                parameters=elements,
            )

        blocks = {window: piece(of, _MIDDLE, own.block) for window, of in runs.blocks.items()}
        return Pieces(
            piece(runs.embedding, _FIRST, own.embedding),
            tuple(blocks[window] for window in job.config.windows),
            piece(runs.head, _LAST, own.head - together * own.shared),
            rows=where.at(runs.rows),
            border=piece(runs.border, _MIDDLE, own.border),
        )

    def _seconds(self, calls: Sequence[tuple[Entry, int]], dtype: torch.dtype, split: Split) -> dict[str, float]:
        """Returns the seconds of a pass, by where they go; a message that a fused op sends while it computes is what
        it takes longer."""
        took = dict.fromkeys((GEMM, ATTENTION, MEMORY, TP), 0.0)
        for e, count in calls:
            computed = self.cluster.device.seconds(e, dtype)
            if e.kind != COMMUNICATION:
                took[e.kind if e.kind in took else MEMORY] += count * computed
            if e.wire:
                took[TP] += count * max(0.0, over_tp(e.op, e.wire, split, self.cluster) - computed)
        return took


def counted(job: Job, split: Split, where: Line) -> Runs:
    """Runs the stages of a job at the micro-batches of a line."""
    config = job.config
    kinds = {window: config.windows.index(window) for window in config.windows}
    with fake_world(split.tp) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=True)
        every = [_stages(_alike(config, layer, sum(_LAYERS)), job, split, (where, tp)) for layer in kinds.values()]
    stages = every[0]
    made = [_counted(one, two) for one, two in stages]
    block = _sum((1, made[_TWO]), (-1, made[_MIDDLE]))
    border = _sum((1, made[_MIDDLE]), (-1, block))
    blocks = {
        window: _sum((1, _counted(*own[_TWO])), (-1, _counted(*own[_MIDDLE])))
        for window, own in zip(kinds, every, strict=True)
    }
    return Runs(
        _sum((1, made[_FIRST]), (-1, block)),
        blocks,
        _sum((1, made[_LAST]), (-1, block), (-1, border)),
        border,
        [(max(one.beside.values()), max(two.beside.values())) for one, two in stages],
        rows=(stages[0][0].rows, stages[0][1].rows),
    )


def parameters(job: Job, tp: int) -> Parameters:
    """Counts the elements of a rank's pieces."""
    config, how = with_layers(job.config, 3), dict[str, Any](saving="fastest", dtype=job.dtype)
    with fake_world(tp) as mesh:
        group = TensorParallel(mesh["tp"], sequence_parallel=True)
        of = [build(config, tp=group, stage=Stage(r, 3, layers=(1, 1, 1)), **how) for r in range(3)]
        whole = build(config, tp=group, **how)
    size = lambda module: sum(p.numel() for p in module.parameters())
    block = size(whole.blocks[0])
    first, middle, last = (size(model) - block for model in of)
    head = last - middle
    return Parameters(first, block, head, middle, shared=first + 3 * block + head - size(whole))


def _alike(config: ModelConfig, layer: int, count: int) -> ModelConfig:
    """Returns a model of ``count`` blocks, all as that of ``layer``."""
    types = getattr(config, "layer_types", None)
    more: dict[str, Any] = {} if types is None else dict(layer_types=(types[layer],) * count)
    return replace(config, num_layers=count, **more)


def _stages(
    config: ModelConfig, job: Job, split: Split, place: tuple[Line, TensorParallel]
) -> list[tuple[StageRun, StageRun]]:
    """Runs the stages, all held by one model, at either micro-batch."""
    where, tp = place
    stage = Stage(0, 1, "interleaved", len(_LAYERS), _LAYERS)
    model = build(config, tp=tp, saving=split.saving, full=split.full, dtype=job.dtype, stage=stage)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    later = SCHEDULES[split.schedule].split
    plan = Plan(tp=split.tp, seq=job.seq, micro_batch=where.base, saving=split.saving, dtype=job.dtype, full=split.full)
    more = plan._replace(micro_batch=where.base + where.step)
    one = [run_stage(model, chunk, plan, split=later) for chunk in model.chunks]
    two = [run_stage(model, chunk, more, split=later) for chunk in model.chunks] if where.step else one
    return list(zip(one, two, strict=True))


def _counted(one: StageRun, two: StageRun) -> Counted:
    """Puts the calls of two runs side by side."""
    passes = {
        kind: Counter(zip(map(_bare, one.passes[kind]), map(_bare, two.passes[kind]), strict=True)) for kind in KINDS
    }
    return Counted(passes, (one.saved, two.saved), (one.held, two.held))


def _bare(e: Entry) -> Entry:
    """Returns what calls of equal cost have in common."""
    return e._replace(inputs=(), outputs=(), seconds=0.0)


def _sum(*terms: tuple[int, Counted]) -> Counted:
    passes = {kind: Counter[tuple[Entry, Entry]]() for kind in KINDS}
    for sign, of in terms:
        for kind, calls in of.passes.items():
            for pair, count in calls.items():
                passes[kind][pair] += sign * count
    saved, held = (_added((sign, getattr(of, name)) for sign, of in terms) for name in ("saved", "held"))
    return Counted({kind: {p: n for p, n in calls.items() if n} for kind, calls in passes.items()}, saved, held)


def _added(terms: Iterable[tuple[int, Pair]]) -> Pair:
    signed = [(sign * one, sign * two) for sign, (one, two) in terms]
    return sum(one for one, _ in signed), sum(two for _, two in signed)
