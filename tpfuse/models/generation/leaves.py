"""Generation's forward pass on a CPU (direct.py) with ``TensorParallel(bitwise=V)``: the GEMMs, norms and rotations of
the model's own, which have the same bits, without what training needs beside them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...kernels.gemm.prepared import Join, Map, Plain
from ...kernels.norm import reduce_bias_dropout_add_norm
from ...kernels.norm.kinds import normalize
from ...kernels.norm.records import NormVectors
from ...layers.attention import rotated
from ...layers.call import Rope
from ...layers.linear import RowParallelLinear
from ...layers.module import local
from ...layers.norm import LayerNorm, SplitNorm
from ...parallel import TensorParallel
from ...sequence_parallel.forms.leafwise import column_fwd, row_fwd
from ...sequence_parallel.records import LinearWeights
from .exchange import Exchange


class LeafProducts(Plain):
    """Products by leaves, and by tiles of rows where there are such.

    ``columns`` are those of a rank's slice, of which the last ranks may have fewer; None: those of each weight.
    """

    any_rows = True

    def __init__(self, tp: TensorParallel, columns: int | None = None):
        self.tp, self.columns = tp, columns

    def map(self, weight: Tensor, bias: Tensor | None) -> Map:
        return self.mlp(weight, bias, "none")

    def mlp(self, weight: Tensor, bias: Tensor | None, activation: str) -> Map:
        flat = weight.reshape(-1, weight.shape[-1])
        linear = LinearWeights(flat, None if bias is None else bias.reshape(-1), activation)
        leaf = -(-(self.columns or len(flat)) // self.tp.leaves)
        return lambda x: column_fwd(x, linear, leaf, self.tp.row_tile)[0]

    def partial(self, weight: Tensor) -> Map:
        leaf = weight.shape[1] // self.tp.leaves
        return lambda x: row_fwd(x, weight, leaf, self.tp.row_tile)


def joined(layer: RowParallelLinear, exchange: Exchange, form: Plain) -> Join:
    """Returns (x, h) -> h + (the sum over ranks of x W' + b), rounded once."""
    multiply, bias = form.partial(local(layer.weight)), local(layer.bias)
    return lambda x, h: reduce_bias_dropout_add_norm(exchange.sum(multiply(x))[None], bias, h)[0]


def norm_of(norm: LayerNorm) -> Map:
    """Returns the map of a norm of x [..., D]."""
    if isinstance(norm, SplitNorm):
        return norm
    vectors = NormVectors(local(norm.weight), local(norm.bias), norm.eps, norm.kind)
    return lambda x: normalize(x.reshape(-1, x.shape[-1]), vectors)[0].view(x.shape).to(x.dtype)


class Turn(NamedTuple):
    """Rotates the queries and keys of qkv [m, G/R, Q + 2, E]."""

    rope: Rope

    def __call__(self, qkv: Tensor, slots: slice) -> Tensor:
        assert self.rope.positions is not None  # given
        return rotated(qkv, self.rope, self.rope.positions)
