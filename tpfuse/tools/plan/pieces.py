"""Costs of a model's pieces, from dry runs of its real stages on meta tensors.

Four stages of a few blocks run under the ledger: the first, two in the middle of one block and of two, and the last.
Their differences are the pieces, call by call:

    block      the middle of two blocks less that of one
    border     the middle of one block less a block
    embedding  the first stage less its block
    head       the last stage less its block and the border

so that the pieces of any stage add up to what it runs, including norms that stand alone at its ends where a fused op
would have computed them.  Blocks of each kind (a window of attention, an MLP or experts) run by themselves; where a
model has several, the pieces add up op by op, since the last call of a stage is of its own last block.  Each
micro-batch size is run separately, because not all calls are linear in the rows: a norm's partial sums stop growing
where all multiprocessors are busy, an embedding's are cut by the root of the rows.  Each call takes the device's
seconds for it.  Parameters have gradients already, to which each micro-batch but a step's first adds.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...kernels.runtime.errors import check
from ...kernels.runtime.launch import pretending
from ...layers.moe import ParallelMoE
from ...layers.shards import same_on_replicas
from ...models.config.model import ModelConfig
from ...models.model import Model
from ...pipeline.action import KINDS
from ...pipeline.placement import Chunk, Stage
from ...pipeline.schedules import EVERY, placement
from ..ledger.aten import COMMUNICATION
from ..ledger.dryrun import Plan, fake_world, planned_model
from ..ledger.layer import LayerKind, layer_kinds, with_layers
from ..ledger.recorder import Entry
from ..ledger.stages import StageRun, run_stage
from .cluster import Cluster
from .messages import over_cp, over_tp
from .split import CP, MEMORY, PARTS, TP, Job, PieceCost, Pieces, Split

_FIRST, _MIDDLE, _TWO, _LAST = range(4)  # stages that are run
_LAYERS = 1, 1, 2, 1


class PieceCalls(NamedTuple):
    """Calls of a piece, a sum of stages' runs some of which are subtracted: how often each call occurs in a pass, and
    bytes.  ``transient``: of the stage that it is counted as a part of, the most alive in a pass besides those it
    keeps."""

    passes: Mapping[str, Mapping[Entry, int]]
    saved: int
    held: int
    transient: int


class PieceRuns(NamedTuple):
    """Calls of all pieces; ``blocks`` by their kind.  ``hop_bytes``: of h, sent to the next stage."""

    embedding: PieceCalls
    blocks: Mapping[LayerKind, PieceCalls]
    head: PieceCalls
    border: PieceCalls
    hop_bytes: int


ShapeCounts = Counter[tuple[int, int]]  # (rows, elements of a row) -> number of parameters of that size


class PieceShapes(NamedTuple):
    """Parameters of a rank's pieces, without experts that are divided among replicas, of whose elements a block has
    ``experts``.  ``shared``: those of the head that the embedding on the same rank has too."""

    embedding: ShapeCounts
    blocks: Mapping[LayerKind, ShapeCounts]
    experts: Mapping[LayerKind, int]
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
        model = job.config, job.dtype, split.tp, split.expert_replicas
        averaged = split.over_replicas and split.pp == 1
        sizes = *model, averaged, split.cp, split.cp_kind, job.seq, split.micro_batch
        key = *sizes, split.saving, split.full, EVERY[split.schedule].split
        if model not in self._shapes:
            self._shapes[model] = piece_shapes(job, split)
        shapes = self._shapes[model]
        if key not in self._pieces:
            if key not in self._runs:
                with self._launching():
                    self._runs[key] = run_pieces(job, split)
            self._pieces[key] = self._priced(job, split, self._runs[key], shapes)
        both_ends_on_a_rank = bool({chain[0] for chain in chains} & {chain[-1] for chain in chains})
        if not (both_ends_on_a_rank and shapes.shared):
            return self._pieces[key]
        tied = key, stages == 1
        if tied not in self._tied:
            self._tied[tied] = _tied(self._pieces[key], shapes, size=job.dtype.itemsize if stages == 1 else 0)
        return self._tied[tied]

    def _launching(self) -> contextlib.AbstractContextManager[None]:
        """Takes the launch parameters, and so the bytes, of the device's kernels for a while."""
        arch = self.cluster.device.arch
        return pretending(arch) if arch else contextlib.nullcontext()

    def _priced(self, job: Job, split: Split, runs: PieceRuns, shapes: PieceShapes) -> Pieces:
        piece = functools.partial(self._piece, job, split)
        blocks = {
            kind: piece(calls, shapes.blocks[kind], experts=shapes.experts[kind]) for kind, calls in runs.blocks.items()
        }
        return Pieces(
            piece(runs.embedding, shapes.embedding),
            tuple(blocks[kind] for kind in layer_kinds(job.config)),
            piece(runs.head, shapes.head),
            hop_bytes=runs.hop_bytes,
            border=piece(runs.border, shapes.border),
        )

    def _piece(self, job: Job, split: Split, calls: PieceCalls, sizes: ShapeCounts, *, experts: int = 0) -> PieceCost:
        passes = {kind: self._seconds(calls.passes[kind], job.dtype, split) for kind in KINDS}
        return PieceCost(
            passes, calls.saved, calls.held, calls.transient, parameters=_elements(sizes) + experts, experts=experts,
            sizes=sizes,
        )  # fmt: skip

    def _seconds(self, calls: Mapping[Entry, int], dtype: torch.dtype, split: Split) -> dict[str, float]:
        """Returns the seconds of a pass by PARTS; of a message that a fused op sends while it computes, only what
        exceeds the computing."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for e, count in calls.items():
            computed = self.cluster.device.seconds(e, dtype)
            if e.kind != COMMUNICATION:
                seconds[e.kind if e.kind in seconds else MEMORY] += count * computed
            if e.wire and e.group == CP:
                seconds[CP] += count * max(0.0, over_cp(e.op, e.wire, split, self.cluster) - computed)
            elif e.wire:
                sent = over_tp(e.op, e.wire, split, self.cluster, ranks=e.ranks)
                seconds[TP] += count * max(0.0, sent - computed)
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
    kinds, plan = layer_kinds(job.config), split.plan(job)
    first, last = kinds[0], kinds[-1]
    as_chunks = Stage(0, 1, "interleaved", chunks=len(_LAYERS), layers=_LAYERS)

    def run(kind: LayerKind) -> dict[int, StageRun]:
        """Returns the runs of the stages that pieces of this kind are made of."""
        model = planned_model(_alike(job.config, kind, sum(_LAYERS)), plan, mesh, as_chunks)
        for layer in model.modules():
            if isinstance(layer, ParallelMoE) and split.pp == 1:  # whose replicas average gradients
                layer.experts = layer.experts.with_divisor(layer.experts.replicas)
        needed = [_MIDDLE, _TWO, *[_FIRST] * (kind == first), *[_LAST] * (kind == last)]
        chunks, waiting = model.stages.chunks, EVERY[split.schedule].split
        return {stage: _stage(model, chunks[stage], plan, split=waiting) for stage in needed}

    with fake_world(split.tp, split.expert_replicas, cp=split.cp) as mesh:
        runs = {kind: run(kind) for kind in dict.fromkeys(kinds)}
    calls = {kind: {stage: _calls(run) for stage, run in stages.items()} for kind, stages in runs.items()}
    blocks = {kind: _sum((-1, stages[_MIDDLE]), (1, stages[_TWO])) for kind, stages in calls.items()}
    border = _sum((1, calls[first][_MIDDLE]), (-1, blocks[first]))
    return PieceRuns(
        _sum((1, calls[first][_FIRST]), (-1, blocks[first])),
        blocks,
        _sum((1, calls[last][_LAST]), (-1, blocks[last]), (-1, border)),
        border,
        hop_bytes=runs[first][_FIRST].rows,
    )


def piece_shapes(job: Job, split: Split) -> PieceShapes:
    """Counts the parameters of a rank's pieces, by their sizes."""
    kinds, plan = layer_kinds(job.config), split.plan(job)._replace(cp=1)  # which has all weights too
    with fake_world(split.tp, split.expert_replicas) as mesh:
        stages = [None, *(Stage(r, 3, layers=(1, 1, 1)) for r in range(3))]
        models = (planned_model(with_layers(job.config, 3), plan, mesh, stage) for stage in stages)
        unsplit, *ends = (_shapes(same_on_replicas(model)) for model in models)
        alone = {kind: planned_model(_alike(job.config, kind, 1), plan, mesh) for kind in dict.fromkeys(kinds)}
    of_kind = {kind: model.blocks[0] for kind, model in alone.items()}
    blocks = {kind: _shapes(same_on_replicas(block)) for kind, block in of_kind.items()}
    experts = {kind: sum(p.numel() for p in block.parameters()) for kind, block in of_kind.items()}
    block = next(iter(blocks.values()))
    embedding, border, end = (_less(shapes, block) for shapes in ends)
    head = _less(end, border)
    untied = Counter(embedding)
    untied.update(head)
    untied.update({size: 3 * count for size, count in block.items()})
    return PieceShapes(
        embedding,
        blocks,
        {kind: count - _elements(blocks[kind]) for kind, count in experts.items()},
        head,
        border=border,
        shared=_less(untied, unsplit),
    )


def _shapes(parameters: Iterable[nn.Parameter]) -> ShapeCounts:
    return Counter((len(p), math.prod(p.shape[1:])) for p in parameters)


def _less(counts: ShapeCounts, subtracted: ShapeCounts) -> ShapeCounts:
    """Returns the difference; counts may be negative."""
    left = Counter(counts)
    left.subtract(subtracted)
    return Counter({size: count for size, count in left.items() if count})


def _elements(sizes: ShapeCounts) -> int:
    return sum(count * rows * columns for (rows, columns), count in sizes.items())


def _alike(config: ModelConfig, kind: LayerKind, layers: int) -> ModelConfig:
    """Returns the config of a model all of whose ``layers`` are of one kind of this one's."""
    return with_layers(config, layers, like=layer_kinds(config).index(kind))


def _stage(model: Model, chunk: Chunk, plan: Plan, *, split: bool) -> StageRun:
    """Runs a micro-batch through a stage, whose parameters have gradients already."""
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    return run_stage(model, chunk, plan, split=split)


def _calls(run: StageRun) -> PieceCalls:
    passes = {kind: Counter(map(bare, run.passes[kind])) for kind in KINDS}
    return PieceCalls(passes, run.saved, run.held, transient=max(run.temporaries.values()))


def bare(e: Entry) -> Entry:
    """Returns an entry reduced to the fields that calls of equal cost share."""
    return e._replace(inputs=(), outputs=(), seconds=0.0, stretch="")


def _sum(*terms: tuple[int, PieceCalls]) -> PieceCalls:
    """Returns the sum of pieces, each times its sign; its transient is that of the first."""
    passes = {kind: Counter[Entry]() for kind in KINDS}
    for sign, piece in terms:
        for kind, calls in piece.passes.items():
            for e, count in calls.items():
                passes[kind][e] += sign * count
    nonzero = {kind: {e: n for e, n in calls.items() if n} for kind, calls in passes.items()}
    saved, held = (sum(sign * getattr(p, size) for sign, p in terms) for size in ("saved", "held"))
    return PieceCalls(nonzero, saved, held, transient=terms[0][1].transient)
