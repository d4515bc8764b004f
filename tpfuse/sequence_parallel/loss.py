"""The loss over a split vocabulary from row shards, without logits: gather_linear and cross_entropy as one op.

    forward     x = gather(n);  [M, 4] of this rank's columns, gathered, give lse and the loss
    backward    dlogits made again in chunks;  dn = scatter(dlogits W),  dW = dlogits' x

Beside the rows, four numbers a row and rank travel.  Saved are n's shard (or how to make it again) and lse: neither
logits nor gathered rows.  It costs one GEMM more than saved logits would (four for three).
"""

from typing import Any

from torch import Tensor

from ..collectives import all_gather
from ..kernels.cross_entropy.linear import gradients, linear_cross_entropy_stats
from ..kernels.cross_entropy.op import checked_rows, mean_loss
from ..kernels.cross_entropy.options import Linear, Loss, Rows
from ..kernels.linear.op import check_linear
from ..kernels.norm import Recompute
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.main_grad import mains, wanted
from ..kernels.runtime.op import autocast
from ..parallel import TensorParallel
from .crossings import expanded, gather_rows, scatter_rows
from .records import Saved, restore, save


def gather_stats(stats: Tensor, tp: TensorParallel) -> Tensor:
    """[M, 4] -> every rank's [R, M, 4]"""
    return stats[None] if tp.size == 1 else all_gather(stats, tp.size, tp.group_name)


# ---- autograd ----


class _GatherLinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        n: Tensor,
        w: Tensor,
        b: Tensor | None,
        labels: Tensor,
        normalizer: Tensor | None,
        loss: Loss,
        tp: TensorParallel,
        recompute: Recompute | None,
    ) -> Tensor:
        stats = linear_cross_entropy_stats(Linear(gather_rows(n, tp), w, b), labels, loss)
        mean, lse, normalizer = mean_loss(gather_stats(stats, tp), labels, normalizer, loss)
        save(ctx, (w, b, labels, lse, normalizer), Saved.of(n, recompute, tp))
        ctx.loss, ctx.tp, ctx.mains = loss, tp, mains(w)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmean: Tensor) -> tuple[Tensor | None, ...]:
        (w, b, labels, lse, normalizer), n = restore(ctx)
        rows = Rows(labels, lse, dloss=(dmean / normalizer).expand(len(labels)))
        dx, dw, db = gradients(Linear(n.rows(), w, b), rows, ctx.loss, wanted(ctx.mains))
        return scatter_rows(dx, ctx.tp), dw, None if b is None else db, *[None] * 5


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
    recompute: Recompute | None = None,
) -> Tensor:
    """Mean cross-entropy of linear(x, weight, bias), a scalar in fp32 (fp64 for fp64), the same on every rank.

    x as in gather_linear, weight [V/R, D] and bias [V/R] this rank's rows of the vocabulary, from ``first_token`` on;
    labels int64 [M] global ids, -100 ignored; ``normalizer`` divides the sum (default: the valid labels, at least 1).
    ``recompute`` is saved in place of x. ValueError for shapes or dtypes that do not fit or, on CPU, a label outside 0
    to V - 1.
    """
    name = "gather_linear_cross_entropy"
    check_linear(name, x, weight, bias, activation="none")
    x, weight, bias = autocast(x, weight, bias)
    x = expanded(name, x, tp)
    rows = x[..., :1].flatten(0, 1)  # of all ranks
    loss = Loss(vocab_size, first_token)
    _, labels, normalizer = checked_rows(name, rows, labels, loss=loss, normalizer=normalizer)
    return _GatherLinearCrossEntropy.apply(x, weight, bias, labels, normalizer, loss, tp, recompute)
