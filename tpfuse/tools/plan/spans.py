"""What any run of a model's blocks costs as a stage: its pieces as arrays, of which sums are differences."""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...pipeline.action import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from .layers import cut
from .split import ATTENTION, GEMM, PARTS, Elements, Piece, Pieces, Split
from .state import piece_share

Array = np.ndarray[Any, Any]
_SIZES = "saved", "held", "parameters"
_PASSES = len(KINDS) * len(PARTS)


class Windows(NamedTuple):
    """Of a stage, at each [i, j] as if it held the blocks i to j (excluded): what Stages has of these names."""

    both: Array
    saved: Array
    held: Array
    parameters: Array


class Spans:
    """The pieces of a model; ``split``: whether the schedule runs a backward pass as I and W, of which B is the sum."""

    def __init__(self, pieces: Pieces, *, split: bool):
        self.pieces, self.split = pieces, split
        self.layers = len(pieces.blocks)
        blocks = [_row(block, split) for block in pieces.blocks]
        self._sums = np.cumsum([np.zeros_like(blocks[0]), *blocks], axis=0)
        self._first, self._last = _row(pieces.embedding, split), _row(pieces.head, split)
        self._border = _row(pieces.border, split) if pieces.border else np.zeros_like(self._first)
        self._transient = max(p.transient for p in (*pieces.blocks, *([pieces.border] if pieces.border else [])))
        self._made: dict[tuple[bool, bool], Windows] = {}  # of a first stage, and of a last one
        self._shards: dict[int, tuple[float, float, float, Array]] = {}  # of the pieces, by the ranks that share them
        self._totals: dict[int, Stages] = {}
        self._cuts: dict[int, tuple[int, ...] | None] = {}

    def cut(self, layers: tuple[int, ...]) -> "Stages":
        """Returns the stages of so many blocks each."""
        rows = np.diff(self._sums[np.cumsum([0, *layers])], axis=0)
        rows[0] += self._first
        rows[1:] += self._border
        rows[-1] += self._last
        return Stages(rows)

    def elements(self, layers: tuple[int, ...], split: Split) -> Elements:
        """Returns those of each stage.  Whole are, in a pipeline, the parameters and gradients of all of a sharded
        stage; without, its two largest units, which are the blocks, and all else together."""
        own, shard = (self._of_stages(layers, dp) for dp in (1, split.dp if split.sharded else 1))
        if split.pp > 1:
            return Elements(own, shard, 2 * own)
        blocks = [block.parameters for block in self.pieces.blocks]
        whole = sum(sorted([*blocks, float(own.sum()) - sum(blocks)])[-2:])
        return Elements(own, shard, np.full(len(layers), whole))

    def cut_by(self, dp: int) -> float:
        """Returns the share of the model's elements that FSDP leaves a rank: 1 / dp, where all rows can be shared."""
        return float(self._of_stages((self.layers,), dp)[0] / self._of_stages((self.layers,), 1)[0])

    def _of_stages(self, layers: tuple[int, ...], dp: int) -> Array:
        """Returns the elements of stages, after a cut over ``dp`` ranks."""
        if dp not in self._shards:
            ends = self.pieces.embedding, self.pieces.border, self.pieces.head
            first, border, last = (piece_share(piece, dp) if piece else 0.0 for piece in ends)
            kinds = {id(block): block for block in self.pieces.blocks}  # which repeat
            shares = {key: piece_share(block, dp) for key, block in kinds.items()}
            sums = np.cumsum([0.0, *(shares[id(block)] for block in self.pieces.blocks)])
            self._shards[dp] = first, border, last, sums
        first, border, last, sums = self._shards[dp]
        found: Array = np.diff(sums[np.cumsum([0, *layers])])
        found[0] += first
        found[1:] += border
        found[-1] += last
        return found

    def transient(self, count: int) -> Array:
        """Returns the most bytes that a pass of each of ``count`` stages has beside what it keeps."""
        made = np.full(count, float(self._transient))
        made[0] = max(made[0], self.pieces.embedding.transient)
        made[-1] = max(made[-1], self.pieces.head.transient)
        return made

    def total(self, count: int) -> "Stages":
        """Returns all of ``count`` stages together, as one."""
        if count not in self._totals:
            rows = self._sums[-1] + self._first + self._last + (count - 1) * self._border
            self._totals[count] = Stages(rows[None])
        return self._totals[count]

    def fastest(self, count: int) -> tuple[int, ...] | None:
        """Returns the layers of ``count`` stages whose slowest is fastest, whatever they hold."""
        if count not in self._cuts:
            self._cuts[count] = cut([self.windows(stage, count).both for stage in range(count)])
        return self._cuts[count]

    @cached_property
    def again(self) -> float:
        """Seconds of a micro-batch in which the GEMMs and attention of blocks run forward, as they do once more where
        blocks are recomputed."""
        forward = Stages(self._sums[-1][None]).parts[0, KINDS.index(FORWARD)]
        return float(sum(forward[PARTS.index(part)] for part in (GEMM, ATTENTION)))

    def windows(self, stage: int, count: int) -> Windows:
        """Returns stage number ``stage`` of ``count``: of all in the middle the same."""
        first, last = stage == 0, stage == count - 1
        if (first, last) not in self._made:
            ends = self._first if first else self._border
            stages = Stages(self._sums[None, :] - self._sums[:, None] + (ends + self._last if last else ends))
            self._made[first, last] = Windows(*(np.ascontiguousarray(getattr(stages, x)) for x in Windows._fields))
        return self._made[first, last]


class Stages:
    """Rows of costs, the last axis of an array: of one stage each."""

    def __init__(self, rows: Array):
        times = rows[..., :_PASSES].reshape(*rows.shape[:-1], len(KINDS), len(PARTS))
        self.parts = times  # seconds [..., kind, part]
        self.passes = times.sum(-1)  # [..., kind]
        self.saved, self.held, self.parameters = (rows[..., _PASSES + i] for i in range(len(_SIZES)))

    def seconds(self, kind: str) -> Array:
        """Returns how long a pass takes."""
        made: Array = self.passes[..., KINDS.index(kind)]
        return made

    @property
    def both(self) -> Array:
        """Seconds of a micro-batch, forward and backward."""
        made: Array = self.seconds(FORWARD) + self.seconds(BACKWARD)
        return made


def _row(piece: Piece, split: bool) -> Array:
    passes = {kind: [piece.passes[kind].get(part, 0.0) for part in PARTS] for kind in KINDS}
    if split:
        passes[BACKWARD] = [i + w for i, w in zip(passes[INPUT], passes[WEIGHT], strict=True)]
    return np.array([*sum((passes[kind] for kind in KINDS), []), *(getattr(piece, size) for size in _SIZES)])
