"""The Triton side of the embedding lookup: kernels, launch parameters, launchers.

    forward    y[i] = W[id_i - first] where that row exists, else 0
    backward   ids sorted (stably, by torch): the tokens of table row v are order[offsets[v]:offsets[v + 1]]
               1. the sorted tokens are cut every CHUNK; a chunk that holds one id only is summed to a partial row 2.
               dW[v] = its tokens before its first whole chunk + the partials of those + its tokens after the last; 0
               without tokens

So a token that is everywhere is summed by many programs, nothing is added atomically, and no length reaches the host.
Sums are fp32 in an order that the sorted ids and M decide: the same bits in every run, and for every slice of the
vocabulary.  Offsets are int64.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..runtime.device import load
from ..runtime.launch import launch, multiprocessors, next_power_of_2, target
from ..runtime.op import Cost, moved
from ..runtime.triton import tl, triton
from ..runtime.tuning import tuned

# ---- forward ----


@triton.jit
def _lookup_kernel(
    weight_ptr,  # [V, D] in, strides (stride_v, 1)
    ids_ptr,  # [M] in
    out_ptr,  # [M, D] out
    M, V, D, first, stride_v,
    ROWS: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    live, within = rows < M, (columns < D)[None, :]
    local = tl.load(ids_ptr + rows, mask=live, other=-1) - first
    inside = live & (local >= 0) & (local < V)
    y = tl.load(weight_ptr + local[:, None] * stride_v + columns[None, :], mask=inside[:, None] & within, other=0.0)
    tl.store(out_ptr + rows[:, None] * D + columns[None, :], y, mask=live[:, None] & within)


# ---- backward ----


@triton.jit
def _add_rows(total, x_ptr, order_ptr, begin, end, columns, D, ROWS: tl.constexpr):
    """total [ROWS, A] + rows begin to end of x [_, D] (with ``order``: rows order[begin] to order[end - 1]), every
    ROWS-th to one lane."""
    for i in range(tl.cdiv(end - begin, ROWS)):
        at = begin + i * ROWS + tl.arange(0, ROWS)
        live = at < end
        rows = at
        if order_ptr is not None:
            rows = tl.load(order_ptr + at, mask=live, other=0)
        total += load(x_ptr, rows[:, None] * D + columns[None, :], live[:, None] & (columns < D)[None, :])
    return total


@triton.jit
def _chunk_sums_kernel(
    dy_ptr,  # [M, D] in
    ids_ptr, order_ptr,  # [M] in: the ids sorted, where each one came from
    partial_ptr,  # [M // CHUNK, D] out, fp32; rows of chunks with more than one id are left alone
    V, D, first,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    begin, end = c * CHUNK, (c + 1) * CHUNK
    lowest, highest = tl.load(ids_ptr + begin), tl.load(ids_ptr + end - 1)
    if (lowest == highest) & (lowest >= first) & (lowest < first + V):
        total = _add_rows(tl.zeros([ROWS, A], tl.float32), dy_ptr, order_ptr, begin, end, columns, D, ROWS)
        tl.store(partial_ptr + c * D + columns, tl.sum(total, 0), mask=columns < D)


@triton.jit
def _row_sums_kernel(
    dy_ptr,  # [M, D] in
    order_ptr,  # [M] in
    offsets_ptr,  # [V + 1] in
    partial_ptr,  # [M // CHUNK, D] in, fp32
    dw_ptr,  # [V, D] out
    V, D,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Programs stride over the table: neighbouring ids, which are of like frequency, go to different ones."""
    P = tl.num_programs(0)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    for i in range(tl.cdiv(V - tl.program_id(0), P)):
        v = (tl.program_id(0) + i * P).to(tl.int64)
        begin, end = tl.load(offsets_ptr + v), tl.load(offsets_ptr + v + 1)
        first_whole, last_whole = tl.cdiv(begin, CHUNK), end // CHUNK
        whole = first_whole < last_whole
        total = tl.zeros([ROWS, A], tl.float32)
        total = _add_rows(total, dy_ptr, order_ptr, begin, tl.where(whole, first_whole * CHUNK, end), columns, D, ROWS)
        total = _add_rows(total, partial_ptr, None, first_whole, last_whole, columns, D, ROWS)
        total = _add_rows(total, dy_ptr, order_ptr, tl.where(whole, last_whole * CHUNK, end), end, columns, D, ROWS)
        tl.store(dw_ptr + v * D + columns, tl.sum(total, 0).to(dw_ptr.dtype.element_ty), mask=columns < D)


# ---- launch parameters ----


def chunk_of(M: int) -> int:
    """The most that one program meets is 2 CHUNK tokens and M / CHUNK partials: least near sqrt(M / 2)."""
    return max(32, next_power_of_2(math.isqrt(M)) // 2)


def fwd_config(D: int) -> dict[str, int]:
    A = min(next_power_of_2(D), 2048)
    return dict(ROWS=max(2048 // A, 1), A=A, num_warps=4)


def bwd_config(D: int) -> dict[str, int]:
    """These decide a sum's order, so they follow from D alone, the same for every slice of a table."""
    A = min(next_power_of_2(D), 1024)
    return dict(ROWS=4, A=A, num_warps=max(A // 256, 1))


# ---- launchers ----


def fwd_launch(weight: Tensor, ids: Tensor, first: int) -> Tensor:
    V, D = weight.shape
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    M, ids = ids.numel(), ids.contiguous()
    out = weight.new_empty(*ids.shape, D)
    config = tuned("lookup", target(weight.device).arch, weight.dtype, (M, D), default=fwd_config(D))
    grid = -(-M // config["ROWS"]), -(-D // config["A"])
    launch(_lookup_kernel, grid, weight.device, weight, ids, out, M, V, D, first, weight.stride(0), **config)
    return out


def bwd_launch(dy: Tensor, ids: Tensor, first: int, rows: int, dtype: torch.dtype) -> Tensor:
    M, D = ids.numel(), dy.shape[-1]
    dy = dy.contiguous()
    ids, order = torch.sort(ids.flatten(), stable=True)
    offsets = torch.searchsorted(ids, torch.arange(first, first + rows + 1, device=ids.device))
    chunk, config = chunk_of(M), bwd_config(D)
    chunks, columns = M // chunk, -(-D // config["A"])
    partial, dw = dy.new_empty(chunks, D, dtype=torch.float32), dy.new_empty(rows, D, dtype=dtype)
    launch(
        _chunk_sums_kernel, (chunks, columns), dy.device, dy, ids, order, partial, rows, D, first, CHUNK=chunk, **config
    )
    grid = min(rows, 8 * multiprocessors(dy)), columns
    launch(_row_sums_kernel, grid, dy.device, dy, order, offsets, partial, dw, rows, D, CHUNK=chunk, **config)
    return dw


# ---- what they move; which ids come is not known from shapes, so: at most ----


def fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Every id is in this slice, and they are as different as they can be."""
    weight, ids, _ = args
    return Cost(moved(ids) + moved(weight[: ids.numel()]), moved(*outputs))


def bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Every id is in this slice and every chunk has one id only.  (torch's sort of M ids is not counted.)"""
    dy, ids, _, rows, _ = args
    M, D = ids.numel(), dy.shape[-1]
    chunks = M // chunk_of(M)
    partials = 4 * chunks * D
    indices = 8 * (M + (2 * chunks) + rows + 1)  # order, the ends of the chunks, offsets
    return Cost(moved(dy) + indices + partials, moved(*outputs) + partials)
