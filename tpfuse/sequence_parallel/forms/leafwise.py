"""The form of leaves (``TensorParallel(bitwise=V)``): the same bits at every number of ranks.

Messages are the plain form's.  A GEMM runs leaf by leaf of the dimension that is split, in shapes in which the number
of ranks does not occur; where it contracts that dimension its leaves are added as a binary tree
(kernels/runtime/leaves.py), of which this rank's sum is a node.

    op                    forward                         dgrad                            wgrad
    gather_linear         leaves of N side by side        a tree over leaves of N          leaves of N, side by side
    linear_exchange       a tree over leaves of K         leaves of K side by side         leaves of K, side by side
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.gemm.op import column_sum, linear_dgrad, linear_dgrad_act, linear_fwd, linear_wgrad, linear_wgrad_add
from ...kernels.runtime.leaves import cut, split_columns, tree
from ...parallel import TensorParallel
from ..crossings import gather_rows, scatter_rows
from ..records import MLP, LinearWeights, MLPSaved, SavedInput, WantedGrads

# ---- GEMMs ----


def _side_by_side(columns: Iterable[Tensor]) -> Tensor:
    """Returns columns [M, n] beside one another; of empty tensors, an empty one."""
    pieces = list(columns)
    return torch.cat(pieces, 1) if pieces[0].dim() == 2 else pieces[0]


def column_fwd(x: Tensor, linear: LinearWeights, leaf: int) -> tuple[Tensor, Tensor]:
    """x [M, K], w [N, K] -> y, z as linear_fwd, by leaves of so many of the N."""
    w, b, activation = linear
    weights = w.split(leaf)
    biases = [None] * len(weights) if b is None else b.split(leaf)
    results = [linear_fwd(x, w_v, b_v, activation) for w_v, b_v in zip(weights, biases, strict=True)]
    y, z = zip(*results, strict=True)
    return _side_by_side(y), _side_by_side(z)


def row_fwd(x: Tensor, w: Tensor, leaves: int) -> Tensor:
    """x [M, K], w [N, K] -> this rank's node of the sum over K, [M, N]."""
    pieces = zip(cut("x", x, 1, leaves), cut("weight", w, 1, leaves), strict=True)
    return tree(linear_fwd(x_v, w_v, None, "none")[0] for x_v, w_v in pieces)


def column_dgrad(dy: Tensor, w: Tensor, leaf: int) -> Tensor:
    """dy [M, N], w [N, K] -> this rank's node of the sum over N, [M, K], by leaves of so many of them."""
    pieces = zip(split_columns(dy, leaf), w.split(leaf), strict=True)
    return tree(linear_dgrad(dy_v, w_v) for dy_v, w_v in pieces)


def row_dgrad(dy: Tensor, w: Tensor, leaves: int) -> Tensor:
    """dy [M, N], w [N, K] -> [M, K]."""
    return _side_by_side(linear_dgrad(dy, w_v) for w_v in cut("weight", w, 1, leaves))


def bias_grad(dy: Tensor, dtype: torch.dtype, leaf: int) -> Tensor:
    """dy [M, N] -> its columns' sums [N] in ``dtype``: a sum of columns depends on how many there are."""
    return torch.cat([column_sum(dy_v, dtype) for dy_v in split_columns(dy, leaf)])


# ---- gradients of weights, as units of work ----


class ColumnGrad(NamedTuple):
    """The gradient of a column-parallel weight and bias, as GatheredWeightGrad, by leaves of N."""

    dy: Tensor
    n: SavedInput
    dtype: torch.dtype
    bias: torch.dtype | None
    leaf: int  # of the N

    def run(self) -> tuple[Tensor, Tensor | None]:
        x = self.n.rows()
        results = [linear_wgrad(dy_v, x, self.dtype, self.bias) for dy_v in split_columns(self.dy, self.leaf)]
        dw, db = (torch.cat(pieces) for pieces in zip(*results, strict=True))
        return dw, None if self.bias is None else db

    def add_to(self, total: Tensor) -> Tensor | None:
        x, pieces = self.n.rows(), zip(split_columns(self.dy, self.leaf), total.split(self.leaf), strict=True)
        db = torch.cat([linear_wgrad_add(dy_v, x, part, self.bias) for dy_v, part in pieces])
        return None if self.bias is None else db


class RowGrad(NamedTuple):
    """The gradient of a row-parallel weight, as WeightGrad, by leaves of K."""

    dy: Tensor
    x: Tensor
    dtype: torch.dtype
    leaves: int

    def run(self) -> tuple[Tensor, Tensor | None]:
        pieces = cut("x", self.x, 1, self.leaves)
        return _side_by_side(linear_wgrad(self.dy, x_v, self.dtype, None)[0] for x_v in pieces), None

    def add_to(self, total: Tensor) -> Tensor | None:
        totals = total.chunk(self.leaves, 1)
        for x_v, part in zip(cut("x", self.x, 1, self.leaves), totals, strict=True):
            linear_wgrad_add(self.dy, x_v, part, None)
        return None


# ---- the form ----


class Leafwise(NamedTuple):
    """The form of one call.

    ``leaf``: the width of a leaf of a column-parallel layer's outputs, of which the last leaf of all may have fewer.
    """

    leaf: int

    def gather_linear_fwd(self, n: Tensor, linear: LinearWeights, tp: TensorParallel) -> tuple[Tensor, Tensor]:
        return column_fwd(gather_rows(n, tp), linear, self.leaf)

    def gather_linear_bwd(
        self, dy: Tensor, w: Tensor, *, n: SavedInput, grads: WantedGrads, tp: TensorParallel
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dn = scatter_rows(column_dgrad(dy, w, self.leaf), tp)
        if grads.weight:
            return dn, *grads.run("weight", ColumnGrad(dy, n, w.dtype, grads.bias, leaf=self.leaf))
        return dn, None, None if grads.bias is None else bias_grad(dy, grads.bias, self.leaf)

    def linear_exchange_fwd(self, x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
        return scatter_rows(row_fwd(x, w, tp.leaves), tp)

    def linear_exchange_bwd(
        self, dp: Tensor, w: Tensor, *, x: Tensor, grads: WantedGrads, tp: TensorParallel
    ) -> tuple[Tensor, Tensor | None]:
        dy = gather_rows(dp, tp)
        dx, dw = row_dgrad(dy, w, tp.leaves), None
        if grads.out_weight:
            dw, _ = grads.run("out_weight", RowGrad(dy, x, w.dtype, tp.leaves))
        return dx, dw

    def gather_mlp_exchange_fwd(
        self, n: Tensor, mlp: MLP, *, keep: bool, tp: TensorParallel
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        a, z = column_fwd(gather_rows(n, tp), LinearWeights(mlp.w1, mlp.b1, mlp.activation), self.leaf)
        return scatter_rows(row_fwd(a, mlp.w2, tp.leaves), tp), z, a if keep else None

    def gather_mlp_exchange_bwd(
        self, dp: Tensor, mlp: MLP, *, saved: MLPSaved, grads: WantedGrads, tp: TensorParallel
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        dy, leaves, rebuild = gather_rows(dp, tp), tp.leaves, saved.a is None and grads.out_weight
        pieces = zip(cut("weight", mlp.w2, 1, leaves), cut("z", saved.z, 1, leaves), strict=True)
        results = [
            linear_dgrad_act(dy, w_v, z_v, mlp.activation, rebuild=rebuild, bias=grads.bias) for w_v, z_v in pieces
        ]
        dzs, dbs, rebuilt = zip(*results, strict=True)
        dz, a = _side_by_side(dzs), _side_by_side(rebuilt) if saved.a is None else saved.a
        dn, dw1, dw2 = scatter_rows(column_dgrad(dz, mlp.w1, self.leaf), tp), None, None
        if grads.out_weight:
            dw2, _ = grads.run("out_weight", RowGrad(dy, a, mlp.w2.dtype, leaves))
        if grads.weight:
            dw1, _ = grads.run("weight", ColumnGrad(dz, saved.n, mlp.w1.dtype, None, leaf=self.leaf))
        return dn, dw1, None if grads.bias is None else torch.cat(dbs), dw2
