"""The form of leaves (``TensorParallel(bitwise=V)``): the same bits at every number of ranks.

Messages are the plain form's.  A GEMM runs leaf by leaf of the dimension that is split, in shapes in which the number
of ranks does not occur; where it contracts that dimension its leaves are added as a binary tree
(kernels/runtime/leaves.py), of which this rank's sum is a node.

    op                    forward                         dgrad                            wgrad
    gather_linear         leaves of N side by side        a tree over leaves of N          leaves of N, side by side
    linear_exchange       a tree over leaves of K         leaves of K side by side         leaves of K, side by side

That is the definition.  Leaves side by side are made by one GEMM, and leaves of a tree are read where they lie, where
this has the definition's bits (kernels/runtime/shortcut.py).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.gemm import op as gemm
from ...kernels.gemm.activation import GATED, width
from ...kernels.runtime.leaves import split_columns, tree_of_new
from ...kernels.runtime.op import launched
from ...kernels.runtime.shortcut import Shortcut
from ...kernels.runtime.tiles import in_tiles
from ...parallel import TensorParallel
from ..crossings import gather_rows, scatter_rows
from ..records import MLP, LinearWeights, MLPSaved, SavedInput, WantedGrads

# ---- GEMMs: by leaves of so many columns of the dimension that is split, and the faster ways ----


def _side_by_side(columns: Iterable[Tensor]) -> Tensor:
    """Returns columns [M, n] beside one another."""
    return torch.cat(list(columns), 1)


def _linear(x: Tensor, w: Tensor, b: Tensor | None, leaf: int) -> Tensor:
    return gemm.linear_fwd(x, w, b, "none", leaf=0)[0]


def _linear_by_leaves(x: Tensor, w: Tensor, b: Tensor | None, leaf: int) -> Tensor:
    weights = w.split(leaf)
    biases = [None] * len(weights) if b is None else b.split(leaf)
    return _side_by_side(_linear(x, w_v, b_v, leaf) for w_v, b_v in zip(weights, biases, strict=True))


def _halves(x: Tensor, w: Tensor, b: Tensor | None, leaf: int) -> Tensor:
    """Returns z [M, 2, N / 2] of rows of gate and up in turns, as a CPU keeps it (kernels/gemm/op.py)."""
    z = x.new_empty(len(x), 2, len(w) // 2)
    gemm.multiply_into(x, w, b, z)
    return z


def _halves_by_leaves(x: Tensor, w: Tensor, b: Tensor | None, leaf: int) -> Tensor:
    biases = [None if b is None else b[half::2] for half in range(2)]
    return torch.stack(
        [_linear_by_leaves(x, w[i::2].contiguous(), bias, leaf // 2) for i, bias in enumerate(biases)], 1
    )


_COLUMN_FWD = Shortcut(_linear_by_leaves, _linear, _linear)
_GATED_FWD = Shortcut(_halves_by_leaves, _halves, _linear)


def column_fwd(x: Tensor, linear: LinearWeights, leaf: int, tile: int) -> tuple[Tensor, ...]:
    """x [M, K], w [N, K] -> y, z as linear_fwd, by leaves of so many of the N, and tiles of so many rows unless 0."""
    w, b, activation = linear
    if launched(x):
        y, z = gemm.linear_fwd(x, w, b, activation, leaf=0)
        return y, z
    for n in {leaf, len(w) % leaf or leaf} if tile else ():  # the last leaf may be narrower
        forward = lambda *args: _column_fwd(*args, leaf=n)  # noqa: B023
        gemm.check_tiles(x, w[:n], b, activation, tile=tile, forward=forward)
    return in_tiles(lambda rows: _column_fwd(rows, w, b, activation, leaf=leaf), x, tile)


def _column_fwd(x: Tensor, w: Tensor, b: Tensor | None, activation: str, *, leaf: int) -> tuple[Tensor, ...]:
    z = (_GATED_FWD if activation in GATED else _COLUMN_FWD)(x, w, b, leaf)
    return (z, z.new_empty(0)) if activation == "none" else (gemm.activation_fwd(z, activation), z)


def _leaf_fwd(x: Tensor, w: Tensor) -> Tensor:
    return gemm.linear_fwd(x, w, None, "none")[0]


def _contiguous_leaf_fwd(x: Tensor, w: Tensor) -> Tensor:
    return _leaf_fwd(x.contiguous(), w.contiguous())


_LEAF_FWD = Shortcut(_contiguous_leaf_fwd, _leaf_fwd, _leaf_fwd)


def row_fwd(x: Tensor, w: Tensor, leaf: int, tile: int) -> Tensor:
    """x [M, K], w [N, K] -> this rank's node of the sum over K, [M, N], by tiles of so many rows unless 0."""
    if launched(x):
        return gemm.linear_fwd(x, w, None, "none", leaf=leaf)[0]
    weights = w.split(leaf, 1)
    if tile:
        gemm.check_tiles(x, weights[0], None, "none", tile=tile)

    def node(rows: Tensor) -> tuple[Tensor]:
        return (tree_of_new(_LEAF_FWD(x_v, w_v) for x_v, w_v in zip(rows.split(leaf, 1), weights, strict=True)),)

    return in_tiles(node, x, tile)[0]


def _leaf_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    return gemm.linear_dgrad(dy, w)


def _contiguous_leaf_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    return gemm.linear_dgrad(dy.contiguous(), w)


_LEAF_DGRAD = Shortcut(_contiguous_leaf_dgrad, _leaf_dgrad, _leaf_dgrad)


def column_dgrad(dy: Tensor, w: Tensor, leaf: int) -> Tensor:
    """dy [M, N], w [N, K] -> this rank's node of the sum over N, [M, K]."""
    if launched(dy):
        return gemm.linear_dgrad(dy, w, leaf)
    return tree_of_new(_LEAF_DGRAD(dy_v, w_v) for dy_v, w_v in zip(dy.split(leaf, 1), w.split(leaf), strict=True))


def _row_dgrad(dy: Tensor, w: Tensor, leaf: int) -> Tensor:
    return gemm.linear_dgrad(dy, w, 0)


def _row_dgrad_by_leaves(dy: Tensor, w: Tensor, leaf: int) -> Tensor:
    return _side_by_side(gemm.linear_dgrad(dy, w_v) for w_v in split_columns(w, leaf))


# dy [M, N], w [N, K] -> [M, K], by leaves of K
row_dgrad = Shortcut(_row_dgrad_by_leaves, _row_dgrad, _row_dgrad)


def _column_sum(x: Tensor, dtype: torch.dtype, leaf: int) -> Tensor:
    return gemm.bias_grad(x, dtype)


def _column_sum_by_leaves(x: Tensor, dtype: torch.dtype, leaf: int) -> Tensor:
    return torch.cat([gemm.bias_grad(x_v, dtype) for x_v in split_columns(x, leaf)])


_BIAS_GRAD = Shortcut(_column_sum_by_leaves, _column_sum, _column_sum)


def bias_grad(dy: Tensor, dtype: torch.dtype | None, leaf: int) -> Tensor | None:
    """dy [M, N] -> its columns' sums [N] in ``dtype``, if there is one: a sum depends on how many columns there are."""
    return None if dtype is None else _BIAS_GRAD(dy, dtype, leaf)


# ---- gradients of weights, as units of work ----


def _wgrad(dy: Tensor, x: Tensor, dtype: torch.dtype, leaf: int) -> Tensor:
    return gemm.linear_wgrad(dy, x, dtype, None, fixed=True)[0]


def _column_wgrad_by_leaves(dy: Tensor, x: Tensor, dtype: torch.dtype, leaf: int) -> Tensor:
    return torch.cat([gemm.linear_wgrad(dy_v, x, dtype, None)[0] for dy_v in split_columns(dy, leaf)])


def _row_wgrad_by_leaves(dy: Tensor, x: Tensor, dtype: torch.dtype, leaf: int) -> Tensor:
    return _side_by_side(gemm.linear_wgrad(dy, x_v, dtype, None)[0] for x_v in split_columns(x, leaf))


_COLUMN_WGRAD = Shortcut(_column_wgrad_by_leaves, _wgrad, _wgrad)
_ROW_WGRAD = Shortcut(_row_wgrad_by_leaves, _wgrad, _wgrad)


class ColumnGrad(NamedTuple):
    """The gradient of a column-parallel weight and bias, as GatheredWeightGrad, by leaves of N."""

    dy: Tensor
    n: SavedInput
    dtype: torch.dtype
    bias: torch.dtype | None
    leaf: int  # of the N

    def run(self) -> tuple[Tensor, Tensor | None]:
        dw = _COLUMN_WGRAD(self.dy, self.n.rows(), self.dtype, self.leaf)
        return dw, bias_grad(self.dy, self.bias, self.leaf)

    def add_to(self, total: Tensor) -> Tensor | None:
        x, pieces = self.n.rows(), zip(split_columns(self.dy, self.leaf), total.split(self.leaf), strict=True)
        for dy_v, part in pieces:
            gemm.linear_wgrad_add(dy_v, x, part, None, fixed=True)
        return bias_grad(self.dy, self.bias, self.leaf)


class RowGrad(NamedTuple):
    """The gradient of a row-parallel weight, as WeightGrad, by leaves of K."""

    dy: Tensor
    x: Tensor
    dtype: torch.dtype
    leaf: int  # of the K

    def run(self) -> tuple[Tensor, Tensor | None]:
        return _ROW_WGRAD(self.dy, self.x, self.dtype, self.leaf), None

    def add_to(self, total: Tensor) -> Tensor | None:
        for x_v, part in zip(split_columns(self.x, self.leaf), total.split(self.leaf, 1), strict=True):
            gemm.linear_wgrad_add(self.dy, x_v, part, None, fixed=True)
        return None


# ---- the form ----


class Leafwise(NamedTuple):
    """The form of one call.

    ``leaf``: the width of a leaf of what the call splits, which the last leaf of all may fall short of.
    """

    leaf: int

    def gather_linear_fwd(self, n: Tensor, linear: LinearWeights, tp: TensorParallel) -> tuple[Tensor, Tensor]:
        y, z = column_fwd(gather_rows(n, tp), linear, self.leaf, tp.row_tile)
        return y, z

    def gather_linear_bwd(
        self, dy: Tensor, w: Tensor, *, n: SavedInput, grads: WantedGrads, tp: TensorParallel
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dn = scatter_rows(column_dgrad(dy, w, self.leaf), tp) if grads.n else None
        if grads.weight:
            return dn, *grads.run("weight", ColumnGrad(dy, n, w.dtype, grads.bias, leaf=self.leaf))
        return dn, None, bias_grad(dy, grads.bias, self.leaf)

    def linear_exchange_fwd(self, x: Tensor, w: Tensor, tp: TensorParallel) -> Tensor:
        return scatter_rows(row_fwd(x, w, x.shape[1] // tp.leaves, tp.row_tile), tp)

    def linear_exchange_bwd(
        self, dp: Tensor, w: Tensor, *, x: Tensor, grads: WantedGrads, tp: TensorParallel
    ) -> tuple[Tensor, Tensor | None]:
        dy, leaf = gather_rows(dp, tp), x.shape[1] // tp.leaves
        dx, dw = row_dgrad(dy, w, leaf), None
        if grads.out_weight:
            dw, _ = grads.run("out_weight", RowGrad(dy, x, w.dtype, leaf))
        return dx, dw

    def gather_mlp_exchange_fwd(
        self, n: Tensor, mlp: MLP, *, keep: bool, tp: TensorParallel
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        linear, tile = LinearWeights(mlp.w1, mlp.b1, mlp.activation), tp.row_tile
        a, z = column_fwd(gather_rows(n, tp), linear, self.leaf, tile)
        return scatter_rows(row_fwd(a, mlp.w2, self.leaf // width(mlp.activation), tile), tp), z, a if keep else None

    def gather_mlp_exchange_bwd(
        self, dp: Tensor, mlp: MLP, *, saved: MLPSaved, grads: WantedGrads, tp: TensorParallel
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        dy, leaf = gather_rows(dp, tp), self.leaf // width(mlp.activation)
        da = row_dgrad(dy, mlp.w2, leaf)
        rebuild = saved.a is None and grads.out_weight
        dz, _, rebuilt = gemm.activation_bwd(da, saved.z, mlp.activation, rebuild=rebuild, bias=None)
        a = rebuilt if saved.a is None else saved.a
        dn, dw1, dw2 = scatter_rows(column_dgrad(dz, mlp.w1, self.leaf), tp), None, None
        if grads.out_weight:
            dw2, _ = grads.run("out_weight", RowGrad(dy, a, mlp.w2.dtype, leaf))
        if grads.weight:
            dw1, _ = grads.run("weight", ColumnGrad(dz, saved.n, mlp.w1.dtype, None, leaf=self.leaf))
        return dn, dw1, bias_grad(dz, grads.bias, self.leaf), dw2
