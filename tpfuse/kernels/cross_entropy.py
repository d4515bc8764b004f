"""Cross-entropy over a vocabulary that may be split over ranks, with label smoothing, z-loss and ignored rows.

    lse = log sum_v exp(x_v)
    loss_i = (1 - e) (lse - x_y) + e (lse - sum_v x_v / V) + z lse^2            loss = sum_i loss_i / normalizer
    dx_v = ((1 + 2 z lse) softmax_v - (1 - e) [v = y] - e / V) dloss_i / normalizer

Two stages, because the logsumexp needs every rank's columns: four numbers a row (max, sum of exp, target logit, sum of logits) leave
the first, one gather of [R, M, 4] combines them in rank order, and the second makes the gradient.  e counts the *global* V.
Shapes: logits [M, V/R] (columns first to first + V/R), labels [M] global.  Everything is fp32 (fp64 for fp64), dlogits in logits' dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._cross_entropy import bwd_launch, stats_launch
from ._op import acc_dtype, check, op

IGNORE = -100


# ---- reference ----


def cross_entropy_stats_ref(logits: Tensor, labels: Tensor, first: int, smoothing: bool) -> Tensor:
    """-> [M, 4]: max, sum exp(x - max), target logit (0 elsewhere), sum of logits (0 without smoothing)."""
    x = logits.to(acc_dtype(logits))
    top = x.amax(-1).clamp(min=torch.finfo(x.dtype).min)  # columns may all be -inf: then exp(x - top) is 0, not NaN
    inside = (labels >= first) & (labels < first + x.shape[1])
    target = x.gather(1, torch.where(inside, labels - first, 0)[:, None])[:, 0]
    total = torch.exp(x - top[:, None]).sum(-1)
    return torch.stack([top, total, torch.where(inside, target, 0), x.sum(-1) if smoothing else torch.zeros_like(top)], -1)


def cross_entropy_bwd_ref(
    logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, first: int, vocab: int, ignore_index: int, smoothing: float, z_loss: float
) -> Tensor:
    """dloss [M], the gradient of each row's loss -> dlogits [M, V/R]."""
    x = logits.to(acc_dtype(logits))
    row = torch.where(labels == ignore_index, 0, dloss)[:, None]
    dx = torch.exp(x - lse[:, None]).mul_(1 + 2 * z_loss * lse[:, None]).sub_(smoothing / vocab).mul_(row)
    inside = (labels >= first) & (labels < first + x.shape[1])
    local = torch.where(inside, labels - first, 0)[:, None]
    dx.scatter_add_(1, local, torch.where(inside[:, None], row, 0).mul(smoothing - 1))
    return dx.to(logits.dtype)


cross_entropy_stats = op(cross_entropy_stats_ref, launch=stats_launch)
cross_entropy_bwd = op(cross_entropy_bwd_ref, launch=bwd_launch)


# ---- between the stages: what any cross-entropy does with the statistics ----


def merge_stats(stats: Tensor) -> Tensor:
    """[R, M, 4] of R slices of the vocabulary -> [M, 4] of all of it, added in rank order."""
    top = stats[..., 0].amax(0)
    total = (stats[..., 1] * torch.exp(stats[..., 0] - top)).sum(0)
    return torch.stack([top, total, stats[..., 2].sum(0), stats[..., 3].sum(0)], -1)


def mean_loss(
    stats: Tensor, labels: Tensor, normalizer: Tensor | None, vocab: int, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Every rank's [R, M, 4] -> the scalar loss, lse [M], the normalizer."""
    top, exps, target, total = merge_stats(stats).unbind(-1)
    lse = torch.log(exps) + top
    losses = lse - (1 - smoothing) * target - smoothing * total / vocab + z_loss * lse * lse
    valid = labels != ignore_index
    if normalizer is None:
        normalizer = valid.sum().clamp(min=1)
    return torch.where(valid, losses, 0).sum() / normalizer, lse, normalizer


# ---- autograd ----


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, normalizer, first, vocab, ignore_index, smoothing, z_loss, gather):
        stats = gather(cross_entropy_stats(logits, labels, first, smoothing > 0))
        loss, lse, normalizer = mean_loss(stats, labels, normalizer, vocab, ignore_index, smoothing, z_loss)
        ctx.save_for_backward(logits, labels, lse, normalizer)
        ctx.args = first, vocab, ignore_index, smoothing, z_loss
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        logits, labels, lse, normalizer = ctx.saved_tensors
        rows = (dloss / normalizer).expand(len(labels))
        return cross_entropy_bwd(logits, labels, lse, rows, *ctx.args), *[None] * 8


# ---- public ----


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    normalizer: float | Tensor | None = None,
    first_token: int = 0,
    vocab_size: int | None = None,
    gather: Callable[[Tensor], Tensor] = lambda stats: stats[None],
) -> Tensor:
    """Mean cross-entropy, a scalar in fp32 (fp64 for fp64).

    logits [..., V] and labels [...] int64; rows labelled ``ignore_index`` count nothing.  ``normalizer`` divides the sum (default: the
    valid labels here, at least 1), which makes means over micro-batches exact.  For a split vocabulary ``first_token`` is the global id of
    the first column, ``vocab_size`` the global V, and ``gather`` turns [M, 4] into every rank's [R, M, 4].
    ValueError for shapes that do not fit or, on CPU, a label outside 0 to V - 1.
    """
    vocab = logits.shape[-1] if vocab_size is None else vocab_size
    logits, labels, normalizer = checked_rows("cross_entropy", logits, labels, vocab, ignore_index, label_smoothing, normalizer)
    return _CrossEntropy.apply(logits, labels, normalizer, first_token, vocab, ignore_index, label_smoothing, z_loss, gather)


def checked_rows(
    name: str, x: Tensor, labels: Tensor, vocab: int, ignore_index: int, label_smoothing: float, normalizer: float | Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [..., N] and labels [...] as rows, the normalizer as a tensor; a named error for what does not fit."""
    fits = labels.shape == x.shape[:-1] and labels.dtype == torch.int64
    check(fits, f"{name}: labels must be int64 {tuple(x.shape[:-1])}, got {labels.dtype} {tuple(labels.shape)}")
    check(0 <= label_smoothing < 1, f"{name}: label_smoothing must lie in [0, 1), got {label_smoothing}")
    x, labels = x.reshape(-1, x.shape[-1]).contiguous(), labels.reshape(-1).contiguous()
    if not torch.compiler.is_compiling():
        check_ids(f"{name}: labels", labels, vocab, ignore_index)
    if normalizer is not None:
        normalizer = torch.as_tensor(normalizer, dtype=acc_dtype(x), device=x.device)
    return x, labels, normalizer


def check_ids(name: str, ids: Tensor, vocab: int, ignore_index: int | None = None) -> None:
    """On CPU only: a GPU would have to be waited for."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    bad = (ids < 0) | (ids >= vocab)
    if ignore_index is not None:
        bad &= ids != ignore_index
    check(not bad.any(), f"{name} must lie in 0 to {vocab - 1}, got {ids[bad][:1].tolist()}")
