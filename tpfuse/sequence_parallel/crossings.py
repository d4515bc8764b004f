"""The two crossings between row shards and GEMMs, and the functions made of one alone.

A reduce-scatter is an exchange plus a sum; an all-gather is a broadcast plus an exchange.  So there is one
collective, ``exchange`` (an all-to-all of row tiles, its own adjoint); sum and broadcast belong to the kernels that
touch the rows anyway.  Between two GEMMs every tensor is [R, m, D]:  parts to be summed, or one shard expanded to all
peers with stride 0, whose exchange is an all-gather.

                  sequence parallel                     without (the same rows everywhere)           adjoint
    gather_rows   [R, m, D] --exchange--> [M, D]        [1, M, D] --view--> [M, D]                   scatter_rows
    scatter_rows  [M, D] --exchange--> [R, m, D]        [M, D] --all-reduce--> [1, M, D]             gather_rows

Only this file decides the layout of the rows: code written with the two crossings works with and without sequence
parallelism.
"""

from typing import Any

from torch import Tensor

from ..collectives import all_gather, all_reduce, all_to_all, summed
from ..kernels.runtime.errors import check
from ..kernels.runtime.function import Function, once_differentiable
from ..parallel import TensorParallel

# ---- without gradients ----


def exchange_parts(x: Tensor, tp: TensorParallel) -> Tensor:
    """Exchanges tiles, [R, m, D] -> [R, m, D]; an all-gather if x is one shard expanded with stride 0."""
    if tp.size == 1:
        return x
    return all_gather(x[0], tp.size, tp.group_name) if x.stride(0) == 0 else all_to_all(x, tp.group_name)


def gather_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    """Returns the rows that a GEMM multiplies, [M, D]."""
    return (exchange_parts(x, tp) if tp.sequence_parallel else x).flatten(0, 1)


def scatter_rows(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sends a GEMM's rows to the ranks that hold them: partial sums [M, D] to parts [R, m, D] of this rank's rows, not
    yet summed (without sequence parallelism to their sum, [1, M, D])."""
    if tp.sequence_parallel:
        return exchange_parts(x.view(tp.size, -1, x.shape[-1]), tp)
    return all_reduce(x, tp)[None]


# ---- autograd ----


class _Expand(Function):
    """[m, D] -> [copies, m, D] with stride 0.  Adds the gradients as :func:`..collectives.summed` does, and autograd
    does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, copies: int) -> Tensor:
        ctx.tp = tp
        return x.expand(copies, -1, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return summed(dy, ctx.tp), None, None


class _ScatterRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return scatter_rows(x, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor | None, ...]:
        return gather_rows(dp, ctx.tp), None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x) if tp.size == 1 else exchange_parts(x, tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return exchange_parts(dy, ctx.tp), None


def expanded(name: str, x: Tensor, tp: TensorParallel, copies: int | None = None) -> Tensor:
    """Returns x [m, D] or [copies, m, D] as [copies, m, D], by default one for each shard of the rows.

    ValueError, in the name of the op ``name``, for another shape.
    """
    copies = tp.row_shards if copies is None else copies
    if x.dim() == 2:
        return _Expand.apply(x.contiguous(), tp, copies)
    check(x.dim() == 3 and x.shape[0] == copies, f"{name}: x must be [m, D] or [{copies}, m, D], got {tuple(x.shape)}")
    return x


# ---- public ----


def exchange(x: Tensor, tp: TensorParallel) -> Tensor:
    """Exchanges row tiles all to all: x [R, m, D] -> [R, m, D], tile r to and from rank r.

    It is its own adjoint.  ValueError for another R.
    """
    check(x.dim() == 3 and x.shape[0] == tp.size, f"exchange: x must be [{tp.size}, m, D], got {tuple(x.shape)}")
    return _Exchange.apply(x, tp)


def leave_parts(x: Tensor, tp: TensorParallel) -> Tensor:
    """Scatters partial sums of all rows, x [M, D], to parts [R, m, D] of this rank's rows (without sequence parallelism
    to their sum, [1, M, D]).  ValueError if M is not divisible by R."""
    if x.shape[0] % tp.row_shards:
        raise ValueError(
            f"leave_parts: M={x.shape[0]} rows are not divisible by tensor-parallel size {tp.row_shards}; pad them"
        )
    return _ScatterRows.apply(x, tp)
