"""What any run of a model's blocks costs as a stage: its pieces as arrays, of which sums are differences."""

from functools import cached_property
from typing import Any

import numpy as np

from ..pipeline.action import BACKWARD, INPUT, KINDS, WEIGHT
from .split import PARTS, Piece, Pieces

Array = np.ndarray[Any, Any]
_SIZES = "saved", "held", "parameters"
_PASSES = len(KINDS) * len(PARTS)


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

    def cut(self, layers: tuple[int, ...]) -> "Stages":
        """Returns the stages of so many blocks each."""
        rows = np.diff(self._sums[np.cumsum([0, *layers])], axis=0)
        rows[0] += self._first
        rows[1:] += self._border
        rows[-1] += self._last
        return Stages(rows)

    def transient(self, count: int) -> Array:
        """Returns the most bytes that a pass of each of ``count`` stages has beside what it keeps."""
        made = np.full(count, float(self._transient))
        made[0] = max(made[0], self.pieces.embedding.transient)
        made[-1] = max(made[-1], self.pieces.head.transient)
        return made

    def total(self, count: int) -> "Stages":
        """Returns all of ``count`` stages together, as one."""
        return Stages((self._sums[-1] + self._first + self._last + (count - 1) * self._border)[None])

    def windows(self, stage: int, count: int) -> "Stages":
        """Returns stage number ``stage`` of ``count`` at each [i, j] as if it held the blocks i to j (excluded)."""
        ends = self._first if stage == 0 else self._border
        return Stages(self._windows + (ends + self._last if stage == count - 1 else ends))

    @cached_property
    def _windows(self) -> Array:
        made: Array = self._sums[None, :] - self._sums[:, None]
        return made


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
        made: Array = self.seconds("F") + self.seconds(BACKWARD)
        return made


def _row(piece: Piece, split: bool) -> Array:
    passes = {kind: [piece.passes[kind].get(part, 0.0) for part in PARTS] for kind in KINDS}
    if split:
        passes[BACKWARD] = [i + w for i, w in zip(passes[INPUT], passes[WEIGHT], strict=True)]
    return np.array([*sum((passes[kind] for kind in KINDS), []), *(getattr(piece, size) for size in _SIZES)])
