"""The Triton side of cross_entropy: a program owns a row and walks its columns, so no sum is split and every run gives
the same bits.

A chunk of columns is [LANES, WIDTH], each thread owning WIDTH neighbours: every lane keeps a running maximum, which
leaves one exp, one maximum and one addition an element.  Rows of an odd vocabulary (50257) begin anywhere; chunks
begin at a multiple of WIDTH before the row, and only a row's first and last chunk are masked, so that all others are
moved 128 bits at a time.  (A row's sums are therefore grouped by its address: the same row elsewhere in a batch may
differ in the last bit.)  Offsets are int64.
"""

import torch
from torch import Tensor

from ..runtime.launch import launch, next_power_of_2, target
from ..runtime.triton import tl, triton
from ..runtime.tuning import tuned
from .options import Loss, Rows

# The least finite fp32: columns may all be -inf, and exp(-inf - LOWEST) is 0, not NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)

# ---- device functions ----


@triton.jit
def online(x, top, total):
    """x [LANES, WIDTH], -inf where there is none -> max and sum of exp(x - max) of each lane, so far [LANES]."""
    higher = tl.maximum(top, tl.max(x, 1))
    return higher, total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)


@triton.jit
def row_gradient(row_ptrs, stride_dloss, rows, live, V, loss):
    """-> the label's column in this slice or -1, lse, dloss (0 if ignored) and the factor of softmax.

    ``row_ptrs``: Rows of pointers, dloss with ``stride_dloss``; ``rows``: the rows asked for, masked by ``live``.
    """
    label = tl.load(row_ptrs.labels + rows, mask=live, other=0)
    lse = tl.load(row_ptrs.lse + rows, mask=live, other=0.0)
    dloss = tl.load(row_ptrs.dloss + rows * stride_dloss, mask=live, other=0.0)
    row = tl.where(label == loss.ignore_index, 0.0, dloss)
    first = loss.first_token
    column = tl.where((label >= first) & (label < first + V), label - first, -1).to(tl.int32)
    return column, lse, row, row * (1.0 + 2.0 * loss.z_loss * lse)


@triton.jit
def _load(x_ptr, columns, mask, other: tl.constexpr):
    if mask is None:
        x = tl.load(x_ptr + columns)
    else:
        x = tl.load(x_ptr + columns, mask=mask, other=other)
    return x.to(tl.float32)


@triton.jit
def _stats_chunk(x_ptr, columns, mask, top, total, sums, SMOOTHING: tl.constexpr):
    x = _load(x_ptr, columns, mask, float("-inf"))
    top, total = online(x, top, total)
    if SMOOTHING:
        if mask is not None:
            x = tl.where(mask, x, 0.0)
        sums += tl.sum(x, 1)
    return top, total, sums


@triton.jit
def _bwd_chunk(x_ptr, dx_ptr, columns, mask, target, lse, softmax_scale, uniform, one):
    dx = tl.exp(_load(x_ptr, columns, mask, 0.0) - lse) * softmax_scale - uniform
    dx = tl.where(columns == target, dx - one, dx)
    tl.store(dx_ptr + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)


# ---- kernels ----


@triton.jit
def _stats_kernel(
    x_ptr,  # [M, V] in, strides (stride_m, 1)
    labels_ptr,  # [M] in, int64
    stats_ptr,  # [M, 4] out, fp32
    V, stride_m, first,
    LANES: tl.constexpr, WIDTH: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    origin = row * stride_m // WIDTH * WIDTH
    skip = (row * stride_m - origin).to(tl.int32)  # columns before the row
    end = skip + V
    x_ptr += origin
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    chunk: tl.constexpr = LANES * WIDTH
    top, total = tl.full([LANES], LOWEST, tl.float32), tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    top, total, sums = _stats_chunk(x_ptr, columns, (columns >= skip) & (columns < end), top, total, sums, SMOOTHING)
    for start in tl.range(chunk, end - chunk + 1, chunk):
        top, total, sums = _stats_chunk(x_ptr, start + columns, None, top, total, sums, SMOOTHING)
    tail = tl.maximum(end // chunk, 1) * chunk + columns
    top, total, sums = _stats_chunk(x_ptr, tail, tail < end, top, total, sums, SMOOTHING)
    highest = tl.max(top, 0)
    label = tl.load(labels_ptr + row) - first
    inside = (label >= 0) & (label < V)
    stats_ptr += row * 4
    tl.store(stats_ptr, highest)
    tl.store(stats_ptr + 1, tl.sum(total * tl.exp(top - highest), 0))
    tl.store(stats_ptr + 2, tl.load(x_ptr + skip + label, mask=inside, other=0.0).to(tl.float32))
    tl.store(stats_ptr + 3, tl.sum(sums, 0))


@triton.jit
def _bwd_kernel(
    x_ptr,  # [M, V] in
    row_ptrs,  # Rows of pointers [M] in: labels int64, lse fp32, dloss fp32 with stride stride_dloss
    dx_ptr,  # [M, V] out
    V, stride_dloss, loss, one_over_vocab,  # loss: Loss
    LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    origin = row * V // WIDTH * WIDTH
    skip = (row * V - origin).to(tl.int32)
    end = skip + V
    x_ptr += origin
    dx_ptr += origin
    column, lse, d, softmax_scale = row_gradient(row_ptrs, stride_dloss, row, row >= 0, V, loss)
    uniform, one = d * loss.label_smoothing * one_over_vocab, d * (1.0 - loss.label_smoothing)
    target = tl.where(column < 0, -1, skip + column)
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    chunk: tl.constexpr = LANES * WIDTH
    _bwd_chunk(x_ptr, dx_ptr, columns, (columns >= skip) & (columns < end), target, lse, softmax_scale, uniform, one)
    for start in tl.range(chunk, end - chunk + 1, chunk):
        _bwd_chunk(x_ptr, dx_ptr, start + columns, None, target, lse, softmax_scale, uniform, one)
    tail = tl.maximum(end // chunk, 1) * chunk + columns
    _bwd_chunk(x_ptr, dx_ptr, tail, tail < end, target, lse, softmax_scale, uniform, one)


# ---- launchers ----


def _config(kernel: str, x: Tensor) -> dict[str, int]:
    columns = min(4096, max(256, next_power_of_2(x.shape[1])))
    default = dict(LANES=columns // 8, WIDTH=8, num_warps=max(1, columns // 512))
    return tuned(kernel, target(x.device).arch, x.dtype, tuple(x.shape), default=default)


def stats_launch(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """The launcher of cross_entropy_stats."""
    logits, labels = logits if logits.stride(1) == 1 else logits.contiguous(), labels.contiguous()
    M, V = logits.shape
    stats = logits.new_empty(M, 4, dtype=torch.float32)
    launch(
        _stats_kernel, (M,), logits.device,
        x_ptr=logits, labels_ptr=labels, stats_ptr=stats, V=V, stride_m=logits.stride(0), first=loss.first_token,
        SMOOTHING=loss.label_smoothing > 0, **_config("cross_entropy_stats", logits),
    )  # fmt: skip
    return stats


def bwd_launch(logits: Tensor, rows: Rows, loss: Loss) -> Tensor:
    """The launcher of cross_entropy_bwd."""
    logits = logits.contiguous()
    rows = Rows(rows.labels.contiguous(), rows.lse.contiguous(), rows.dloss)
    M, V = logits.shape
    dlogits = logits.new_empty(M, V)
    launch(
        _bwd_kernel, (M,), logits.device,
        x_ptr=logits, row_ptrs=rows, dx_ptr=dlogits, V=V, stride_dloss=rows.dloss.stride(0), loss=loss,
        one_over_vocab=1 / loss.vocab_size, **_config("cross_entropy_bwd", logits),
    )  # fmt: skip
    return dlogits
