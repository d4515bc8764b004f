"""Partial sums, one row of each program, added up in an order that no run changes, so that every run gives the same
bits: by a kernel of their own, or by the programs that arrive last.

In the second form GROUP programs in a row are a group, whose last to arrive adds the group's rows, and the last of
those adds the groups' sums.  Only which program adds differs from run to run.  One program alone would read all rows at
the rate of one multiprocessor.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .counters import COUNTERS
from .device import load, sum_leaves
from .launch import launch, next_power_of_2
from .triton import tl, triton


@triton.jit
def sum_partials(partial_ptr, out_ptr, columns, P, D, ROWS: tl.constexpr, A: tl.constexpr):
    """Sums partial [P, D], fp32, to out [D], some columns of it."""
    total = tl.zeros([ROWS, A], tl.float32)
    for start in tl.range(0, P, ROWS):
        p = (start + tl.arange(0, ROWS)).to(tl.int64)
        total += load(partial_ptr, p[:, None] * D + columns[None, :], (p < P)[:, None] & (columns < D)[None, :])
    tl.store(out_ptr + columns, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=columns < D)


@triton.jit
def _reduce_kernel(
    partial_ptr,  # [V, P, D] in, fp32
    out_ptr,  # [V, D] out
    P, D,
    ROWS: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * A + tl.arange(0, A)
    vector = tl.program_id(1).to(tl.int64)
    sum_partials(partial_ptr + vector * P * D, out_ptr + vector * D, columns, P, D, ROWS, A)


@triton.jit
def _reduce_vectors_kernel(
    dbias_partial_ptr, dgamma_partial_ptr, dbeta_partial_ptr,  # [P, D] in, fp32
    dbias_ptr, dgamma_ptr, dbeta_ptr,  # [D] out
    P, D,
    ROWS: tl.constexpr, A: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()  # until all of the kernel before is done, and what it wrote is visible
    columns = tl.program_id(0) * A + tl.arange(0, A)
    vector = tl.program_id(1)
    if vector == 0:
        if dbias_ptr is not None:
            sum_partials(dbias_partial_ptr, dbias_ptr, columns, P, D, ROWS, A)
    elif vector == 1:
        if dgamma_ptr is not None:
            sum_partials(dgamma_partial_ptr, dgamma_ptr, columns, P, D, ROWS, A)
    else:
        if dbeta_ptr is not None:
            sum_partials(dbeta_partial_ptr, dbeta_ptr, columns, P, D, ROWS, A)


# ---- of leaves ----


@triton.jit
def _sum_leaves(partial_ptr, out_ptr, columns, P, D, LEVELS: tl.constexpr, A: tl.constexpr):
    """Sums partial [2^LEVELS, P, D], fp32, to out [D], some columns of it: over P in order, over leaves as a tree of
    nodes in out's dtype."""
    mask = (columns < D)[None, :]
    rows_ptr = partial_ptr + tl.arange(0, 2**LEVELS).to(tl.int64)[:, None] * P * D + columns[None, :]
    total = tl.zeros([2**LEVELS, A], tl.float32)
    for _ in tl.range(0, P):
        total += load(rows_ptr, 0, mask)
        rows_ptr += D
    tl.store(out_ptr + columns, sum_leaves(total.to(out_ptr.dtype.element_ty), LEVELS), mask=columns < D)


@triton.jit
def _reduce_leaves_kernel(
    partials,  # three vectors [2^LEVELS, P, D] in, fp32
    vectors,  # [D] out each
    P, D,
    LEVELS: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * A + tl.arange(0, A)
    for i in tl.static_range(3):
        if tl.program_id(1) == i:
            if partials[i] is not None:
                _sum_leaves(partials[i], vectors[i], columns, P, D, LEVELS, A)


# ---- by the last to arrive ----

GROUP = 16


class Last(NamedTuple):
    """What the last programs of a kernel sum its partials to; without counters they sum nothing."""

    counters: Tensor | None = None  # int32 [1 + groups], 0 before and after
    dbias: Tensor | None = None  # [D] each; None is omitted
    dgamma: Tensor | None = None
    dbeta: Tensor | None = None


def releases(arch: str) -> bool:
    """Returns whether a program's one atomic add comes after the stores of all of its threads.

    A barrier in front of it sees to that in CUDA's memory model.  For gfx942 LLVM lets a wavefront pass the barrier
    with its stores on their way, and the add waits for those of its own wavefront alone.
    """
    return not arch.startswith("gfx")


def groups_of(P: int) -> int:
    """Returns the number of groups of P programs; 0 where there are not the counters for them."""
    groups = -(-P // GROUP)
    return groups if groups < COUNTERS else 0


def sum_config(D: int, num_warps: int) -> dict[str, int]:
    """Returns how the programs of a kernel sum vectors [D]: a thread has whole columns, four at a time, so that no
    thread waits for another."""
    return dict(GROUP=GROUP, SUM=min(next_power_of_2(D), 128 * num_warps))


@triton.jit
def _is_last(counter_ptr, count):
    """Returns whether this program is the last of ``count`` to come here; it then sees what the others had stored."""
    tl.debug_barrier()  # what other threads have stored comes first
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return last


@triton.jit
def _sum_vector(partial_ptr, first, rows, out_ptr, D: tl.constexpr, GROUP: tl.constexpr, A: tl.constexpr):
    """Sums ``rows`` rows of partial [.., D] from the row ``first`` on to out [D]; nothing where there is no partial."""
    if partial_ptr is not None:
        for start in tl.range(0, D, A):
            sum_partials(partial_ptr + first * D, out_ptr, start + tl.arange(0, A), rows, D, GROUP, A)


@triton.jit
def sum_by_the_last(
    partials,  # three vectors [P + groups, D], fp32: of this kernel's programs, and room for the groups' sums
    last,  # Last
    D: tl.constexpr, GROUP: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    P = tl.num_programs(0).to(tl.int64)
    group = tl.program_id(0).to(tl.int64) // GROUP
    groups, rows, own = tl.cdiv(P, GROUP), tl.minimum(P - group * GROUP, GROUP), (P + group) * D
    if _is_last(last.counters + 1 + group, rows):
        if partials.dbias is not None:
            _sum_vector(partials.dbias, group * GROUP, rows, partials.dbias + own, D, GROUP, A)
        if partials.dgamma is not None:
            _sum_vector(partials.dgamma, group * GROUP, rows, partials.dgamma + own, D, GROUP, A)
        if partials.dbeta is not None:
            _sum_vector(partials.dbeta, group * GROUP, rows, partials.dbeta + own, D, GROUP, A)
        if _is_last(last.counters, groups):
            _sum_vector(partials.dbias, P, groups, last.dbias, D, GROUP, A)
            _sum_vector(partials.dgamma, P, groups, last.dgamma, D, GROUP, A)
            _sum_vector(partials.dbeta, P, groups, last.dbeta, D, GROUP, A)


# ---- by a kernel of their own ----

REDUCE = dict(ROWS=32, A=64, num_warps=4)
LEAVES = dict(A=64, num_warps=4)


def reduce_partials(partial: Tensor | None, out: Tensor) -> Tensor:
    """Returns ``out`` [N], filled with the sums of partial [P, N], fp32, over P; as it is if there are none."""
    if partial is not None:
        P, N = partial.shape
        launch(_reduce_kernel, (-(-N // REDUCE["A"]), 1), partial.device, partial, out, P, N, **REDUCE)
    return out


def reduce_vectors(partials: Sequence[Tensor | None], vectors: Sequence[Tensor | None], *, early: bool = False) -> None:
    """Fills three vectors [D], of which any may be None, with the sums of their partials [P, D] in one launch.

    ``early``, for sm_90 and later: it may be started before the kernel that writes the partials has ended, which hides
    the time that a launch takes.
    """
    present = [partial for partial in partials if partial is not None]
    if present:
        P, D = present[0].shape
        grid = -(-D // REDUCE["A"]), 3
        options = REDUCE | dict(EARLY=early) | (dict(launch_pdl=True) if early else {})
        launch(_reduce_vectors_kernel, grid, present[0].device, *partials, *vectors, P, D, **options)


def reduce_leaves(partials: Sequence[Tensor | None], vectors: Sequence[Tensor | None], leaves: int) -> None:
    """Fills vectors as :func:`reduce_vectors`, of partials [leaves P, D]: over the P of a leaf in order, over leaves as
    a binary tree."""
    present = [partial for partial in partials if partial is not None]
    if present:
        rows, D = present[0].shape
        sizes = dict(P=rows // leaves, D=D, LEVELS=leaves.bit_length() - 1)
        grid = -(-D // LEAVES["A"]), 3
        launch(
            _reduce_leaves_kernel, grid, present[0].device, partials=tuple(partials), vectors=tuple(vectors),
            **sizes, **LEAVES,
        )  # fmt: skip
