"""Stages as spans of blocks: what any run of a model's blocks costs, and the partition of blocks into stages.

Pieces become rows of an array, so a span's cost is a difference of cumulative sums.  The partition is the one whose
slowest stage is fastest: a pipeline of m micro-batches takes about sum t + (m - 1) max t, t the seconds of its stages;
the sum is the model's for any partition, so that the slowest stage decides (Zheng et al. 2022, Alpa, arXiv:2201.12023,
equation 2).
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...pipeline.action import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from ...pipeline.placement import partition
from ...pipeline.schedules import EVERY
from .split import ATTENTION, GEMM, PARTS, CostFunction, Elements, Job, PieceCost, Pieces, Split

Array = np.ndarray[Any, Any]
_SIZES = "saved", "held", "parameters", "experts"
_PASSES = len(KINDS) * len(PARTS)


class SpanCosts(NamedTuple):
    """Costs of a stage for each span of blocks, at [i, j] those i to j (excluded); fields as of Stages, and
    ``transient``: the most bytes that a pass has alive besides what it keeps."""

    both: Array
    saved: Array
    held: Array
    parameters: Array
    experts: Array
    transient: Array


class Spans:
    """The pieces of a model as arrays; ``split``: the schedule runs a backward pass as I and W, whose sum is B."""

    def __init__(self, pieces: Pieces, *, split: bool):
        self.pieces = pieces
        self.layers = len(pieces.blocks)
        blocks = [_row(block, split) for block in pieces.blocks]
        self._sums = np.cumsum([np.zeros_like(blocks[0]), *blocks], axis=0)
        self._embedding, self._head = _row(pieces.embedding, split), _row(pieces.head, split)
        self._border = _row(pieces.border, split) if pieces.border else np.zeros_like(self._head)
        self.least_transient = min(block.transient for block in pieces.blocks)
        self._spans: dict[tuple[bool, bool], SpanCosts] = {}  # by whether the stage has the embedding, and the head
        self._shares: dict[int, tuple[Array, tuple[float, float, float]]] = {}  # by dp: elements of the pieces
        self._totals: dict[int, Stages] = {}
        self._partitions: dict[int, tuple[int, ...] | None] = {}

    def cut(self, layers: tuple[int, ...]) -> "Stages":
        """Returns the stages of so many blocks each."""
        return Stages(_spans(self._sums, (self._embedding, self._border, self._head), layers))

    def elements(self, layers: tuple[int, ...], split: Split) -> Elements:
        """Returns each stage's elements: on the rank, in its FSDP shard, and gathered at once.  A pipeline stage is
        gathered whole, parameters and gradients; without a pipeline, its two largest units, which are the blocks and
        all that is outside blocks."""
        local, shard = (self._stage_elements(layers, shards) for shards in (1, split.shards))
        experts = self.cut(layers).experts
        if split.pp > 1:
            return Elements(local, shard, 2 * local)
        blocks = [block.parameters - block.experts for block in self.pieces.blocks]
        gathered = sum(sorted([*blocks, float((local - experts).sum()) - sum(blocks)])[-2:])
        return Elements(local, shard, np.full(len(layers), gathered), experts)

    def shard_fraction(self, shards: int) -> float:
        """Returns the fraction of the model's elements that FSDP leaves a rank: 1 / shards where all rows divide
        evenly."""
        return float(self._stage_elements((self.layers,), shards)[0] / self._stage_elements((self.layers,), 1)[0])

    def _stage_elements(self, layers: tuple[int, ...], dp: int) -> Array:
        """Returns the elements of stages that FSDP over ``dp`` ranks leaves a rank."""
        if dp not in self._shares:
            outer = self.pieces.embedding, self.pieces.border, self.pieces.head
            embedding, border, head = (piece.share(dp) if piece else 0.0 for piece in outer)
            shares = {id(block): block.share(dp) for block in {id(b): b for b in self.pieces.blocks}.values()}
            sums = np.cumsum([0.0, *(shares[id(block)] for block in self.pieces.blocks)])
            self._shares[dp] = sums, (embedding, border, head)
        sums, ends = self._shares[dp]
        return _spans(sums, ends, layers)

    def transient(self, layers: tuple[int, ...]) -> Array:
        """Returns, for each of the stages of so many blocks, the most bytes that a pass has alive besides what it
        keeps."""
        ends = np.cumsum([0, *layers]).tolist()
        stages = (self.pieces.stage(range(begin, end)) for begin, end in zip(ends, ends[1:]))
        return np.array([max(piece.transient for piece in stage) for stage in stages], dtype=float)

    def _span_transients(self, ends: tuple[bool, bool]) -> Array:
        """Returns the most bytes that a pass of a stage has alive, for each span of blocks, with embedding and head as
        ``ends`` say."""
        embedding, head = self.pieces.embedding if ends[0] else self.pieces.border, self.pieces.head
        least = max((piece.transient for piece in (embedding, head if ends[1] else None) if piece), default=0.0)
        most = np.full((self.layers + 1, self.layers + 1), least)
        blocks = np.array([block.transient for block in self.pieces.blocks], dtype=float)
        for i in range(self.layers):
            most[i, i + 1 :] = np.maximum(least, np.maximum.accumulate(blocks[i:]))
        return most

    def total(self, count: int) -> "Stages":
        """Returns the sum of ``count`` stages, as one stage."""
        if count not in self._totals:
            rows = self._sums[-1] + self._embedding + self._head + (count - 1) * self._border
            self._totals[count] = Stages(rows[None])
        return self._totals[count]

    def fastest(self, count: int) -> tuple[int, ...] | None:
        """Returns the partition into ``count`` stages whose slowest is fastest, whatever their memory."""
        if count not in self._partitions:
            self._partitions[count] = partition([self.span_costs(stage, count).both for stage in range(count)])
        return self._partitions[count]

    @cached_property
    def recompute(self) -> float:
        """Seconds of a micro-batch in which the GEMMs and attention of all blocks run forward: at least what
        recomputing the blocks adds."""
        forward = Stages(self._sums[-1][None]).parts[0, KINDS.index(FORWARD)]
        return float(sum(forward[PARTS.index(part)] for part in (GEMM, ATTENTION)))

    def span_costs(self, stage: int, count: int) -> SpanCosts:
        """Returns the costs of stage number ``stage`` of ``count``; all middle stages have the same."""
        ends = stage == 0, stage == count - 1
        if ends not in self._spans:
            extra = (self._embedding if ends[0] else self._border) + (self._head if ends[1] else 0)
            stages = Stages(self._sums[None, :] - self._sums[:, None] + extra)
            sums = (np.ascontiguousarray(getattr(stages, x)) for x in SpanCosts._fields[:-1])
            self._spans[ends] = SpanCosts._make([*sums, self._span_transients(ends)])
        return self._spans[ends]


def _spans(sums: Array, ends: tuple[Any, Any, Any], layers: tuple[int, ...]) -> Array:
    """Returns the sums of stages of so many blocks, from cumulative sums over blocks and those of embedding, border and
    head."""
    embedding, border, head = ends
    stages: Array = np.diff(sums[np.cumsum([0, *layers])], axis=0)
    stages[0] += embedding
    stages[1:] += border
    stages[-1] += head
    return stages


class Stages:
    """Costs of stages, from rows of an array's last axis.

    ``parts`` [..., kind, part], ``passes`` [..., kind]: seconds of a micro-batch; ``saved``, ``held``, ``parameters``,
    ``experts``: as of PieceCost.
    """

    def __init__(self, rows: Array):
        self.parts = rows[..., :_PASSES].reshape(*rows.shape[:-1], len(KINDS), len(PARTS))
        self.passes = self.parts.sum(-1)
        self.saved, self.held, self.parameters, self.experts = (rows[..., _PASSES + i] for i in range(len(_SIZES)))

    def seconds(self, kind: str) -> Array:
        return self.passes[..., KINDS.index(kind)]

    @property
    def both(self) -> Array:
        """Seconds of a micro-batch, forward and backward."""
        return self.seconds(FORWARD) + self.seconds(BACKWARD)


def _row(piece: PieceCost, split: bool) -> Array:
    passes = {kind: [piece.passes[kind].get(part, 0.0) for part in PARTS] for kind in KINDS}
    if split:
        passes[BACKWARD] = [i + w for i, w in zip(passes[INPUT], passes[WEIGHT], strict=True)]
    return np.array([*sum((passes[kind] for kind in KINDS), []), *(getattr(piece, size) for size in _SIZES)])


class SpanCache:
    """The spans of one model, shared by all searches over the same costs, whatever the batch."""

    def __init__(self) -> None:
        self._spans: dict[tuple[Any, ...], Spans | ValueError] = {}

    def spans(self, job: Job, split: Split, pieces: CostFunction) -> Spans:
        """Returns the spans of a split; ValueError where the model cannot be split so."""
        # Without a pipeline, and under some schedules, both ends are on one rank, which holds a tied embedding once.
        schedule = EVERY[split.schedule]
        tied = split.pp == 1 or schedule.v or schedule.chains > 1
        sizes = split.tp, split.cp, split.cp_kind, split.expert_replicas, split.micro_batch
        key = *sizes, split.saving, split.full, schedule.split, tied, split.pp == 1
        if key not in self._spans:
            try:
                self._spans[key] = Spans(pieces(job, split), split=schedule.split)
            except ValueError as error:
                self._spans[key] = error
        spans = self._spans[key]
        if isinstance(spans, ValueError):
            raise spans
        return spans
