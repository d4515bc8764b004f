"""The Triton side of sparse integers: gathered rows of a dense matrix times a strip's vectors, on tensor cores.

    sparse_matmul    a program owns a strip's V rows and BN columns of the product; for BK vectors at a time it reads as
                     many rows of x, by index, and turns them
    sampled_matmul   programs of a strip share its vectors, BI at a time, and read a row of k for each

Integers of 16 bits are two products with int8, of either plane.  Those of 4 bits are two products too, of even and odd
vectors: to join the halves of a byte into one operand crashes Triton 3.8 for sm_90 ("Illegal shared layout").
"""

import torch
from torch import Tensor

from ..runtime.launch import launch
from ..runtime.triton import tl, triton
from .format import Vectors

BK = 64  # vectors a turn
BN = 128  # columns of a program; half of it for vectors of 64 rows
BI, BE, SHARE = 64, 64, 4  # vectors and columns of a turn; programs that share a strip


@triton.jit
def _rows(x_ptr, index_ptr, place, end, n, N, stride_k):
    """Returns [BN, BK]: columns n of the rows of x that the vectors ``place`` name, turned; 0 beyond ``end``."""
    k = tl.load(index_ptr + place, mask=place < end, other=0).to(tl.int64)
    mask = (place < end)[:, None] & (n < N)[None, :]
    return tl.trans(tl.load(x_ptr + k[:, None] * stride_k + n[None, :], mask=mask, other=0))


@triton.jit
def _sparse_matmul_kernel(
    values_ptr,  # [planes, n or n / 2, V] in
    index_ptr,  # [n] in
    offsets_ptr,  # [strips + 1] in
    x_ptr,  # [K, N] in, strides (stride_k, 1)
    y_ptr,  # [M, N] out
    M, N, strips, plane, stride_k,  # plane: bytes from the low plane to the high one
    BITS: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    strip, tile = tl.program_id(0) % strips, tl.program_id(0) // strips
    begin, end = tl.load(offsets_ptr + strip), tl.load(offsets_ptr + strip + 1)
    n, v, t = tile.to(tl.int64) * BN + tl.arange(0, BN), tl.arange(0, V), tl.arange(0, BK)
    acc, high = tl.zeros([BN, V], tl.int32), tl.zeros([BN, V], tl.int32)
    PER: tl.constexpr = 2 if BITS == 4 else 1  # vectors a byte
    for s in tl.range(begin, end, PER * BK):
        place = s + PER * t
        live = (place < end)[:, None]
        a_ptr = values_ptr + (s // PER + t).to(tl.int64)[:, None] * V + v[None, :]
        a = tl.load(a_ptr, mask=live, other=0)
        x = _rows(x_ptr, index_ptr, place, end, n, N, stride_k)
        if BITS == 4:
            acc = tl.dot(x, ((a << 4).to(tl.int8) >> 4).to(tl.int8), acc, out_dtype=tl.int32)
            odd = _rows(x_ptr, index_ptr, place + 1, end, n, N, stride_k)
            acc = tl.dot(odd, (a >> 4).to(tl.int8), acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(x, a, acc, out_dtype=tl.int32)
            if BITS == 16:
                high = tl.dot(x, tl.load(a_ptr + plane, mask=live, other=0), high, out_dtype=tl.int32)
    if BITS == 16:
        acc += high * 256
    m = strip.to(tl.int64) * V + v
    tl.store(y_ptr + m[None, :] * N + n[:, None], acc, mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def _sampled_matmul_kernel(
    q_ptr,  # [M, E] in
    k_ptr,  # [N, E] in
    index_ptr,  # [n] in
    offsets_ptr,  # [strips + 1] in
    y_ptr,  # [n, V] out
    M, E, strips,
    V: tl.constexpr, BI: tl.constexpr, BE: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    strip, share = tl.program_id(0) % strips, tl.program_id(0) // strips
    begin, end = tl.load(offsets_ptr + strip), tl.load(offsets_ptr + strip + 1)
    v, i, e = tl.arange(0, V), tl.arange(0, BI), tl.arange(0, BE)
    m = strip.to(tl.int64) * V + v
    for s in tl.range(begin + share * BI, end, BI * SHARE):
        place = s + i
        live = (place < end)[:, None]
        rows = tl.load(index_ptr + place, mask=place < end, other=0).to(tl.int64) * E
        acc = tl.zeros([BI, V], tl.int32)
        for c in tl.range(0, E, BE):
            within = (c + e < E)[None, :]
            k = tl.load(k_ptr + rows[:, None] + (c + e)[None, :], mask=live & within, other=0)
            q = tl.load(q_ptr + m[:, None] * E + (c + e)[None, :], mask=(m < M)[:, None] & within, other=0)
            acc = tl.dot(k, tl.trans(q), acc, out_dtype=tl.int32)
        tl.store(y_ptr + place.to(tl.int64)[:, None] * V + v[None, :], acc, mask=live)


def sparse_matmul_launch(w: Vectors, x: Tensor) -> Tensor:
    values, index, offsets = (t.contiguous() for t in w[:3])
    if x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        x = x.contiguous()
    N, strips, V = x.shape[1], len(offsets) - 1, values.shape[2]
    y = x.new_empty(w.rows, N, dtype=torch.int32)
    columns = BN // 2 if V == 64 else BN
    grid = (strips * -(-N // columns),)
    sizes = w.rows, N, strips, values.shape[1] * V, x.stride(0)
    config = dict(BITS=w.bits, V=V, BK=BK, BN=columns, num_warps=4)
    launch(_sparse_matmul_kernel, grid, x.device, values, index, offsets, x, y, *sizes, **config)
    return y


def sampled_matmul_launch(q: Tensor, k: Tensor, column_index: Tensor, offsets: Tensor, block: int) -> Tensor:
    q, k, index, offsets = (t.contiguous() for t in (q, k, column_index, offsets))
    (M, E), strips = q.shape, len(offsets) - 1
    y = q.new_empty(len(index), block, dtype=torch.int32)
    config = dict(V=block, BI=BI, BE=BE, SHARE=SHARE, num_warps=4)
    launch(_sampled_matmul_kernel, (strips * SHARE,), q.device, q, k, index, offsets, y, M, E, strips, **config)
    return y
