"""Layouts that an op can have on one axis of a mesh: SBP signatures (Yuan et al. 2021, arXiv:2110.15032), named after
DTensor's placements.

An activation [batch, seq, width] has one of six types on each axis, each of which also fixes its gradient's layout:

    type          the tensor             its gradient            DTensor
    Shard(0)      a part of the batch    the same part           Shard(0)
    Shard(1)      a part of the rows     the same part           Shard(1)
    Shard(2)      a part of the width    the same part           Shard(2); of heads where there are heads
    Replicate     whole                  whole                   Replicate
    Replicate*    whole                  a term of the sum       Replicate, gradient Partial: Megatron's f
    Partial       a term of the sum      whole                   Partial, gradient Replicate: Megatron's g

No op leaves a gradient as a sum to the ops before it, so only inputs can be Replicate*.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from .graph import ACTIVATION, ADD, ATTENTION, LINEAR, NORM, Tensor

BATCH, SEQUENCE, WIDTH = SHARDS = "Shard(0)", "Shard(1)", "Shard(2)"
REPLICATE, FORKED, PARTIAL = "Replicate", "Replicate*", "Partial"
TYPES = *SHARDS, REPLICATE, FORKED, PARTIAL
COLUMNS, ROWS = "Shard(0)", "Shard(1)"  # of a weight [out, in]: Megatron's column- and row-parallel linear

Layout = tuple[str, ...]  # a type for each axis of the mesh


class Signature(NamedTuple):
    """One axis of an op's layout; all inputs are laid out alike."""

    input: str
    output: str
    weight: str = REPLICATE

    @property
    def divides(self) -> bool:
        """True where each rank of the axis does its part of the work."""
        return self.input in SHARDS or self.output in SHARDS

    @property
    def sums(self) -> bool:
        """True where the gradient of a replicated weight is a sum over the axis, because its ranks have different
        rows."""
        return self.input in (BATCH, SEQUENCE)


SIGNATURES: dict[str, tuple[Signature, ...]] = {
    LINEAR: (
        Signature(BATCH, BATCH),
        Signature(SEQUENCE, SEQUENCE),
        Signature(REPLICATE, REPLICATE),
        Signature(FORKED, WIDTH, COLUMNS),
        Signature(WIDTH, PARTIAL, ROWS),
    ),
    ATTENTION: tuple(Signature(t, t) for t in (BATCH, WIDTH, REPLICATE)),
    NORM: tuple(Signature(t, t) for t in (BATCH, SEQUENCE, REPLICATE)),
    ACTIVATION: tuple(Signature(t, t) for t in (*SHARDS, REPLICATE)),
    ADD: tuple(Signature(t, t) for t in (*SHARDS, REPLICATE)),
}


def fits(tensor: Tensor, layout: Layout, sizes: Sequence[int]) -> bool:
    """Returns whether a mesh of ``sizes`` cuts a tensor evenly."""
    lengths = zip(SHARDS, (tensor.batch, tensor.seq, tensor.units))
    parts = lambda shard: math.prod(n for n, kind in zip(sizes, layout) if kind == shard)
    return all(length % parts(shard) == 0 for shard, length in lengths)
