"""Cross-entropy of a linear layer's logits, which never exist as a whole; the vocabulary may be split over ranks.

    z = x W' + b        loss = cross_entropy(z)        dz as in cross_entropy.py        dx = dz W    dW = dz' x    db = sum_rows dz

Two stages, as there: [M, 4] statistics leave the first, one gather combines them, and the second makes z again, chunk by chunk of the
vocabulary.  Saved: x, W, labels and lse.  Beyond inputs and gradients, memory is a bounded chunk of dz and an fp32 copy of dx.

    rank r of R      x [M, D] whole rows        W [V/R, D], b [V/R]        labels [M] global
    forward          z_r = x W_r' + b_r; [M, 4] gathered to [R, M, 4]
    dgrad            dz_r W_r, a *partial* sum over the vocabulary: the caller adds the ranks'
    wgrad            dz_r' x, complete

Precision: logits on a GPU and all statistics are fp32, dz has x's dtype, GEMMs accumulate in fp32.  A row of dW is one such sum, rounded
once; dx is carried in fp32 over the chunks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._linear_cross_entropy import bwd_cost, bwd_launch, stats_cost, stats_launch, vocabulary_chunks
from ._op import acc_dtype, autocast, op
from .cross_entropy import IGNORE, checked_rows, cross_entropy_bwd_ref, cross_entropy_stats_ref, mean_loss, merge_stats
from .linear import check_linear, column_sum

# ---- reference ----


def _logits(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    acc = acc_dtype(x)
    return F.linear(x.to(acc), w.to(acc), None if b is None else b.to(acc))


def linear_cross_entropy_stats_ref(x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, first: int, smoothing: bool) -> Tensor:
    """x [M, D], w [V/R, D], b [V/R] -> [M, 4], as cross_entropy_stats."""
    return cross_entropy_stats_ref(_logits(x, w, b), labels, first, smoothing)


def linear_cross_entropy_bwd_ref(
    x: Tensor, w: Tensor, b: Tensor | None, labels: Tensor, lse: Tensor, dloss: Tensor, first: int, vocab: int, ignore_index: int,
    smoothing: float, z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dx [M, D], dW [V/R, D], db [V/R] fp32 (empty without b)."""
    dz = cross_entropy_bwd_ref(_logits(x, w, b), labels, lse, dloss, first, vocab, ignore_index, smoothing, z_loss)
    dx, dw = dz @ w.to(dz.dtype), dz.t() @ x.to(dz.dtype)
    return dx.to(x.dtype), dw.to(w.dtype), dz.sum(0) if b is not None else dz.new_empty(0)


# ---- CPU: the same chunks of the vocabulary, GEMMs in x's dtype ----

ELEMENTS = 1 << 22  # logits that exist at a time; a GEMM over them fills a CPU's cores


def _chunks(x: Tensor, w: Tensor, b: Tensor | None):
    """-> start, stop, W and the logits of each chunk"""
    for start, stop in vocabulary_chunks(len(x), len(w), ELEMENTS):
        own = w[start:stop]
        yield start, stop, own, F.linear(x, own, None if b is None else b[start:stop].to(x.dtype))


def _stats_cpu(x, w, b, labels, first, smoothing):
    return merge_stats(torch.stack([cross_entropy_stats_ref(z, labels, first + at, smoothing) for at, _, _, z in _chunks(x, w, b)]))


def _bwd_cpu(x, w, b, labels, lse, dloss, first, *rest):
    dx, dw = torch.zeros_like(x, dtype=acc_dtype(x)), torch.empty_like(w)
    db = dx.new_empty(0 if b is None else len(w))
    for start, stop, own, z in _chunks(x, w, b):
        dz = cross_entropy_bwd_ref(z, labels, lse, dloss, first + start, *rest)
        dx += dz @ own
        torch.mm(dz.t(), x, out=dw[start:stop])
        if b is not None:
            db[start:stop] = column_sum(dz)
    return dx.to(x.dtype), dw, db


linear_cross_entropy_stats = op(linear_cross_entropy_stats_ref, launch=stats_launch, cpu=_stats_cpu, cost=stats_cost)
linear_cross_entropy_bwd = op(linear_cross_entropy_bwd_ref, launch=bwd_launch, cpu=_bwd_cpu, cost=bwd_cost)


# ---- autograd ----


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, labels, normalizer, first, vocab, ignore_index, smoothing, z_loss, gather):
        stats = gather(linear_cross_entropy_stats(x, w, b, labels, first, smoothing > 0))
        loss, lse, normalizer = mean_loss(stats, labels, normalizer, vocab, ignore_index, smoothing, z_loss)
        ctx.save_for_backward(x, w, b, labels, lse, normalizer)
        ctx.args = first, vocab, ignore_index, smoothing, z_loss
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        *saved, normalizer = ctx.saved_tensors
        rows = (dloss / normalizer).expand(len(saved[0]))
        dx, dw, db = linear_cross_entropy_bwd(*saved, rows, *ctx.args)
        return dx, dw, None if saved[2] is None else db, *[None] * 8


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
    first_token: int = 0,
    vocab_size: int | None = None,
    gather: Callable[[Tensor], Tensor] = lambda stats: stats[None],
) -> Tensor:
    """``cross_entropy(linear(x, weight, bias), labels, ...)`` without the logits: a scalar in fp32 (fp64 for fp64).

    x [..., D], weight [V, D], bias [V], labels [...] int64; under autocast x, weight and bias are cast.  The options are
    :func:`cross_entropy`'s.  For a split vocabulary weight and bias are this rank's rows, and the gradient of x that comes back is this
    rank's part of a sum over the ranks.
    ValueError for shapes or dtypes that do not fit or, on CPU, a label outside 0 to V - 1.
    """
    name = "linear_cross_entropy"
    check_linear(name, x, weight, bias, "none")
    vocab = len(weight) if vocab_size is None else vocab_size
    x, labels, normalizer = checked_rows(name, x, labels, vocab, ignore_index, label_smoothing, normalizer)
    x, weight, bias = autocast(x, weight, bias)
    args = first_token, vocab, ignore_index, label_smoothing, z_loss, gather
    return _LinearCrossEntropy.apply(x, weight, bias, labels, normalizer, *args)
