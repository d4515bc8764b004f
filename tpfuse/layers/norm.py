"""LayerNorm and RMSNorm whose parameters have their full gradient on a sequence shard too."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..collectives import copy, reduce
from ..kernels.norm import KINDS, check_kind, layer_norm, rms_norm
from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.leaves import cut, tree
from ..kernels.runtime.op import acc_dtype
from ..parallel import TensorParallel
from .hooks import served
from .module import ParallelModule, leaf_slices, on_pieces, per_leaf, replicated
from .shapes import NormShape


class LayerNorm(ParallelModule):
    """torch.nn.LayerNorm over the last dimension; under sequence parallelism gradients are summed over the ranks."""

    kind = "layer"
    dim: ClassVar[int | None] = None  # on which its weight is split over the ranks
    copies = 1  # leaves in a row that hold the same slice of it
    shards_input = True  # True also for whole rows: a norm acts on each row alone
    repr_fields = "normalized_shape", "eps"
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        tp: TensorParallel | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(tp)
        check_kind(type(self).__name__, self.kind, eps)
        self.normalized_shape, self.eps = normalized_shape, eps
        start = "zeros" if KINDS[self.kind].offset else "ones"  # the scale starts at 1
        self.add_parameter(
            "weight", (normalized_shape,), self.dim, start, copies=self.copies, dtype=dtype, device=device
        )
        self.add_parameter("bias", (normalized_shape,), None, "zeros", present=bias, dtype=dtype, device=device)
        self.initialize_alone()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]"""
        weight, bias = replicated(self.tp, self.weight, self.bias)
        return layer_norm(x, weight, bias, self.eps, leaves=self.tp.row_leaves)


class RMSNorm(LayerNorm):
    """torch.nn.RMSNorm over the last dimension; under sequence parallelism the gradient is summed over the ranks."""

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-6,
        *,
        kind: str = "rms",
        tp: TensorParallel | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        check_kind("RMSNorm", kind)
        self.kind = kind
        super().__init__(normalized_shape, eps, bias=False, tp=tp, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]"""
        (weight,) = replicated(self.tp, self.weight)
        return rms_norm(x, weight, self.eps, kind=self.kind, leaves=self.tp.row_leaves)


class HeadNorm(RMSNorm):
    """An RMSNorm over the width of every head, x [..., E], of heads that are split over the ranks.

    Its gradient is summed over the ranks, with sequence parallelism or without.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., E] -> [..., E]; with ``tp.bitwise`` x is [M, heads, .., E]"""
        weight, leaves = copy(on_pieces(self.weight, self.tp), self.tp), self.tp.leaves
        if leaves == 0:
            return rms_norm(x, weight, self.eps, kind=self.kind)
        pieces = zip(cut("HeadNorm", x, 1, leaves), per_leaf(weight, leaves), strict=True)
        return torch.cat([rms_norm(heads, w, self.eps, kind=self.kind) for heads, w in pieces], 1)


class SplitNorm(RMSNorm):
    """An RMSNorm over a width that is split over the ranks, x [M, ..., D/R]: all query heads together, say.

    The weight is split as x is.  ``copies`` leaves, without ``tp.bitwise`` ranks, in a row hold the same slice of both,
    which counts once: the mean of the squares is the mean of their means.
    """

    dim = 0

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-6,
        *,
        kind: str = "rms",
        copies: int = 1,
        tp: TensorParallel | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        check_kind("SplitNorm", kind)
        check(not KINDS[kind].centred, f"SplitNorm: kind must be an RMSNorm's, got {kind!r}")
        self.copies = copies
        super().__init__(normalized_shape, eps, kind=kind, tp=tp, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [M, ...], of which a row is this rank's slice -> the same shape"""
        return _normed_together([self], [x])[0]


def normed(q_norm: RMSNorm, k_norm: RMSNorm, q: Tensor, k: Tensor) -> list[Tensor]:
    """Returns norms of q and k [M, ...]: of split widths by one message, where no hook waits for either."""
    if isinstance(q_norm, SplitNorm) and isinstance(k_norm, SplitNorm) and not (served(q_norm) or served(k_norm)):
        return _normed_together([q_norm, k_norm], [q, k])
    return [q_norm(q), k_norm(k)]


def _normed_together(norms: list[SplitNorm], xs: list[Tensor]) -> list[Tensor]:
    tp, weights = norms[0].tp, [leaf_slices(on_pieces(n.weight, n.tp), n.tp, n.copies) for n in norms]
    rows = [x.reshape(len(x), -1) for x in xs]
    if tp.size == 1 and tp.bitwise is None:
        normed_rows = [rms_norm(x, w, n.eps, kind=n.kind) for x, (w,), n in zip(rows, weights, norms, strict=True)]
    else:
        normed_rows = _normed_by_leaves(norms, rows, weights)
    return [y.view(x.shape) for x, y in zip(xs, normed_rows, strict=True)]


def _normed_by_leaves(norms: list[SplitNorm], rows: list[Tensor], weights: list[list[Tensor]]) -> list[Tensor]:
    """Returns norms of rows [M, D/R], whose means are trees over leaves of the D; without ``tp.bitwise`` a rank is
    one."""
    tp = norms[0].tp
    leaves = max(tp.leaves, 1)
    pieces = [cut("SplitNorm", x, 1, leaves) for x in rows]
    squares = [torch.stack([_mean_of_squares(x) for x in leaf]) for leaf in zip(*pieces, strict=True)]
    total = copy(reduce(tree(squares), tp), tp)  # which each rank goes on to use differently
    means = per_leaf(total.div(tp.size * leaves), leaves)  # each [norms, M]
    normed_rows = []
    for i, (n, xs, w) in enumerate(zip(norms, pieces, weights, strict=True)):
        of_leaves = zip(xs, w, means, strict=True)
        scaled = [_Scaled.apply(x, mean[i] + n.eps, w_v, KINDS[n.kind].offset) for x, w_v, mean in of_leaves]
        normed_rows.append(torch.cat(scaled, 1))
    return normed_rows


def _mean_of_squares(x: Tensor) -> Tensor:
    """x [M, n] -> [M], in fp32 (fp64 of fp64)"""
    return torch.linalg.vector_norm(x, dim=-1, dtype=acc_dtype(x)).square() / x.shape[1]


class _Scaled(Function):
    """x [M, N], v [M] fp32, w [N] -> x v^(-1/2) (w + offset) in x's dtype; saved are the arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, w: Tensor, offset: float) -> Tensor:
        ctx.save_for_backward(x, v, w)
        ctx.offset = offset
        return (x.to(v.dtype) * v.rsqrt()[:, None] * (w.to(v.dtype) + offset)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, v, w = ctx.saved_tensors
        rstd = v.rsqrt()[:, None]
        scaled, d = x.to(v.dtype) * rstd, dy.to(v.dtype)
        dw = (d * scaled).sum(0).to(w.dtype)
        d = d * (w.to(v.dtype) + ctx.offset)
        dv = (d * scaled).sum(-1) / (-2 * v)
        return (d * rstd).to(x.dtype), dv, dw, None


def norm_layer(
    shape: NormShape,
    width: int,
    *,
    tp: TensorParallel | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LayerNorm:
    """Returns the layer of a norm over ``width`` columns."""
    check_kind("norm_layer", shape.kind)
    if KINDS[shape.kind].centred:
        return LayerNorm(width, shape.eps, shape.bias, tp=tp, dtype=dtype, device=device)
    return RMSNorm(width, shape.eps, kind=shape.kind, tp=tp, dtype=dtype, device=device)
