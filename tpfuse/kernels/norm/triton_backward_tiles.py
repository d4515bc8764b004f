"""What the kernels of the fused norm's backward share: the records that they take, and their device functions."""

from typing import NamedTuple

from torch import Tensor

from ..runtime.device import load, sum_ranks
from ..runtime.triton import tl, triton
from .triton_forward import drop, gamma_tile

# ---- records that kernels take ----


class Statistics(NamedTuple):
    """The norm's input and what forward has stored of it; without a norm None."""

    h: Tensor | None = None  # [m, D]
    mean: Tensor | None = None  # [m], fp32; not read where the norm is not centred
    rstd: Tensor | None = None  # [m], fp32
    gamma: Tensor | None = None  # [D]


class Gradients(NamedTuple):
    """What backward fills; None is omitted.  The vectors are [D], or a kernel's partial sums [P, D] in fp32, of each
    leaf of the rows if there are leaves."""

    dparts: Tensor  # [m, D]
    stride: int  # from one of its rows to the next
    dresidual: Tensor | None  # [m, D]
    dbias: Tensor | None
    dgamma: Tensor | None
    dbeta: Tensor | None


# ---- device functions ----


@triton.jit
def statistics(saved, rows, live, KIND: tl.constexpr):
    """Returns mean (0 where the norm is not centred) and rstd of some rows, [ROWS, 1]."""
    rstd = tl.load(saved.rstd + rows, mask=live, other=0.0)
    mean = rstd * 0.0
    if KIND.centred:
        mean = tl.load(saved.mean + rows, mask=live, other=0.0)
    return mean[:, None], rstd[:, None]


@triton.jit
def d_tile(dn, dh_ptr, key, mask, rows, columns, live, D: tl.constexpr, R: tl.constexpr, ORDER: tl.constexpr):
    """Returns what enters the norm's backward, 0 outside: sum_r dn_r (without dn, dh), with dh and dropout where the
    order has them there."""
    inside = live[:, None] & (columns < D)[None, :]
    if dn.ptr is not None:
        d = sum_ranks(dn.ptr, rows[:, None] * dn.stride_m + columns[None, :], inside, dn.stride_r, R)
        if ORDER != "pre":
            if dh_ptr is not None:
                d += load(dh_ptr, rows[:, None] * D + columns[None, :], inside)
    else:
        d = load(dh_ptr, rows[:, None] * D + columns[None, :], inside)
    if ORDER == "drop":
        d = drop(d, key, mask, rows, columns)
    return d


@triton.jit
def x_tile(h_ptr, mean, rstd, rows, columns, live, D: tl.constexpr):
    """Returns x_hat; outside it is any finite number, since d is 0 there."""
    return (load(h_ptr, rows[:, None] * D + columns[None, :], live[:, None] & (columns < D)[None, :]) - mean) * rstd


@triton.jit
def gamma_rows(gamma_ptr, rows, columns, D: tl.constexpr, KIND: tl.constexpr):
    """Returns gamma for every row, from the cache each time: held, it would take 16 registers a thread and spill
    others."""
    return gamma_tile(gamma_ptr, rows[:, None] * 0 + columns[None, :], (columns < D)[None, :], KIND)


@triton.jit
def out_tile(dx, dn, dh_ptr, out, key, mask, rows, columns, live, D: tl.constexpr, ORDER: tl.constexpr):
    """Adds what passed the norm by, stores dresidual and dparts; returns dparts before rounding, 0 outside."""
    inside, offsets = live[:, None] & (columns < D)[None, :], rows[:, None] * D + columns[None, :]
    if ORDER == "pre":
        if dn.ptr is not None:
            if dh_ptr is not None:
                dx += load(dh_ptr, offsets, inside)
    if out.dresidual is not None:
        tl.store(out.dresidual + offsets, dx.to(out.dresidual.dtype.element_ty), mask=inside)
    if ORDER != "drop":
        dx = drop(dx, key, mask, rows, columns)
    ptr = out.dparts + rows[:, None] * out.stride + columns[None, :]  # in this order: 64 bits a row, 32 an element
    tl.store(ptr, dx.to(out.dparts.dtype.element_ty), mask=inside)
    return tl.where(inside, dx, 0.0)


@triton.jit
def store_partials(out, columns, dbias, dgamma, dbeta, D: tl.constexpr, R: tl.constexpr):
    """Stores this program's row of [P, D] each, or of [leaves, P, D]."""
    row = tl.program_id(0).to(tl.int64)
    if R.tree:
        row += tl.program_id(2).to(tl.int64) * tl.num_programs(0)
    offsets = row * D + columns
    if out.dbias is not None:
        tl.store(out.dbias + offsets, tl.sum(dbias, 0), mask=columns < D)
    if out.dgamma is not None:
        tl.store(out.dgamma + offsets, tl.sum(dgamma, 0), mask=columns < D)
    if out.dbeta is not None:
        tl.store(out.dbeta + offsets, tl.sum(dbeta, 0), mask=columns < D)


@triton.jit
def zeros(ROWS: tl.constexpr, N: tl.constexpr):
    """Returns sums that start at 0: dbias, dgamma, dbeta."""
    zero = tl.zeros([ROWS, N], tl.float32)
    return zero, zero, zero
