"""Partial sums, one row of each program, added up: without atomics, so that every run gives the same bits."""

from collections.abc import Sequence

from torch import Tensor

from .device import load
from .launch import launch
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


REDUCE = dict(ROWS=32, A=64, num_warps=4)


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
    given = [partial for partial in partials if partial is not None]
    if given:
        P, D = given[0].shape
        grid = -(-D // REDUCE["A"]), 3
        how = REDUCE | dict(EARLY=early) | (dict(launch_pdl=True) if early else {})
        launch(_reduce_vectors_kernel, grid, given[0].device, *partials, *vectors, P, D, **how)
