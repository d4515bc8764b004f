"""Device functions that kernels of more than one op use: loads, sums over ranks, the order of tiles.

Arithmetic is fp32.  (Philox stands in philox.py, beside the twins that it has to equal bit for bit.)
"""

from .triton import tl, triton


@triton.jit
def load(ptr, offsets, mask):
    """Returns what lies there in fp32; 0 where masked."""
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def sum_ranks(parts_ptr, offsets, mask, stride_r, R: tl.constexpr):
    """Returns the sum over ranks, whose parts lie ``stride_r`` apart, in rank order and in fp32."""
    total = load(parts_ptr, offsets, mask)
    for r in tl.static_range(1, R):
        total += load(parts_ptr + r * tl.cast(stride_r, tl.int64), offsets, mask)
    return total


# ---- the order of tiles ----


@triton.jit
def swizzle(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Linear tile number -> (row tile, column tile): columns of GROUP_M row tiles, so that neighbours share operands in
    L2."""
    per_group = GROUP_M * tiles_n
    first = (tile // per_group) * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % per_group
    return first + within % rows, within // rows
