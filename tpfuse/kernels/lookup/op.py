"""Embedding: the lookup in a slice of the vocabulary.

    forward    y_i = W[id_i - first] where the id lies in this slice, else 0
    backward   dW[v] = sum of dy_i with id_i = v

Shapes: W [V/R, D], ids [M] -> y [M, D].  What finishes an embedding (rank sum, positions, token types, dropout, norm)
is ``embed_finish`` of the fused norm.
"""

from typing import Any

import torch
from torch import Tensor

from ..runtime.errors import check_floating
from ..runtime.function import Function, once_differentiable
from ..runtime.main_grad import mains, wanted
from ..runtime.op import ELEMENTWISE, acc_dtype, autocast, op
from ..runtime.rules import described
from .triton import bwd_cost, bwd_launch, fwd_cost, fwd_launch

# ---- reference ----


def embedding_fwd_ref(weight: Tensor, ids: Tensor, base: int) -> Tensor:
    inside = (ids >= base) & (ids < base + len(weight))
    return weight[torch.where(inside, ids - base, 0)].masked_fill_(~inside[..., None], 0)


def embedding_bwd_ref(dy: Tensor, ids: Tensor, base: int, rows: int, dtype: torch.dtype) -> Tensor:
    """-> dW [rows, D] in ``dtype``; sums in fp32, by a sort rather than atomics."""
    inside = (ids >= base) & (ids < base + rows)
    local = torch.where(inside, ids - base, rows)  # one row more takes what is not ours
    dw = torch.ops.aten.embedding_dense_backward.default(dy.to(acc_dtype(dy)), local, rows + 1, -1, False)
    return dw[:rows].to(dtype, copy=True)


embedding_fwd = op(embedding_fwd_ref, kind=ELEMENTWISE, launch=fwd_launch, cost=fwd_cost)
embedding_bwd = op(embedding_bwd_ref, kind=ELEMENTWISE, launch=bwd_launch, cost=bwd_cost)


# ---- autograd ----


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, base: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.slice, ctx.dtype, ctx.mains = (base, len(weight)), weight.dtype, mains(weight)
        return embedding_fwd(weight, ids, base)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy, (ids,), main = dy.contiguous(), ctx.saved_tensors, wanted(ctx.mains)
        if main is None:
            return embedding_bwd(dy, ids, *ctx.slice, ctx.dtype), None, None
        main.add(lambda total: total.add_(embedding_bwd(dy, ids, *ctx.slice, total.dtype)))
        return None, None, None


# ---- public ----


def embedding(weight: Tensor, ids: Tensor, *, first: int = 0) -> Tensor:
    """Looks up rows in a slice of a table.

    weight [V/R, D] holds global ids first to first + V/R; ids [...] int64 -> [..., D] in weight's dtype (under
    autocast: in its dtype), 0 for other ids.  ValueError for ids of another dtype and a weight of another rank.
    """
    if weight.dim() != 2:
        raise ValueError(f"embedding: weight must be [V, D], got {described(weight)}")
    check_floating("embedding", "weight", weight)
    if ids.dtype != torch.int64:
        raise ValueError(f"embedding: ids must be int64, got {described(ids)}")
    return _Embedding.apply(*autocast(weight), ids, first)
