"""The large entries of a long vector, in a row: what a sparse sum of gradients sends (tpfuse/training/ok_topk).

    chosen    |x[i]| >= threshold and x[i] != 0;  NaN never is
    index     the first ``most`` chosen i, ascending, then n         value    x[index], then 0
    count     how many there are, more than ``most`` too

Shapes: x [n], index [most] int64, value [most] in x's dtype, count [] int64.  Magnitudes are compared in fp32 (fp64 for
fp64).  The outputs' sizes are known beforehand, so that the kernels wait for nothing; the count tells what is in them.

Two kernels: the first reads x once and leaves a bit an entry and a count a block; torch adds the counts up; the second
reads the bits, and of x the chosen entries alone.  In fp32 that is 4 n bytes, n / 4 for the bits, and the chosen
entries, which memory gives 32 bytes at a time: where one in a hundred is chosen, at random places, 0.3 n.  To count and
then read all of x again would be 8 n.  One pass, in which a block waits for the counts of those before it (decoupled
look-back, Merrill & Garland 2016), would be 4 n; but its atomics need an order of memory that Triton's interpreter,
which runs one block after another, never puts to the test.  Here no block waits for another: the same entries are in
the same places every time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .runtime.device import load
from .runtime.errors import check
from .runtime.launch import launch
from .runtime.op import ELEMENTWISE, Cost, acc_dtype, moved, op
from .runtime.rules import INF, WHOLE, check_numbers, number
from .runtime.triton import tl, triton

_RULES = dict(threshold=number(0, INF), most=WHOLE)
Selected = tuple[Tensor, Tensor, Tensor]  # index, value, count


# ---- reference ----


def select_large_ref(x: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor, Tensor]:
    magnitude = x.to(acc_dtype(x)).abs()
    (hits,) = torch.nonzero((magnitude >= threshold) & (magnitude > 0), as_tuple=True)
    index, n = hits[:most], x.shape[0]
    padding = 0, most - len(index)
    return pad(index, padding, value=n), pad(x[index], padding), index.new_full((), len(hits))


# ---- Triton ----


@triton.jit
def _mark_kernel(
    x_ptr,  # [n] in
    marks_ptr,  # [blocks, BLOCK / 8] out, a bit an entry
    counts_ptr,  # [blocks] out, of the bits
    n, threshold,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    octets = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    bits = tl.arange(0, 8)[None, :]
    at = octets[:, None] * 8 + bits
    x = load(x_ptr, at, at < n)
    chosen = ((tl.abs(x) >= threshold) & (x != 0)).to(tl.int32)
    tl.store(marks_ptr + octets, tl.sum(chosen << bits, 1).to(tl.uint8))
    tl.store(counts_ptr + block, tl.sum(tl.sum(chosen, 1), 0))


@triton.jit
def _place_kernel(
    x_ptr,  # [n] in
    marks_ptr,  # [blocks, BLOCK / 8] in
    ends_ptr,  # [blocks] in: how many entries are chosen up to the end of each
    index_ptr, value_ptr,  # [most] out
    n, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK // 8)
    octets = block * (BLOCK // 8) + lanes
    begin = tl.load(ends_ptr + block - 1, mask=block > 0, other=0)
    marks = tl.load(marks_ptr + octets).to(tl.int32)
    counts = tl.sum((marks[:, None] >> tl.arange(0, 8)[None, :]) & 1, 1)
    place = begin + tl.cumsum(counts, 0) - counts
    for bit in range(8):
        at, chosen = octets * 8 + bit, (marks >> bit) & 1
        kept = (chosen > 0) & (place < most)
        tl.store(index_ptr + place, at, mask=kept)
        tl.store(value_ptr + place, tl.load(x_ptr + at, mask=kept), mask=kept)
        place += chosen
    found = tl.load(ends_ptr + tl.num_programs(0) - 1)
    if (found < (block + 1) * BLOCK) & (block * BLOCK < most):
        for first in range(0, BLOCK, BLOCK // 8):
            at = block * BLOCK + first + lanes
            empty = (at >= found) & (at < most)
            tl.store(index_ptr + at, tl.zeros([BLOCK // 8], tl.int64) + n, mask=empty)
            tl.store(value_ptr + at, tl.zeros([BLOCK // 8], value_ptr.dtype.element_ty), mask=empty)


BLOCK = 4096  # entries


def _blocks(n: int, most: int) -> int:
    """Returns how many blocks hold all of x, and all places of the outputs."""
    return max(-(-max(n, most) // BLOCK), 1)


def launch_select(x: Tensor, threshold: float, most: int) -> Selected:
    x, n = x.contiguous(), x.shape[0]
    blocks = _blocks(n, most)
    marks, counts = x.new_empty(blocks, BLOCK // 8, dtype=torch.uint8), x.new_empty(blocks, dtype=torch.int32)
    launch(_mark_kernel, (blocks,), x.device, x, marks, counts, n, threshold, BLOCK=BLOCK, num_warps=4)
    ends = counts.cumsum(0)  # int64
    index, value = x.new_empty(most, dtype=torch.int64), x.new_empty(most)
    launch(_place_kernel, (blocks,), x.device, x, marks, ends, index, value, n, most, BLOCK=BLOCK, num_warps=4)
    return index, value, ends[-1]


def select_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Counts as many entries chosen as there is room for.  (torch's sum of the counts of blocks is not counted.)"""
    x, _, most = args
    blocks = _blocks(len(x), most)
    marks, compared = blocks * BLOCK // 8, moved(x[:most])
    return Cost(moved(x) + marks + 8 * blocks + compared, marks + 4 * blocks + moved(*outputs[:2]))


def _fake(x: Tensor, threshold: float, most: int) -> Selected:
    return x.new_empty(most, dtype=torch.int64), x.new_empty(most), x.new_empty((), dtype=torch.int64)


_select = op(select_large_ref, kind=ELEMENTWISE, launch=launch_select, fake=_fake, cost=select_cost)


# ---- public ----


def select_large(x: Tensor, threshold: float, most: int) -> Selected:
    """Returns the entries of x [n] that are not zero and of a magnitude of at least ``threshold``: index [most] int64,
    value [most] in x's dtype, and their number, count [] int64.

    Indices ascend; behind the last entry they are n, and values 0.  Of more than ``most`` entries the first are there;
    count has all of them.  Nothing waits for a GPU (but in fp64) and nothing is differentiated.  Raises ValueError for
    an x that is not a vector of floating numbers, a threshold below 0 or NaN, a ``most`` that is no integer of at least
    0.
    """
    check(
        x.dim() == 1 and x.is_floating_point(),
        f"select_large: x must be [n] of floating numbers, got {list(x.shape)} {x.dtype}",
    )
    check_numbers("select_large", dict(threshold=threshold, most=most), _RULES)
    return _select(x.detach(), float(threshold), most)
