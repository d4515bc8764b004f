"""Kernels that do nothing but call the device functions of tpfuse/kernels/runtime/philox.py."""

from tpfuse.kernels.runtime.philox import keep_device, mask_key_device, philox_device
from tpfuse.kernels.runtime.triton import tl, triton


@triton.jit
def words_kernel(
    words_ptr,  # [6, N] in, int32 bits: c0 to c3, k0, k1
    out_ptr,  # [4, N] out, int32 bits
    N: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    i = tl.arange(0, N)
    c0 = tl.load(words_ptr + i).to(tl.uint32, bitcast=True)
    c1 = tl.load(words_ptr + N + i).to(tl.uint32, bitcast=True)
    c2 = tl.load(words_ptr + 2 * N + i).to(tl.uint32, bitcast=True)
    c3 = tl.load(words_ptr + 3 * N + i).to(tl.uint32, bitcast=True)
    k0 = tl.load(words_ptr + 4 * N + i).to(tl.uint32, bitcast=True)
    k1 = tl.load(words_ptr + 5 * N + i).to(tl.uint32, bitcast=True)
    r0, r1, r2, r3 = philox_device(c0, c1, c2, c3, k0, k1, ROUNDS)
    tl.store(out_ptr + i, r0.to(tl.int32, bitcast=True))
    tl.store(out_ptr + N + i, r1.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * N + i, r2.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 3 * N + i, r3.to(tl.int32, bitcast=True))


@triton.jit
def mask_kernel(
    rng_ptr,  # [3] in, int64
    out_ptr,  # [rows, columns] out, int8: 1 where kept
    rows,
    columns,
    first_row,
    batch,
    site_head,  # site << 16 | head
    threshold,  # T << 16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    k0, k1, first_sample = mask_key_device(rng_ptr)
    row = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    position, sample = (first_row + row) // batch, (first_row + row) % batch
    site_head = tl.full([1, 1], 0, tl.int64) + site_head
    words = position.to(tl.uint32), site_head.to(tl.uint32), column.to(tl.uint32), first_sample + sample.to(tl.uint32)
    kept = keep_device(k0, k1, words[0], words[1], words[2], words[3], threshold)
    tl.store(out_ptr + row * columns + column, kept.to(tl.int8), mask=(row < rows) & (column < columns))
