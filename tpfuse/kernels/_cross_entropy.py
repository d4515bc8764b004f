"""The Triton side of cross_entropy: a program owns a row and walks its columns, so no sum is split and every run gives the same bits.

A chunk of columns is [LANES, WIDTH], WIDTH neighbours being a thread's: the running maximum is one a lane, which leaves one exp, one
maximum and one addition an element.  Rows of an odd vocabulary (50257) begin anywhere; chunks begin at a multiple of WIDTH before the
row, and only a row's first and last chunk are masked, so that all others are moved 128 bits at a time.  (So a row's sums are grouped
by where it begins: the same row elsewhere in a batch may differ in the last bit.)  Offsets are int64.
"""

import torch
from torch import Tensor

from ._launch import launch, next_power_of_2, target
from ._triton import tl, triton
from ._tuning import tuned

LOWEST = tl.constexpr(-3.4028234663852886e38)  # the least finite fp32: columns may all be -inf, and exp(-inf - LOWEST) is 0, not NaN

# ---- device functions ----


@triton.jit
def online(x, top, total):
    """x [LANES, WIDTH], -inf where there is none -> max and sum of exp(x - max) of each lane, so far [LANES]."""
    higher = tl.maximum(top, tl.max(x, 1))
    return higher, total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)


@triton.jit
def row_gradient(labels_ptr, lse_ptr, dloss_ptr, rows, live, V, stride_dloss, first, ignore_index, z_loss):
    """-> the label's column in this slice or -1, lse, dloss (0 if ignored) and what multiplies softmax."""
    label = tl.load(labels_ptr + rows, mask=live, other=0)
    lse = tl.load(lse_ptr + rows, mask=live, other=0.0)
    row = tl.where(label == ignore_index, 0.0, tl.load(dloss_ptr + rows * stride_dloss, mask=live, other=0.0))
    column = tl.where((label >= first) & (label < first + V), label - first, -1).to(tl.int32)
    return column, lse, row, row * (1.0 + 2.0 * z_loss * lse)


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
    start = row * stride_m // WIDTH * WIDTH
    skip = (row * stride_m - start).to(tl.int32)  # columns before the row
    end = skip + V
    x_ptr += start
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    chunk: tl.constexpr = LANES * WIDTH
    top, total, sums = tl.full([LANES], LOWEST, tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    top, total, sums = _stats_chunk(x_ptr, columns, (columns >= skip) & (columns < end), top, total, sums, SMOOTHING)
    for at in tl.range(chunk, end - chunk + 1, chunk):
        top, total, sums = _stats_chunk(x_ptr, at + columns, None, top, total, sums, SMOOTHING)
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
    labels_ptr,  # [M] in, int64
    lse_ptr,  # [M] in, fp32
    dloss_ptr,  # [M] in, fp32, stride stride_dloss
    dx_ptr,  # [M, V] out
    V, stride_dloss, first, ignore_index, smoothing, z_loss, one_over_vocab,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = row * V // WIDTH * WIDTH
    skip = (row * V - start).to(tl.int32)
    end = skip + V
    x_ptr += start
    dx_ptr += start
    column, lse, d, softmax_scale = row_gradient(
        labels_ptr, lse_ptr, dloss_ptr, row, row >= 0, V, stride_dloss, first, ignore_index, z_loss
    )  # fmt: skip
    uniform, one = d * smoothing * one_over_vocab, d * (1.0 - smoothing)
    target = tl.where(column < 0, -1, skip + column)
    columns = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    chunk: tl.constexpr = LANES * WIDTH
    _bwd_chunk(x_ptr, dx_ptr, columns, (columns >= skip) & (columns < end), target, lse, softmax_scale, uniform, one)
    for at in tl.range(chunk, end - chunk + 1, chunk):
        _bwd_chunk(x_ptr, dx_ptr, at + columns, None, target, lse, softmax_scale, uniform, one)
    tail = tl.maximum(end // chunk, 1) * chunk + columns
    _bwd_chunk(x_ptr, dx_ptr, tail, tail < end, target, lse, softmax_scale, uniform, one)


# ---- launchers ----


def _config(kernel: str, x: Tensor) -> dict[str, int]:
    columns = min(4096, max(256, next_power_of_2(x.shape[1])))
    default = dict(LANES=columns // 8, WIDTH=8, num_warps=max(1, columns // 512))
    return tuned(kernel, target(x.device).arch, x.dtype, tuple(x.shape), default)


def stats_launch(logits: Tensor, labels: Tensor, first: int, smoothing: bool) -> Tensor:
    """The launcher of cross_entropy_stats."""
    logits, labels = logits if logits.stride(1) == 1 else logits.contiguous(), labels.contiguous()
    M, V = logits.shape
    stats = logits.new_empty(M, 4, dtype=torch.float32)
    tensors, parameters = (logits, labels, stats), _config("cross_entropy_stats", logits)
    launch(_stats_kernel, (M,), logits.device, *tensors, V, logits.stride(0), first, SMOOTHING=smoothing, **parameters)
    return stats


def bwd_launch(
    logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, first: int, vocab: int, ignore_index: int, smoothing: float, z_loss: float
) -> Tensor:
    """The launcher of cross_entropy_bwd."""
    logits, labels = logits.contiguous(), labels.contiguous()
    M, V = logits.shape
    dlogits = logits.new_empty(M, V)
    numbers = V, dloss.stride(0), first, ignore_index, smoothing, z_loss, 1 / vocab
    tensors = logits, labels, lse.contiguous(), dloss, dlogits
    launch(_bwd_kernel, (M,), logits.device, *tensors, *numbers, **_config("cross_entropy_bwd", logits))
    return dlogits
