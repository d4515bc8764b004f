"""Cross-entropy over a vocabulary that may be split over ranks, with label smoothing, z-loss and ignored rows.

    lse = log sum_v exp(x_v)
    loss_i = (1 - e) (lse - x_y) + e (lse - sum_v x_v / V) + z lse^2            mean = sum_i loss_i / normalizer
    dx_v = ((1 + 2 z lse) softmax_v - (1 - e) [v = y] - e / V) dloss_i

There are two stages, because the logsumexp needs every rank's columns: the first yields four numbers a row (max, sum of
exp, target logit, sum of logits), one gather of [R, M, 4] combines them in rank order, and the second computes the
gradient.  e counts the *global* V.  Shapes: logits [M, V/R] (columns first to first + V/R), labels [M] global.
Everything is fp32 (fp64 for fp64), dlogits in logits' dtype.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.errors import check, check_rows
from ..runtime.function import Function, once_differentiable
from ..runtime.op import ELEMENTWISE, acc_dtype, has_numbers, op, scalar
from ..runtime.rules import COUNT, NOT_NEGATIVE, POSITIVE, check_numbers, check_scalar, described, limited
from .options import IGNORE, Loss, Rows
from .triton import bwd_launch, stats_launch

# ---- reference ----


def cross_entropy_stats_ref(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """-> [M, 4]: max, sum exp(x - max), target logit (0 elsewhere), sum of logits (0 without smoothing)."""
    x, first_token = logits.to(acc_dtype(logits)), loss.first_token
    top = x.amax(-1).clamp(min=torch.finfo(x.dtype).min)  # columns may all be -inf: then exp(x - top) is 0, not NaN
    inside = (labels >= first_token) & (labels < first_token + x.shape[1])
    target = x.gather(1, torch.where(inside, labels - first_token, 0)[:, None])[:, 0]
    total = (x - top[:, None]).exp_().sum(-1)
    sums = x.sum(-1) if loss.label_smoothing > 0 else torch.zeros_like(top)
    return torch.stack([top, total, torch.where(inside, target, 0), sums], -1)


def cross_entropy_bwd_ref(logits: Tensor, rows: Rows, loss: Loss) -> Tensor:
    """-> dlogits [M, V/R]"""
    labels, lse, dloss = rows
    x, first_token = logits.to(acc_dtype(logits)), loss.first_token
    row = torch.where(labels == loss.ignore_index, 0, dloss)[:, None]
    dx = (x - lse[:, None]).exp_()
    if loss.z_loss > 0:
        dx *= 1 + 2 * loss.z_loss * lse[:, None]
    if loss.label_smoothing > 0:
        dx -= loss.label_smoothing / loss.vocab_size
    dx *= row
    inside = (labels >= first_token) & (labels < first_token + x.shape[1])
    local = torch.where(inside, labels - first_token, 0)[:, None]
    dx.scatter_add_(1, local, torch.where(inside[:, None], row, 0).mul(loss.label_smoothing - 1))
    return dx.to(logits.dtype)


# ---- CPU: blocks of rows, whose temporaries stay in the cache ----

BLOCK = 1 << 18  # logits a thread


def _row_blocks(rows: int, columns: int) -> int:
    """Returns the number of blocks; each has two rows at least, since torch divides the sum of a single row among
    threads."""
    logits = BLOCK * torch.get_num_threads()
    return max(min(-(-rows * columns // logits), rows // 2), 1)


def stats_cpu(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """Returns :func:`cross_entropy_stats_ref`."""
    count = _row_blocks(*logits.shape)
    blocks = zip(logits.tensor_split(count), labels.tensor_split(count), strict=True)
    return torch.cat([cross_entropy_stats_ref(z, of, loss) for z, of in blocks])


def bwd_cpu(logits: Tensor, rows: Rows, loss: Loss) -> Tensor:
    """Returns :func:`cross_entropy_bwd_ref`."""
    dlogits, count = logits.new_empty(logits.shape), _row_blocks(*logits.shape)
    blocks = (t.tensor_split(count) for t in (dlogits, logits, *rows))
    for dz, z, *of in zip(*blocks, strict=True):
        dz.copy_(cross_entropy_bwd_ref(z, Rows(*of), loss))
    return dlogits


cross_entropy_stats = op(cross_entropy_stats_ref, kind=ELEMENTWISE, launch=stats_launch, cpu=stats_cpu)
cross_entropy_bwd = op(cross_entropy_bwd_ref, kind=ELEMENTWISE, launch=bwd_launch, cpu=bwd_cpu)


# ---- by leaves of the vocabulary, copied: a CPU's loops round a tensor's last elements in another way, and in a GPU's
# kernels a row's address decides in which order it is added ----


def leaf_stats(logits: Tensor, labels: Tensor, loss: Loss, leaf: int | None) -> Tensor:
    """-> [M, 4], or [leaves, M, 4] of leaves of so many columns"""
    if leaf is None:
        return cross_entropy_stats(logits, labels, loss)
    leaves = loss.leaves(logits.shape[1], leaf)
    return torch.stack([cross_entropy_stats(logits[:, v].contiguous(), labels, part) for v, part in leaves])


def leaf_bwd(logits: Tensor, rows: Rows, loss: Loss, leaf: int | None) -> Tensor:
    """-> dlogits [M, V/R]"""
    if leaf is None:
        return cross_entropy_bwd(logits, rows, loss)
    leaves = loss.leaves(logits.shape[1], leaf)
    return torch.cat([cross_entropy_bwd(logits[:, v].contiguous(), rows, part) for v, part in leaves], 1)


# ---- between the stages: the loss from the statistics, for logits and for linear layers ----


def merge_stats(stats: Tensor, add: Callable[[Tensor], Tensor] = lambda slices: slices.sum(0)) -> Tensor:
    """[R, M, 4] of R slices of the vocabulary -> [M, 4] of all of it, added in rank order.

    ``add`` makes the sum [M] of [R, M] instead: one of few columns has another order than one of many.
    """
    top = stats[..., 0].amax(0)
    total = add(stats[..., 1] * torch.exp(stats[..., 0] - top))
    return torch.stack([top, total, add(stats[..., 2]), add(stats[..., 3])], -1)


def row_losses(stats: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Every rank's [R, M, 4] -> the loss of each row (0 where it is ignored) and lse, [M]."""
    top, exps, target, total = merge_stats(stats).unbind(-1)
    lse, smoothing = torch.log(exps) + top, loss.label_smoothing
    losses = lse - (1 - smoothing) * target - smoothing * total / loss.vocab_size + loss.z_loss * lse * lse
    return torch.where(labels != loss.ignore_index, losses, 0), lse


REDUCTIONS = "mean", "sum", "none"


class Reduction(NamedTuple):
    """The reduction of the rows' losses; ``normalizer`` divides their sum in place of the valid labels' count."""

    kind: str = "mean"
    normalizer: float | Tensor | None = None

    def check(self, name: str, normalizer: str = "normalizer") -> None:
        """Raises the ValueError of the public function ``name``, whose argument ``normalizer`` is."""
        if self.kind not in REDUCTIONS:
            raise ValueError(f"{name}: reduction must be one of {', '.join(REDUCTIONS)}, got {described(self.kind)}")
        if self.normalizer is not None:
            check(self.kind == "mean", f"{name}: {normalizer} goes with reduction='mean', got reduction={self.kind!r}")
            readable = isinstance(self.normalizer, Tensor) and has_numbers(self.normalizer)
            check_scalar(f"{name}: {normalizer}", self.normalizer, POSITIVE, readable=readable)

    def __call__(self, losses: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """losses [M], labels [...] -> a scalar, or [...]"""
        if self.kind == "none":
            return losses.view(labels.shape)
        if self.kind == "sum":
            return losses.sum()
        if self.normalizer is None:
            return losses.sum() / (labels != ignore_index).sum().clamp(min=1)
        return losses.sum() / scalar(self.normalizer, losses.dtype, losses.device)


# ---- autograd ----


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, loss: Loss, gather: Callable[[Tensor], Tensor], leaf: int | None
    ) -> Tensor:
        losses, lse = row_losses(gather(leaf_stats(logits, labels, loss, leaf)), labels, loss)
        ctx.save_for_backward(logits, labels, lse)
        ctx.loss, ctx.leaf = loss, leaf
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, lse = ctx.saved_tensors
        return leaf_bwd(logits, Rows(labels, lse, dloss=dlosses), ctx.loss, ctx.leaf), *[None] * 4


# ---- public ----


LOSS = {"label_smoothing": limited("lie in [0, 1)", lambda v: 0 <= v < 1), "z_loss": NOT_NEGATIVE}
_NUMBERS = {"vocab_size": COUNT, **LOSS}


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    normalizer: float | Tensor | None = None,
    reduction: str = "mean",
    first_token: int = 0,
    vocab_size: int | None = None,
    gather: Callable[[Tensor], Tensor] = lambda stats: stats[None] if stats.dim() == 2 else stats,
    leaf: int | None = None,
) -> Tensor:
    """Returns the mean cross-entropy, a scalar in fp32 (fp64 for fp64).

    logits [..., V] and labels [...] int64; rows labelled ``ignore_index`` count nothing.  ``normalizer`` divides the
    sum (default: the valid labels here, at least 1), which makes means over micro-batches exact.  ``reduction``:
    "mean", "sum", or "none" for the loss of each row, [...], 0 where it is ignored.  For a split vocabulary
    ``first_token`` is the global id of the first column, ``vocab_size`` the global V, and ``gather`` turns [M, 4] into
    every rank's [R, M, 4].  With ``leaf``, the width of a leaf of the vocabulary, the sums over it have the same bits
    however whole leaves are split over ranks: ``gather`` is given [leaves, M, 4] and returns all of them.

    ValueError for shapes that do not agree or, on CPU, a label outside 0 to V - 1.
    """
    check_rows("cross_entropy", logits, "logits")
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    loss = Loss(vocab_size, first_token, ignore_index, label_smoothing=label_smoothing, z_loss=z_loss)
    reduce = Reduction(reduction, normalizer)
    rows, row_labels = checked_rows("cross_entropy", logits, labels, loss=loss, reduction=reduce)
    return reduce(_CrossEntropy.apply(rows, row_labels, loss, gather, leaf), labels, ignore_index)


def checked_rows(name: str, x: Tensor, labels: Tensor, *, loss: Loss, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """Returns x [..., N] and labels [...] as rows; raises the ValueError of the public function ``name`` for what does
    not agree."""
    same = labels.shape == x.shape[:-1] and labels.dtype == torch.int64
    check(same, f"{name}: labels must be int64 {tuple(x.shape[:-1])}, got {labels.dtype} {tuple(labels.shape)}")
    check_numbers(name, loss._asdict(), _NUMBERS)
    reduction.check(name)
    x, labels = x.reshape(-1, x.shape[-1]).contiguous(), labels.reshape(-1).contiguous()
    check_ids(f"{name}: labels", labels, loss.vocab_size, loss.ignore_index)
    return x, labels


def check_ids(name: str, ids: Tensor, vocab: int, ignore_index: int | None = None) -> None:
    """Raises ValueError for an id outside 0 to vocab - 1; not on a GPU, which would have to be waited for, nor of fake
    tensors and in a graph of torch.compile, which have no values."""
    if not has_numbers(ids) or ids.device.type != "cpu" or ids.numel() == 0:
        return
    bad = (ids < 0) | (ids >= vocab)
    if ignore_index is not None:
        bad &= ids != ignore_index
    check(not bad.any(), f"{name} must lie in 0 to {vocab - 1}, got {ids[bad][:1].tolist()}")
