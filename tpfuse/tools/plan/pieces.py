"""What the pieces of a model cost, from dry runs of its real stages on meta tensors.

Four stages of a few blocks run under the ledger: the first, two in the middle of one block and of two, and the last.
Their differences are the pieces, call by call:

    block      the middle of two blocks less that of one
    border     the middle of one block less a block
    embedding  the first stage less its block
    head       the last stage less its block and the border

so that the pieces of any stage add up to what it runs, where norms that a fused op would have made stand alone at its
ends.  Every micro-batch has runs of its own, for not all calls are linear in the rows: a norm's partial sums stop to
grow where all multiprocessors are busy, an embedding's are cut by the root of the rows.  Each call takes what the
device needs for it.  Parameters have gradients already, which each micro-batch but a step's first adds to.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ...kernels.runtime.errors import check
from ...kernels.runtime.launch import pretending
from ...models.config.model import ModelConfig
from ...parallel import TensorParallel
from ...pipeline.action import KINDS
from ...pipeline.placement import Stage
from ...pipeline.schedules import SCHEDULES, placement
from ..ledger.aten import COMMUNICATION
from ..ledger.dryrun import Plan, fake_world
from ..ledger.layer import build, with_layers
from ..ledger.recorder import Entry
from ..ledger.stages import StageRun, run_stage
from .cluster import Cluster
from .messages import over_tp
from .split import ATTENTION, GEMM, MEMORY, TP, Job, Piece, Pieces, Split

_FIRST, _MIDDLE, _TWO, _LAST = range(4)  # stages that are run
_LAYERS = 1, 1, 2, 1


class Counted(NamedTuple):
    """A sum of stages' runs, some of them subtracted: how often each call occurs in a pass, and bytes."""

    passes: Mapping[str, Mapping[Entry, int]]
    saved: int
    held: int


class Runs(NamedTuple):
    """Pieces as counted; ``blocks`` by window.  ``beside``: of each stage that ran, the most bytes in a pass."""

    embedding: Counted
    blocks: Mapping[int | None, Counted]
    head: Counted
    border: Counted
    beside: Sequence[int]
    rows: int


Sizes = Counter[tuple[int, int]]  # (rows, elements of one) -> how many parameters are so large


class Parameters(NamedTuple):
    """Those on a rank; ``shared``: of the head's, those that the embedding on the same rank has."""

    embedding: Sizes
    block: Sizes
    head: Sizes
    border: Sizes
    shared: Sizes


class LedgerCosts:
    """The pieces of tpfuse's own models on a cluster, kept by what they depend on: a call costs a dry run only once.

    ValueError, as at run time, for sizes that cannot be split, and of the device for a dtype that it does not know.  It
    is called in a process that is in no process group.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._parameters: dict[tuple[Any, ...], Parameters] = {}
        self._pieces: dict[tuple[Any, ...], Pieces] = {}
        self._joined: dict[tuple[Any, ...], Pieces] = {}
        self._runs: dict[tuple[Any, ...], Runs] = {}

    def on(self, cluster: Cluster) -> "LedgerCosts":
        """Returns the costs on other links between the same devices, which share all dry runs."""
        made = LedgerCosts(cluster)
        made._runs, made._parameters = self._runs, self._parameters
        return made

    def __call__(self, job: Job, split: Split) -> Pieces:
        chains = placement(split.schedule, split.pp, split.chunks)
        stages, layers = len(chains[0]), job.config.num_layers
        check(stages <= layers, f"plan: {layers} layers cannot be cut into {stages} stages")
        shape = job.config, job.dtype, split.tp
        how = job.seq, split.micro_batch, split.saving, split.full, SCHEDULES[split.schedule].split
        found = (*shape, *how)
        if found not in self._pieces:
            if shape not in self._parameters:
                self._parameters[shape] = parameters(job, split.tp)
            self._pieces[found] = self._priced(job, split, self._parameters[shape])
        together = bool({chain[0] for chain in chains} & {chain[-1] for chain in chains})  # both ends are on one rank
        if not (together and self._parameters[shape].shared):
            return self._pieces[found]
        ends = found, stages == 1
        if ends not in self._joined:
            alone = job.dtype.itemsize if stages == 1 else 0
            self._joined[ends] = _joined(self._pieces[found], self._parameters[shape], size=alone)
        return self._joined[ends]

    def _priced(self, job: Job, split: Split, own: Parameters) -> Pieces:
        shape = job.config, job.dtype, job.seq, split.tp, split.micro_batch
        key = *shape, split.saving, split.full, SCHEDULES[split.schedule].split
        if key not in self._runs:
            with pretending(self.cluster.device.arch) if self.cluster.device.arch else contextlib.nullcontext():
                self._runs[key] = counted(job, split)
        runs = self._runs[key]

        def piece(of: Counted, stage: int, sizes: Sizes) -> Piece:
            passes = {kind: self._seconds(of.passes[kind], job.dtype, split) for kind in KINDS}
            alive, elements = runs.beside[stage], _elements(sizes)
            return Piece(passes, of.saved, of.held, transient=alive, parameters=elements, sizes=sizes)

        blocks = {window: piece(of, _MIDDLE, own.block) for window, of in runs.blocks.items()}
        return Pieces(
            piece(runs.embedding, _FIRST, own.embedding),
            tuple(blocks[window] for window in job.config.windows),
            piece(runs.head, _LAST, own.head),
            rows=runs.rows,
            border=piece(runs.border, _MIDDLE, own.border),
        )

    def _seconds(self, calls: Mapping[Entry, int], dtype: torch.dtype, split: Split) -> dict[str, float]:
        """Returns the seconds of a pass, by where they go; a message that a fused op sends while it computes is what
        it takes longer."""
        took = dict.fromkeys((GEMM, ATTENTION, MEMORY, TP), 0.0)
        for e, count in calls.items():
            computed = self.cluster.device.seconds(e, dtype)
            if e.kind != COMMUNICATION:
                took[e.kind if e.kind in took else MEMORY] += count * computed
            if e.wire:
                took[TP] += count * max(0.0, over_tp(e.op, e.wire, split, self.cluster) - computed)
        return took


def _joined(pieces: Pieces, own: Parameters, *, size: int) -> Pieces:
    """Returns the pieces where embedding and head are one parameter of a rank.

    ``size``: bytes of an element of its gradient, which in a single stage stays from the head to the embedding, where
    what the head had saved was; 0 where they are of different stages, each of which adds its own at once.
    """
    sizes, kept = _less(own.head, own.shared), max(0, size * _elements(own.shared) - pieces.head.saved)
    longer = {id(piece): piece._replace(transient=piece.transient + kept) for piece in pieces.blocks}
    return pieces._replace(
        blocks=tuple(longer[id(piece)] for piece in pieces.blocks),
        head=pieces.head._replace(parameters=_elements(sizes), sizes=sizes),
    )


def counted(job: Job, split: Split) -> Runs:
    """Runs the stages of a job at a split's micro-batch, and takes them apart."""
    config = job.config
    kinds = {window: config.windows.index(window) for window in config.windows}
    with fake_world(split.tp) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=True)
        ran = [_stages(_alike(config, layer), job, split, tp) for layer in kinds.values()]
    every = [[_counted(run) for run in stages] for stages in ran]
    blocks = [_sum((1, stages[_TWO]), (-1, stages[_MIDDLE])) for stages in every]
    block, stages = blocks[0], every[0]
    border = _sum((1, stages[_MIDDLE]), (-1, block))
    return Runs(
        _sum((1, stages[_FIRST]), (-1, block)),
        dict(zip(kinds, blocks, strict=True)),
        _sum((1, stages[_LAST]), (-1, block), (-1, border)),
        border,
        beside=[max(run.beside.values()) for run in ran[0]],
        rows=ran[0][0].rows,
    )


def parameters(job: Job, tp: int) -> Parameters:
    """Counts the parameters of a rank's pieces."""
    config, how = with_layers(job.config, 3), dict[str, Any](saving="fastest", dtype=job.dtype)
    with fake_world(tp) as mesh:
        group = TensorParallel(mesh["tp"], sequence_parallel=True)
        of = [build(config, tp=group, stage=Stage(r, 3, layers=(1, 1, 1)), **how) for r in range(3)]
        whole = build(config, tp=group, **how)
    block = _sizes(whole.blocks[0])
    embedding, border, end = (_less(_sizes(model), block) for model in of)
    head = _less(end, border)
    apart = Counter(embedding)
    apart.update(head)
    apart.update({size: 3 * count for size, count in block.items()})
    return Parameters(embedding, block, head, border, shared=_less(apart, _sizes(whole)))


def _sizes(module: nn.Module) -> Sizes:
    return Counter((len(p), math.prod(p.shape[1:])) for p in module.parameters())


def _less(one: Sizes, other: Sizes) -> Sizes:
    """Returns the difference, of which a count may be negative."""
    left = Counter(one)
    left.subtract(other)
    return Counter({size: count for size, count in left.items() if count})


def _elements(sizes: Sizes) -> int:
    return sum(count * rows * columns for (rows, columns), count in sizes.items())


def _alike(config: ModelConfig, layer: int) -> ModelConfig:
    """Returns a model of blocks that are all as that of ``layer``."""
    count, types = sum(_LAYERS), getattr(config, "layer_types", None)
    more: dict[str, Any] = {} if types is None else dict(layer_types=(types[layer],) * count)
    return replace(config, num_layers=count, **more)


def _stages(config: ModelConfig, job: Job, split: Split, tp: TensorParallel) -> list[StageRun]:
    """Runs the stages, which one model has all of."""
    stage = Stage(0, 1, "interleaved", chunks=len(_LAYERS), layers=_LAYERS)
    model = build(config, tp=tp, saving=split.saving, full=split.full, dtype=job.dtype, stage=stage)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    plan = Plan(split.tp, seq=job.seq, micro_batch=split.micro_batch, dtype=job.dtype)
    return [run_stage(model, chunk, plan, split=SCHEDULES[split.schedule].split) for chunk in model.stages.chunks]


def _counted(run: StageRun) -> Counted:
    return Counted({kind: Counter(map(bare, run.passes[kind])) for kind in KINDS}, run.saved, run.held)


def bare(e: Entry) -> Entry:
    """Returns what calls of equal cost have in common."""
    return e._replace(inputs=(), outputs=(), seconds=0.0)


def _sum(*terms: tuple[int, Counted]) -> Counted:
    passes = {kind: Counter[Entry]() for kind in KINDS}
    for sign, of in terms:
        for kind, calls in of.passes.items():
            for e, count in calls.items():
                passes[kind][e] += sign * count
    kept = {kind: {e: n for e, n in calls.items() if n} for kind, calls in passes.items()}
    return Counted(kept, sum(sign * of.saved for sign, of in terms), sum(sign * of.held for sign, of in terms))
