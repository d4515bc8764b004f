"""Cross-entropy of a linear layer's logits, never stored as a whole; the vocabulary may be split over ranks.

    z = x W' + b        loss = cross_entropy(z)        dz as in op.py        dx = dz W    dW = dz' x    db = sum_rows dz

There are two stages, as in op.py: the first yields [M, 4] statistics, one gather combines them, and the second
recomputes z, chunk by chunk of the vocabulary.  Saved: x, W, labels and lse.  Beyond inputs and gradients, memory is a
bounded chunk of dz and an fp32 copy of dx.

    rank r of R      x [M, D] whole rows        W [V/R, D], b [V/R]        labels [M] global
    forward          z_r = x W_r' + b_r; [M, 4] gathered to [R, M, 4]
    dgrad            dz_r W_r, a *partial* sum over the vocabulary: the caller adds the ranks'
    wgrad            dz_r' x, complete

Precision: logits on a GPU and all statistics are fp32, dz has x's dtype, GEMMs accumulate in fp32.  A row of dW is
one such sum, rounded once (cuBLAS may split it, where torch.backends.cuda.matmul allows reductions in 16 bits); dx is
carried in fp32 over the chunks.  ``fixed``, for leaves of a vocabulary (runtime/leaves.py): a GPU's GEMMs are Triton's,
in tiles of one size.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gemm.op import check_linear, column_sum, linear_fwd_tiles, linear_wgrad_add
from ..runtime import matmul
from ..runtime.function import Function, once_differentiable
from ..runtime.main_grad import Main, mains, wanted
from ..runtime.op import GEMM, acc_dtype, autocast, op
from ..runtime.tiles import row_tiles
from .linear_cost import bwd_add_cost, bwd_cost, stats_cost
from .linear_triton import bwd_add_launch, bwd_launch, stats_launch, vocabulary_chunks
from .op import (
    Reduction,
    bwd_cpu,
    checked_rows,
    cross_entropy_bwd_ref,
    cross_entropy_stats,
    cross_entropy_stats_ref,
    merge_stats,
    row_losses,
    stats_cpu,
)
from .options import IGNORE, Linear, Loss, Rows

# ---- reference ----


def _logits(layer: Linear) -> Tensor:
    x, w, b = layer
    acc = acc_dtype(x)
    return F.linear(x.to(acc), w.to(acc), None if b is None else b.to(acc))


def linear_cross_entropy_stats_ref(layer: Linear, labels: Tensor, loss: Loss) -> Tensor:
    """-> [M, 4], as cross_entropy_stats."""
    return cross_entropy_stats_ref(_logits(layer), labels, loss)


def linear_cross_entropy_bwd_ref(
    layer: Linear, rows: Rows, loss: Loss, fixed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dx [M, D], dW [V/R, D], db [V/R] fp32 (empty without b)."""
    x, w, b = layer
    dz = cross_entropy_bwd_ref(_logits(layer), rows, loss)
    dx, dw = dz @ w.to(dz.dtype), dz.t() @ x.to(dz.dtype)
    return dx.to(x.dtype), dw.to(w.dtype), dz.sum(0) if b is not None else dz.new_empty(0)


def linear_cross_entropy_bwd_add_ref(
    layer: Linear, rows: Rows, loss: Loss, out: Tensor, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """Adds dW to ``out`` [V/R, D] fp32 (fp64), otherwise as linear_cross_entropy_bwd -> dx, db."""
    x, w, b = layer
    dz = cross_entropy_bwd_ref(_logits(layer), rows, loss)
    out.addmm_(dz.t(), x.to(dz.dtype))
    return (dz @ w.to(dz.dtype)).to(x.dtype), dz.sum(0) if b is not None else dz.new_empty(0)


# ---- CPU: the same chunks of the vocabulary, GEMMs in x's dtype ----

ELEMENTS = 1 << 22  # logits that exist at a time; a GEMM over them fills a CPU's cores


def _chunks(layer: Linear, loss: Loss) -> Iterator[tuple[slice, Tensor, Loss]]:
    """Yields each chunk's tokens, its logits and its loss."""
    x, w, b = layer
    for start, stop in vocabulary_chunks(len(x), len(w), ELEMENTS):
        tokens = slice(start, stop)
        z = matmul.linear(x, w[tokens], None if b is None else b[tokens].to(x.dtype))
        yield tokens, z, loss._replace(first_token=loss.first_token + start)


def _stats_cpu(layer: Linear, labels: Tensor, loss: Loss) -> Tensor:
    return merge_stats(torch.stack([stats_cpu(z, labels, part) for _, z, part in _chunks(layer, loss)]))


def _bwd_cpu(layer: Linear, rows: Rows, loss: Loss, fixed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    dw = torch.empty_like(layer.w)
    dx, db = _bwd_by(layer, rows, loss, lambda dz, tokens: matmul.mm(dz.t(), layer.x, place=dw[tokens]))
    return dx, dw, db


def _bwd_add_cpu(layer: Linear, rows: Rows, loss: Loss, out: Tensor, fixed: bool = False) -> tuple[Tensor, Tensor]:
    return _bwd_by(layer, rows, loss, lambda dz, tokens: linear_wgrad_add(dz, layer.x, out[tokens], None))


def _bwd_by(layer: Linear, rows: Rows, loss: Loss, wgrad: Callable[[Tensor, slice], Tensor]) -> tuple[Tensor, Tensor]:
    """-> dx and db; ``wgrad`` is called with dz of each chunk and its tokens."""
    x, w, b = layer
    dx = torch.zeros_like(x, dtype=acc_dtype(x))
    db = dx.new_empty(0 if b is None else len(w))
    for tokens, z, part in _chunks(layer, loss):
        dz = bwd_cpu(z, rows, part)
        dx += matmul.mm(dz, w[tokens])
        wgrad(dz, tokens)
        if b is not None:
            db[tokens] = column_sum(dz, db.dtype)
    return dx.to(x.dtype), db


linear_cross_entropy_stats = op(
    linear_cross_entropy_stats_ref, kind=GEMM, launch=stats_launch, cpu=_stats_cpu, cost=stats_cost
)
linear_cross_entropy_bwd = op(linear_cross_entropy_bwd_ref, kind=GEMM, launch=bwd_launch, cpu=_bwd_cpu, cost=bwd_cost)
linear_cross_entropy_bwd_add = op(
    linear_cross_entropy_bwd_add_ref,
    kind=GEMM,
    launch=bwd_add_launch,
    cpu=_bwd_add_cpu,
    mutates=("out",),
    cost=bwd_add_cost,
)


def stats_in_tiles(layer: Linear, labels: Tensor, loss: Loss, tile: int) -> Tensor:
    """Returns linear_cross_entropy_stats by tiles of so many rows, as of logits that are stored; at once where it is
    0."""
    if tile == 0:
        return linear_cross_entropy_stats(layer, labels, loss)
    x, w, b = layer
    pairs = zip(row_tiles(x, tile), row_tiles(labels[:, None], tile), strict=True)
    logits = ((linear_fwd_tiles(rows, w, b, "none", tile=tile)[0], of[:, 0]) for rows, of in pairs)
    return torch.cat([cross_entropy_stats(z, of, loss) for z, of in logits])[: len(x)]


def gradients(layer: Linear, rows: Rows, loss: Loss, main: Main | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns dx, dW and db; None for dW if it has a place, where it is added."""
    if main is None:
        return linear_cross_entropy_bwd(layer, rows, loss)
    dx, db = main.add(lambda total: linear_cross_entropy_bwd_add(layer, rows, loss, total))
    return dx, None, db


# ---- autograd ----


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, loss: Loss, gather: Callable[[Tensor], Tensor]
    ) -> Tensor:
        losses, lse = row_losses(gather(linear_cross_entropy_stats(Linear(x, w, b), labels, loss)), labels, loss)
        ctx.save_for_backward(x, w, b, labels, lse)
        ctx.loss, ctx.mains = loss, mains(w)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b, labels, lse = ctx.saved_tensors
        rows = Rows(labels, lse, dloss=dlosses)
        dx, dw, db = gradients(Linear(x, w, b), rows, ctx.loss, wanted(ctx.mains))
        return dx, dw, None if b is None else db, None, None, None


# ---- public ----


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    normalizer: float | Tensor | None = None,
    reduction: str = "mean",
    first_token: int = 0,
    vocab_size: int | None = None,
    gather: Callable[[Tensor], Tensor] = lambda stats: stats[None],
) -> Tensor:
    """Returns ``cross_entropy(linear(x, weight, bias), labels, ...)`` without storing the logits.

    The result is a scalar in fp32 (fp64 for fp64), or [...] with ``reduction="none"``.

    x [..., D], weight [V, D], bias [V], labels [...] int64; under autocast x, weight and bias are cast.  The options
    are :func:`cross_entropy`'s.  For a split vocabulary weight and bias are this rank's rows, and the gradient of x
    that comes back is this rank's part of a sum over the ranks.  ValueError for shapes or dtypes that do not agree or,
    on CPU, a label outside 0 to V - 1.
    """
    name = "linear_cross_entropy"
    check_linear(name, x, weight, bias, activation="none")
    vocab_size = len(weight) if vocab_size is None else vocab_size
    loss = Loss(vocab_size, first_token, ignore_index, label_smoothing=label_smoothing, z_loss=z_loss)
    reduce = Reduction(reduction, normalizer)
    rows, row_labels = checked_rows(name, x, labels, loss=loss, reduction=reduce)
    rows, weight, bias = autocast(rows, weight, bias)
    return reduce(_LinearCrossEntropy.apply(rows, weight, bias, row_labels, loss, gather), labels, ignore_index)
