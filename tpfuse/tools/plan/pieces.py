"""Costs of a model's pieces, from dry runs of its real stages on meta tensors.

Four stages of a few blocks run under the ledger: the first, two in the middle of one block and of two, and the last.
Their differences are the pieces, call by call:

    block      the middle of two blocks less that of one
    border     the middle of one block less a block
    embedding  the first stage less its block
    head       the last stage less its block and the border

so that the pieces of any stage add up to what it runs, including norms that stand alone at its ends where a fused op
would have computed them.  Each micro-batch size is run separately, because not all calls are linear in the rows: a
norm's partial sums stop growing where all multiprocessors are busy, an embedding's are cut by the root of the rows.
Each call takes the device's seconds for it.  Parameters have gradients already, to which each micro-batch but a step's
first adds.
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
from .split import MEMORY, PARTS, TP, Job, PieceCost, Pieces, Split

_FIRST, _MIDDLE, _TWO, _LAST = range(4)  # stages that are run
_LAYERS = 1, 1, 2, 1


class PieceCalls(NamedTuple):
    """Calls of a piece, a sum of stages' runs some of which are subtracted: how often each call occurs in a pass, and
    bytes."""

    passes: Mapping[str, Mapping[Entry, int]]
    saved: int
    held: int


class PieceRuns(NamedTuple):
    """Calls of all pieces; ``blocks`` by attention window.  ``transient``: of each stage that ran, the most bytes alive
    in a pass besides those it keeps.  ``hop_bytes``: of h, sent to the next stage."""

    embedding: PieceCalls
    blocks: Mapping[int | None, PieceCalls]
    head: PieceCalls
    border: PieceCalls
    transient: Sequence[int]
    hop_bytes: int


ShapeCounts = Counter[tuple[int, int]]  # (rows, elements of a row) -> number of parameters of that size


class PieceShapes(NamedTuple):
    """Parameters of a rank's pieces; ``shared``: those of the head that the embedding on the same rank has too."""

    embedding: ShapeCounts
    block: ShapeCounts
    head: ShapeCounts
    border: ShapeCounts
    shared: ShapeCounts


class LedgerCosts:
    """Costs of the pieces of tpfuse's own models on a cluster; each dry run happens once.

    ValueError, as at run time, for sizes that cannot be split, and from the device for a dtype without a peak.  Call it
    in a process that is in no process group.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._shapes: dict[tuple[Any, ...], PieceShapes] = {}
        self._pieces: dict[tuple[Any, ...], Pieces] = {}
        self._tied: dict[tuple[Any, ...], Pieces] = {}
        self._runs: dict[tuple[Any, ...], PieceRuns] = {}

    def with_cluster(self, cluster: Cluster) -> "LedgerCosts":
        """Returns the costs on other links between the same devices, which share all dry runs."""
        costs = LedgerCosts(cluster)
        costs._runs, costs._shapes = self._runs, self._shapes
        return costs

    def __call__(self, job: Job, split: Split) -> Pieces:
        chains = placement(split.schedule, split.pp, split.chunks)
        stages, layers = len(chains[0]), job.config.num_layers
        check(stages <= layers, f"plan: {layers} layers cannot be cut into {stages} stages")
        model = job.config, job.dtype, split.tp
        key = (*model, job.seq, split.micro_batch, split.saving, split.full, SCHEDULES[split.schedule].split)
        if model not in self._shapes:
            self._shapes[model] = piece_shapes(job, split.tp)
        shapes = self._shapes[model]
        if key not in self._pieces:
            if key not in self._runs:
                with pretending(self.cluster.device.arch) if self.cluster.device.arch else contextlib.nullcontext():
                    self._runs[key] = run_pieces(job, split)
            self._pieces[key] = self._priced(job, split, self._runs[key], shapes)
        both_ends_on_a_rank = bool({chain[0] for chain in chains} & {chain[-1] for chain in chains})
        if not (both_ends_on_a_rank and shapes.shared):
            return self._pieces[key]
        tied = key, stages == 1
        if tied not in self._tied:
            self._tied[tied] = _tied(self._pieces[key], shapes, size=job.dtype.itemsize if stages == 1 else 0)
        return self._tied[tied]

    def _priced(self, job: Job, split: Split, runs: PieceRuns, shapes: PieceShapes) -> Pieces:
        def piece(calls: PieceCalls, stage: int, sizes: ShapeCounts) -> PieceCost:
            passes = {kind: self._seconds(calls.passes[kind], job.dtype, split) for kind in KINDS}
            alive, elements = runs.transient[stage], _elements(sizes)
            return PieceCost(passes, calls.saved, calls.held, transient=alive, parameters=elements, sizes=sizes)

        blocks = {window: piece(calls, _MIDDLE, shapes.block) for window, calls in runs.blocks.items()}
        return Pieces(
            piece(runs.embedding, _FIRST, shapes.embedding),
            tuple(blocks[window] for window in job.config.windows),
            piece(runs.head, _LAST, shapes.head),
            hop_bytes=runs.hop_bytes,
            border=piece(runs.border, _MIDDLE, shapes.border),
        )

    def _seconds(self, calls: Mapping[Entry, int], dtype: torch.dtype, split: Split) -> dict[str, float]:
        """Returns the seconds of a pass by PARTS; of a message that a fused op sends while it computes, only what
        exceeds the computing."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for e, count in calls.items():
            computed = self.cluster.device.seconds(e, dtype)
            if e.kind != COMMUNICATION:
                seconds[e.kind if e.kind in seconds else MEMORY] += count * computed
            if e.wire:
                seconds[TP] += count * max(0.0, over_tp(e.op, e.wire, split, self.cluster) - computed)
        return seconds


def _tied(pieces: Pieces, shapes: PieceShapes, *, size: int) -> Pieces:
    """Returns the pieces where embedding and head are one parameter of a rank.

    ``size``: bytes of an element of its gradient, which in a single stage stays alive from the head to the embedding,
    in place of what the head had saved; 0 where they are in different stages, each of which adds its own at once.
    """
    sizes = _less(shapes.head, shapes.shared)
    gradient = max(0, size * _elements(shapes.shared) - pieces.head.saved)
    longer = {id(piece): piece._replace(transient=piece.transient + gradient) for piece in pieces.blocks}
    return pieces._replace(
        blocks=tuple(longer[id(piece)] for piece in pieces.blocks),
        head=pieces.head._replace(parameters=_elements(sizes), sizes=sizes),
    )


def run_pieces(job: Job, split: Split) -> PieceRuns:
    """Runs the stages of a job at a split's micro-batch, and takes them apart."""
    config = job.config
    layers = {window: config.windows.index(window) for window in config.windows}  # one block of each kind
    with fake_world(split.tp) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=True)
        runs = [_stages(_alike(config, layer), job, split, tp) for layer in layers.values()]
    calls = [[_calls(run) for run in stages] for stages in runs]
    blocks = [_sum((1, stages[_TWO]), (-1, stages[_MIDDLE])) for stages in calls]
    block, stages = blocks[0], calls[0]
    border = _sum((1, stages[_MIDDLE]), (-1, block))
    return PieceRuns(
        _sum((1, stages[_FIRST]), (-1, block)),
        dict(zip(layers, blocks, strict=True)),
        _sum((1, stages[_LAST]), (-1, block), (-1, border)),
        border,
        transient=[max(run.temporaries.values()) for run in runs[0]],
        hop_bytes=runs[0][0].rows,
    )


def piece_shapes(job: Job, tp: int) -> PieceShapes:
    """Counts the parameters of a rank's pieces, by their sizes."""
    config = with_layers(job.config, 3)
    with fake_world(tp) as mesh:
        group = TensorParallel(mesh["tp"], sequence_parallel=True)
        stages = [None, *(Stage(r, 3, layers=(1, 1, 1)) for r in range(3))]
        unsplit, *models = (build(config, tp=group, saving="fastest", dtype=job.dtype, stage=s) for s in stages)
    block = _shapes(unsplit.blocks[0])
    embedding, border, end = (_less(_shapes(model), block) for model in models)
    head = _less(end, border)
    untied = Counter(embedding)
    untied.update(head)
    untied.update({size: 3 * count for size, count in block.items()})
    return PieceShapes(embedding, block, head, border, shared=_less(untied, _shapes(unsplit)))


def _shapes(module: nn.Module) -> ShapeCounts:
    return Counter((len(p), math.prod(p.shape[1:])) for p in module.parameters())


def _less(counts: ShapeCounts, subtracted: ShapeCounts) -> ShapeCounts:
    """Returns the difference; counts may be negative."""
    left = Counter(counts)
    left.subtract(subtracted)
    return Counter({size: count for size, count in left.items() if count})


def _elements(sizes: ShapeCounts) -> int:
    return sum(count * rows * columns for (rows, columns), count in sizes.items())


def _alike(config: ModelConfig, layer: int) -> ModelConfig:
    """Returns a model whose blocks are all like that of ``layer``."""
    count, types = sum(_LAYERS), getattr(config, "layer_types", None)
    if types is None:
        return replace(config, num_layers=count)
    return replace(config, num_layers=count, layer_types=(types[layer],) * count)


def _stages(config: ModelConfig, job: Job, split: Split, tp: TensorParallel) -> list[StageRun]:
    """Runs all stages, as chunks of one model."""
    stage = Stage(0, 1, "interleaved", chunks=len(_LAYERS), layers=_LAYERS)
    model = build(config, tp=tp, saving=split.saving, full=split.full, dtype=job.dtype, stage=stage)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    plan = Plan(split.tp, seq=job.seq, micro_batch=split.micro_batch, dtype=job.dtype)
    return [run_stage(model, chunk, plan, split=SCHEDULES[split.schedule].split) for chunk in model.stages.chunks]


def _calls(run: StageRun) -> PieceCalls:
    return PieceCalls({kind: Counter(map(bare, run.passes[kind])) for kind in KINDS}, run.saved, run.held)


def bare(e: Entry) -> Entry:
    """Returns an entry reduced to the fields that calls of equal cost share."""
    return e._replace(inputs=(), outputs=(), seconds=0.0)


def _sum(*terms: tuple[int, PieceCalls]) -> PieceCalls:
    passes = {kind: Counter[Entry]() for kind in KINDS}
    for sign, piece in terms:
        for kind, calls in piece.passes.items():
            for e, count in calls.items():
                passes[kind][e] += sign * count
    nonzero = {kind: {e: n for e, n in calls.items() if n} for kind, calls in passes.items()}
    return PieceCalls(nonzero, sum(sign * p.saved for sign, p in terms), sum(sign * p.held for sign, p in terms))
