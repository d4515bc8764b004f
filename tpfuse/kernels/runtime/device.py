"""Device functions that kernels of more than one op use: loads, sums over ranks and of leaves, the order of tiles.

Arithmetic is fp32.  (Philox stands in philox.py, beside the twins that it has to equal bit for bit.)
"""

from typing import NamedTuple

from .triton import tl, triton

MOST_PARTS = tl.constexpr(1 << 10)


class RankSum(NamedTuple):
    """The parts of a sum over ranks, or over a row's experts; kernels take it as a constant."""

    size: int
    tree: bool = False  # added as a binary tree, each node rounded to the parts' dtype (leaves.py), not in rank order


@triton.jit
def load(ptr, offsets, mask):
    """Returns what lies there in fp32; 0 where masked."""
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def sum_ranks(parts_ptr, offsets, mask, stride_r, R: tl.constexpr):
    """Returns the sum over ranks (R: RankSum), whose parts lie ``stride_r`` apart: in fp32 in rank order, or a tree."""
    if R.tree:
        stride = tl.cast(stride_r, tl.int64)
        return _sum_tree(parts_ptr, offsets, mask, stride, R.size, MOST_PARTS).to(tl.float32)
    else:
        total = load(parts_ptr, offsets, mask)
        COUNT: tl.constexpr = R.size  # a record's field is a number to Triton 3.6
        for r in tl.static_range(1, COUNT):
            total += load(parts_ptr + r * tl.cast(stride_r, tl.int64), offsets, mask)
        return total


@triton.jit
def _sum_tree(ptr, offsets, mask, stride, COUNT: tl.constexpr, LEFT: tl.constexpr):
    """Returns the node above COUNT parts, in their dtype; LEFT: a power of two, no less than half of them."""
    if COUNT == 1:
        return tl.load(ptr + offsets, mask=mask, other=0.0)
    elif LEFT >= COUNT:
        return _sum_tree(ptr, offsets, mask, stride, COUNT, LEFT // 2)
    else:
        left = _sum_tree(ptr, offsets, mask, stride, LEFT, LEFT // 2)
        right = _sum_tree(ptr + LEFT * stride, offsets, mask, stride, COUNT - LEFT, LEFT // 2)
        return join(left, right)


@triton.jit
def join(x, y):
    """Returns the node above two nodes of a tree, rounded as they are."""
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


@triton.jit
def sum_leaves(nodes, LEVELS: tl.constexpr):
    """nodes [2^LEVELS, A] -> [A], their sum as a binary tree"""
    for _ in tl.static_range(LEVELS):
        halves = tl.reshape(nodes, (nodes.shape[0] // 2, 2, nodes.shape[1]))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        nodes = join(left, right)
    return tl.reshape(nodes, (nodes.shape[1],))


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
