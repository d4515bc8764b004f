"""The loss over a split vocabulary from row shards, without logits: gather_linear and cross_entropy as one op.

    forward     x = gather(n);  [M, 4] of this rank's columns, gathered, give lse and the loss
    backward    dlogits made again in chunks;  dn = scatter(dlogits W),  dW = dlogits' x

Beside the rows, four numbers a row and rank travel.  Saved are n's shard (or how to make it again) and lse: neither
logits nor gathered rows.  It costs one GEMM more than saved logits would (four for three).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..collectives import all_gather, all_reduce, reduce
from ..kernels.gemm.op import check_linear
from ..kernels.losses.linear import gradients, linear_cross_entropy_bwd, linear_cross_entropy_bwd_add, stats_in_tiles
from ..kernels.losses.op import Reduction, checked_rows, merge_stats, row_losses
from ..kernels.losses.options import IGNORE, Linear, Loss, Rows
from ..kernels.norm import Recompute
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.leaves import check_device, tree
from ..kernels.runtime.main_grad import Main, mains, wanted
from ..kernels.runtime.op import autocast
from ..parallel import TensorParallel
from .crossings import expanded, gather_rows, scatter_rows
from .records import SavedInput, restore, save


def gather_stats(stats: Tensor, tp: TensorParallel) -> Tensor:
    """[M, 4] -> every rank's [R, M, 4]; [leaves, M, 4] -> all leaves of all ranks, with ``tp.batch_invariant`` merged
    into one"""
    if stats.dim() == 2:
        return stats[None] if tp.size == 1 else all_gather(stats, tp.size, tp.group_name)
    leaves = stats if tp.size == 1 else all_gather(stats, tp.size, tp.group_name).flatten(0, 1)
    return leaves if tp.batch_invariant is None else merge_stats(leaves, lambda rows: tree(rows.unbind(0)))[None]


def loss_of_pieces(
    run: Callable[[float | Tensor | None], Tensor], labels: Tensor, reduction: Reduction, tp: TensorParallel,
    *, ignore_index: int = IGNORE,
) -> Tensor:  # fmt: skip
    """Returns ``run(normalizer)``, the loss of this rank's piece of each sequence, as that of whole sequences.

    The sum is taken over the context-parallel ranks; without a normalizer its mean is over all their labels.
    """
    kind, normalizer = reduction
    if tp.cp is None:
        return run(normalizer)
    if kind == "mean" and normalizer is None:
        normalizer = all_reduce((labels != ignore_index).sum().double(), tp.cp).clamp(min=1)
    loss = run(normalizer)
    return reduce(loss, tp.cp) if loss.dim() == 0 else loss


# ---- autograd ----


class _GatherLinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        n: Tensor,
        w: Tensor,
        b: Tensor | None,
        labels: Tensor,
        loss: Loss,
        tp: TensorParallel,
        recompute: Recompute | None,
    ) -> Tensor:
        layer, leaf = Linear(gather_rows(n, tp), w, b), leaf_of(loss.vocab_size, tp)
        leaves = loss.leaves(len(w), leaf)
        pieces = [stats_in_tiles(layer.of(tokens), labels, part, tp.row_tile) for tokens, part in leaves]
        stats = pieces[0] if leaf is None else torch.stack(pieces)
        losses, lse = row_losses(gather_stats(stats, tp), labels, loss)
        save(ctx, (w, b, labels, lse), SavedInput.of(n, recompute, tp))
        ctx.loss, ctx.tp, ctx.mains = loss, tp, mains(w)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        (w, b, labels, lse), n = restore(ctx)
        rows = Rows(labels, lse, dloss=dlosses)
        layer = Linear(n.rows(), w, b)
        if ctx.tp.bitwise is None:
            dx, dw, db = gradients(layer, rows, ctx.loss, wanted(ctx.mains))
        else:
            dx, dw, db = _leaf_gradients(layer, rows, ctx.loss, ctx.tp, main=wanted(ctx.mains))
        return scatter_rows(dx, ctx.tp), dw, None if b is None else db, *[None] * 4


def _leaf_gradients(
    layer: Linear, rows: Rows, loss: Loss, tp: TensorParallel, main: Main | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns :func:`gradients` by leaves of the vocabulary, dx as this rank's node of the tree over all leaves."""
    leaves = loss.leaves(len(layer.w), leaf_of(loss.vocab_size, tp))
    if main is None:
        results = [linear_cross_entropy_bwd(layer.of(tokens), rows, part, fixed=True) for tokens, part in leaves]
        dx, dw, db = zip(*results, strict=True)
        return tree(dx), torch.cat(dw), torch.cat(db)

    def add(total: Tensor) -> list[tuple[Tensor, Tensor]]:
        add_to = linear_cross_entropy_bwd_add
        return [add_to(layer.of(tokens), rows, part, total[tokens], fixed=True) for tokens, part in leaves]

    dx, db = zip(*main.add(add), strict=True)
    return tree(dx), None, torch.cat(db)


def leaf_of(vocab_size: int, tp: TensorParallel) -> int | None:
    """Returns the width of a leaf of the vocabulary; None without ``tp.bitwise``."""
    return None if tp.bitwise is None else tp.leaf(vocab_size, "vocab_size")


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
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    normalizer: float | Tensor | None = None,
    reduction: str = "mean",
    recompute: Recompute | None = None,
) -> Tensor:
    """Mean cross-entropy of linear(x, weight, bias), a scalar in fp32 (fp64 for fp64), the same on every rank.

    With ``reduction="none"`` it is the loss of each row, [M], 0 where it is ignored.

    x as in gather_linear, weight [V/R, D] and bias [V/R] this rank's rows of the vocabulary, from ``first_token`` on;
    labels int64 [M] global ids; the other options are those of kernels.cross_entropy.
    ``recompute`` is saved in place of x. ValueError for shapes or dtypes that do not fit or, on CPU, a label outside 0
    to V - 1.
    """
    name = "gather_linear_cross_entropy"
    check_linear(name, x, weight, bias, activation="none")
    x, weight, bias = autocast(x, weight, bias)
    x = expanded(name, x, tp)
    if tp.bitwise is not None:
        check_device(name, x)
    rows = x[..., :1].flatten(0, 1)  # of all ranks
    loss = Loss(vocab_size, first_token, ignore_index, label_smoothing=label_smoothing, z_loss=z_loss)
    mean = Reduction(reduction, normalizer)
    _, labels = checked_rows(name, rows, labels, loss=loss, reduction=mean)
    losses = _GatherLinearCrossEntropy.apply(x, weight, bias, labels, loss, tp, recompute)
    return mean(losses, labels, ignore_index)
