"""The loss over a split vocabulary from row shards, without logits: gather_linear and cross_entropy as one op.

    forward     x = enter(n);  [M, 4] of this rank's columns, gathered, give lse and the loss
    backward    dlogits made again in chunks;  dn = leave(dlogits W),  dW = dlogits' x

What travels beside the rows is four numbers a row and rank.  Saved are n's shard (or how to make it again) and lse: neither logits nor
gathered rows.  It costs one GEMM more than the logits kept would (four for three).
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives import all_gather
from ..kernels._op import autocast
from ..kernels.cross_entropy import IGNORE, checked_rows, mean_loss
from ..kernels.linear import check_linear
from ..kernels.linear_cross_entropy import linear_cross_entropy_bwd, linear_cross_entropy_stats
from ..kernels.norm import Remake
from ..parallel import TensorParallel
from .plain import _expanded, _restored, _saved, enter, leave


def gather_stats(stats: Tensor, tp: TensorParallel) -> Tensor:
    """[M, 4] -> every rank's [R, M, 4]"""
    return stats[None] if tp.size == 1 else all_gather(stats, tp.size, tp.group_name)


# ---- autograd ----


class _GatherLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, w, b, labels, normalizer, first, vocab, tp, remake):
        stats = gather_stats(linear_cross_entropy_stats(enter(n, tp), w, b, labels, first, False), tp)
        loss, lse, normalizer = mean_loss(stats, labels, normalizer, vocab, IGNORE, 0.0, 0.0)
        ctx.save_for_backward(w, b, labels, lse, normalizer, *_saved(n, remake))
        ctx.args = first, vocab, tp, None if remake is None else remake[5:]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        w, b, labels, lse, normalizer, *saved = ctx.saved_tensors
        first, vocab, tp, constants = ctx.args
        rows = (dloss / normalizer).expand(len(labels))
        x = enter(_restored(tuple(saved), constants, tp), tp)
        dx, dw, db = linear_cross_entropy_bwd(x, w, b, labels, lse, rows, first, vocab, IGNORE, 0.0, 0.0)
        return leave(dx, tp), dw, None if b is None else db, *[None] * 6


# ---- public ----


def gather_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    tp: TensorParallel,
    vocab_size: int,
    first_token: int,
    normalizer: float | Tensor | None = None,
    remake: Remake | None = None,
) -> Tensor:
    """Mean cross-entropy of linear(x, weight, bias), a scalar in fp32 (fp64 for fp64), the same on every rank.

    x as in gather_linear, weight [V/R, D] and bias [V/R] this rank's rows of the vocabulary, from ``first_token`` on; labels int64 [M]
    global ids, -100 ignored; ``normalizer`` divides the sum (default: the valid labels, at least 1).  ``remake`` is saved in place of x.
    ValueError for shapes or dtypes that do not fit or, on CPU, a label outside 0 to V - 1.
    """
    name = "gather_linear_cross_entropy"
    check_linear(name, x, weight, bias, "none")
    x, weight, bias = autocast(x, weight, bias)
    x = _expanded(name, x, tp)
    rows = x[..., :1].flatten(0, 1)  # of all ranks
    _, labels, normalizer = checked_rows(name, rows, labels, vocab_size, IGNORE, 0.0, normalizer)
    return _GatherLinearCrossEntropy.apply(x, weight, bias, labels, normalizer, first_token, vocab_size, tp, remake)
