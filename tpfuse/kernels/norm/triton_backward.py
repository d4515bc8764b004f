"""The fused norm's Triton side, backward.

    d = sum_r dn_r
    "pre"    dx = norm_backward(d) + dh            dresidual = dx, dparts = dropout(dx), dbias = sum_rows dparts
    "post"   dx = norm_backward(d + dh)            the same
    "drop"   dx = norm_backward(dropout(d + dh))   dparts = dx

    x_hat = (h - mean) rstd,  g = d gamma;  norm_backward(d) = rstd (g - mean(g) - x_hat mean(g x_hat))
    dgamma = sum_rows d x_hat,  dbeta = sum_rows d

Rows of up to 8192 columns lie in registers.  The vector gradients stay in fp32 registers while a program strides over
the rows; it writes one partial, and a 2-D reduction adds those: no atomics, the same bits in every run.  That is a
kernel of its own, because one program that adds all partials alone reads them at the rate of one multiprocessor: 264
rows of 1024 columns, twice, take it 20 us.  With EARLY it is started while the last rows are still at work, and waits
on the GPU (programmatic dependent launch).  With STAGES = 2 a row's loads are copies into shared memory that begin
while the row before is worked on.  Beyond 8192 columns there are two passes (row sums, then columns), because one would
spill.  An absent tensor is None, for which Triton compiles no code.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.device import load, sum_ranks
from ..runtime.errors import check
from ..runtime.launch import launch, target
from ..runtime.op import Cost, dense, moved
from ..runtime.partials import reduce_vectors
from ..runtime.philox import Mask, kernel_mask, mask_key_device
from ..runtime.replay import Replayed
from ..runtime.triton import tl, triton
from ..runtime.tuning import tuned
from .config import BWD_COLUMNS, BWD_ROWS, bwd_config
from .kinds import KINDS
from .records import DROP, POST, PRE, Saved, Wanted, incoming
from .triton_forward import drop, gamma_tile, live_rows, strided

# ---- records that kernels take ----


class Statistics(NamedTuple):
    """The norm's input and what forward has stored of it; without a norm None."""

    h: Tensor | None = None  # [m, D]
    mean: Tensor | None = None  # [m], fp32; not read where the norm is not centred
    rstd: Tensor | None = None  # [m], fp32
    gamma: Tensor | None = None  # [D]


class Gradients(NamedTuple):
    """What backward fills; None is omitted.  The vectors are [D], or a kernel's partial sums [P, D] in fp32."""

    dparts: Tensor  # [m, D]
    stride: int  # from one of its rows to the next
    dresidual: Tensor | None  # [m, D]
    dbias: Tensor | None
    dgamma: Tensor | None
    dbeta: Tensor | None


# ---- device functions ----


@triton.jit
def _statistics(saved, rows, live, KIND: tl.constexpr):
    """Returns mean (0 where the norm is not centred) and rstd of some rows, [ROWS, 1]."""
    rstd = tl.load(saved.rstd + rows, mask=live, other=0.0)
    mean = rstd * 0.0
    if KIND.centred:
        mean = tl.load(saved.mean + rows, mask=live, other=0.0)
    return mean[:, None], rstd[:, None]


@triton.jit
def _d_tile(dn, dh_ptr, key, mask, rows, columns, live, D: tl.constexpr, R: tl.constexpr, ORDER: tl.constexpr):
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
def _x_tile(h_ptr, mean, rstd, rows, columns, live, D: tl.constexpr):
    """Returns x_hat; outside it is any finite number, since d is 0 there."""
    return (load(h_ptr, rows[:, None] * D + columns[None, :], live[:, None] & (columns < D)[None, :]) - mean) * rstd


@triton.jit
def _gamma_rows(gamma_ptr, rows, columns, D: tl.constexpr, KIND: tl.constexpr):
    """Returns gamma for every row, from the cache each time: held, it would take 16 registers a thread and spill
    others."""
    return gamma_tile(gamma_ptr, rows[:, None] * 0 + columns[None, :], (columns < D)[None, :], KIND)


@triton.jit
def _out_tile(dx, dn, dh_ptr, out, key, mask, rows, columns, live, D: tl.constexpr, ORDER: tl.constexpr):
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
def _store_partials(out, columns, D: tl.constexpr, dbias, dgamma, dbeta):
    """Stores this program's row of [P, D] each."""
    offsets = tl.program_id(0).to(tl.int64) * D + columns
    if out.dbias is not None:
        tl.store(out.dbias + offsets, tl.sum(dbias, 0), mask=columns < D)
    if out.dgamma is not None:
        tl.store(out.dgamma + offsets, tl.sum(dgamma, 0), mask=columns < D)
    if out.dbeta is not None:
        tl.store(out.dbeta + offsets, tl.sum(dbeta, 0), mask=columns < D)


@triton.jit
def _zeros(ROWS: tl.constexpr, N: tl.constexpr):
    """Returns sums that start at 0: dbias, dgamma, dbeta."""
    zero = tl.zeros([ROWS, N], tl.float32)
    return zero, zero, zero


# ---- kernels ----


@triton.jit
def _bwd_kernel(
    dn,  # [R, m, D] in: Parts
    dh_ptr,  # [m, D] in
    saved,  # in: Statistics
    mask,  # KernelMask
    out,  # Gradients, whose vectors are partial sums
    M,
    D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    KIND: tl.constexpr, ORDER: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    P = tl.num_programs(0)
    key = None
    if mask.rng_ptr is not None:
        key = mask_key_device(mask.rng_ptr)
    a = tl.arange(0, A)
    b = A + tl.arange(0, max(B, 1))
    dbias_a, dgamma_a, dbeta_a = _zeros(ROWS, A)
    if B > 0:
        dbias_b, dgamma_b, dbeta_b = _zeros(ROWS, B)
    for i in tl.range(0, tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), P), num_stages=STAGES):
        rows = (tl.program_id(0) + i * P).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        live = live_rows(rows, M, ROWS)
        d_a = _d_tile(dn, dh_ptr, key, mask, rows, a, live, D, R, ORDER)
        if B > 0:
            d_b = _d_tile(dn, dh_ptr, key, mask, rows, b, live, D, R, ORDER)
        if saved.gamma is not None:
            mean, rstd = _statistics(saved, rows, live, KIND)
            x_a = _x_tile(saved.h, mean, rstd, rows, a, live, D)
            g_a = d_a * _gamma_rows(saved.gamma, rows, a, D, KIND)
            dgamma_a += d_a * x_a
            dbeta_a += d_a
            mean_g, mean_gx = tl.sum(g_a, 1), tl.sum(g_a * x_a, 1)
            if B > 0:
                x_b = _x_tile(saved.h, mean, rstd, rows, b, live, D)
                g_b = d_b * _gamma_rows(saved.gamma, rows, b, D, KIND)
                dgamma_b += d_b * x_b
                dbeta_b += d_b
                mean_g += tl.sum(g_b, 1)
                mean_gx += tl.sum(g_b * x_b, 1)
            mean_g, mean_gx = mean_g[:, None] / D, mean_gx[:, None] / D
            if not KIND.centred:
                mean_g = mean_g * 0.0
            d_a = rstd * (g_a - mean_g - x_a * mean_gx)
            if B > 0:
                d_b = rstd * (g_b - mean_g - x_b * mean_gx)
        dbias_a += _out_tile(d_a, dn, dh_ptr, out, key, mask, rows, a, live, D, ORDER)
        if B > 0:
            dbias_b += _out_tile(d_b, dn, dh_ptr, out, key, mask, rows, b, live, D, ORDER)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    _store_partials(out, a, D, dbias_a, dgamma_a, dbeta_a)
    if B > 0:
        _store_partials(out, b, D, dbias_b, dgamma_b, dbeta_b)


@triton.jit
def _bwd_rows_kernel(
    dn, dh_ptr, saved, mask,  # as above
    sums_ptr,  # [m, 2] out, fp32: mean(g), mean(g x_hat)
    M, D: tl.constexpr, R: tl.constexpr, A: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    key = None
    if mask.rng_ptr is not None:
        key = mask_key_device(mask.rng_ptr)
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = live_rows(rows, M, 1)
    mean, rstd = _statistics(saved, rows, live, KIND)
    sum_g, sum_gx = tl.zeros([1, A], tl.float32), tl.zeros([1, A], tl.float32)
    for start in tl.range(0, D, A):
        columns = start + tl.arange(0, A)
        d = _d_tile(dn, dh_ptr, key, mask, rows, columns, live, D, R, ORDER)
        g = d * _gamma_rows(saved.gamma, rows, columns, D, KIND)
        if KIND.centred:
            sum_g += g
        sum_gx += g * _x_tile(saved.h, mean, rstd, rows, columns, live, D)
    tl.store(sums_ptr + 2 * rows, tl.sum(sum_g, 1) / D)
    tl.store(sums_ptr + 2 * rows + 1, tl.sum(sum_gx, 1) / D)


@triton.jit
def _bwd_columns_kernel(
    dn, dh_ptr, saved, mask, sums_ptr, out,  # as above
    M, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    P = tl.num_programs(0)
    key = None
    if mask.rng_ptr is not None:
        key = mask_key_device(mask.rng_ptr)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    dbias, dgamma, dbeta = _zeros(ROWS, A)
    if saved.gamma is not None:
        gamma = gamma_tile(saved.gamma, columns[None, :], (columns < D)[None, :], KIND)
    for i in range(tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), P)):
        rows = (tl.program_id(0) + i * P).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        live = live_rows(rows, M, ROWS)
        d = _d_tile(dn, dh_ptr, key, mask, rows, columns, live, D, R, ORDER)
        if saved.gamma is not None:
            mean, rstd = _statistics(saved, rows, live, KIND)
            x = _x_tile(saved.h, mean, rstd, rows, columns, live, D)
            dgamma += d * x
            dbeta += d
            mean_g = tl.load(sums_ptr + 2 * rows, mask=live, other=0.0)[:, None]
            mean_gx = tl.load(sums_ptr + 2 * rows + 1, mask=live, other=0.0)[:, None]
            d = rstd * (d * gamma - mean_g - x * mean_gx)
        dbias += _out_tile(d, dn, dh_ptr, out, key, mask, rows, columns, live, D, ORDER)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    _store_partials(out, columns, D, dbias, dgamma, dbeta)


BWD_ROW = 8192  # columns up to which a row lies in registers


def programs(device: torch.device, m: int, rows: int) -> int:
    """Returns how many programs stride over m rows; their partials add 2.4 P / m of the traffic."""
    return max(1, min(2 * target(device).multiprocessors, -(-m // max(16, rows))))


# ---- launchers ----


def _normed(dn: Tensor | None, saved: Saved, order: str) -> bool:
    """Whether anything comes through the norm."""
    return saved.gamma is not None and (dn is not None or order in (POST, DROP))


def backward(
    dn: Tensor | None, dh: Tensor | None, saved: Statistics, mask: Mask, *, kind: str, order: str, out: Gradients
) -> None:
    """Launches what fills ``out``."""
    m, D = out.dparts.shape
    device, arch, dtype = out.dparts.device, target(out.dparts.device).arch, incoming(dn, dh).dtype
    wide = D > BWD_ROW
    R = 1 if dn is None else dn.shape[0]
    name, default = ("fused_norm_bwd_columns", BWD_COLUMNS) if wide else ("fused_norm_bwd", bwd_config(D, arch, R))
    config = tuned(name, arch, dtype, (m, D), default=default)
    P = programs(device, m, config["ROWS"])
    vectors = out.dbias, out.dgamma, out.dbeta
    partials = [None if v is None else out.dparts.new_empty(P, D, dtype=torch.float32) for v in vectors]
    own = Gradients(out.dparts, out.dparts.stride(0), out.dresidual, *partials)
    dh = None if dh is None else dh.contiguous()
    entering, drops = (strided(dn), dh, dense(saved)), kernel_mask(mask)
    flags = dict(D=D, R=R, KIND=KINDS[kind], ORDER=order if order in (POST, DROP) else PRE)
    if wide:
        sums = out.dparts.new_empty(m, 2, dtype=torch.float32)
        if saved.gamma is not None:
            rows = tuned("fused_norm_bwd_rows", arch, dtype, (m, D), default=BWD_ROWS)
            early = drops if order == DROP else drops._replace(rng_ptr=None)
            launch(_bwd_rows_kernel, (m,), device, *entering, early, sums, m, **flags, **rows)
        grid = P, -(-D // config["A"])
        launch(_bwd_columns_kernel, grid, device, *entering, drops, sums, own, m, **flags, **config)
    else:
        launch(_bwd_kernel, (P,), device, *entering, drops, own, m, **flags, **config)
    reduce_vectors(partials, vectors, early=config["EARLY"])


@Replayed
def bwd_launch(
    dn: Tensor | None,
    dh: Tensor | None,
    saved: Saved,
    mask: Mask,
    order: str,
    wanted: Wanted,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The launcher of fused_norm_bwd."""
    check(out is None or out.stride(1) == 1, "fused_norm_bwd: the columns of out must lie side by side")
    like = incoming(dn, dh)
    new, (m, D) = like.new_empty, like.shape[-2:]
    gamma = saved.gamma if _normed(dn, saved, order) else None
    dparts = new(m, D, dtype=wanted.parts) if out is None else out
    dresidual = None if wanted.residual is None else new(m, D, dtype=wanted.residual)
    dbias = None if wanted.bias is None else new(D, dtype=wanted.bias)
    dgamma = None if gamma is None else gamma.new_empty(D)
    dbeta = gamma.new_empty(D) if gamma is not None and wanted.beta else None
    read = Statistics() if gamma is None else Statistics(saved.h, saved.mean, saved.rstd, gamma)
    filled = Gradients(dparts, 0, dresidual, dbias=dbias, dgamma=dgamma, dbeta=dbeta)
    backward(dn, dh, read, mask, kind=saved.kind, order=order, out=filled)
    dparts = dparts if out is None else new(0, dtype=wanted.parts)
    or_empty = lambda t: new(0, dtype=torch.float32) if t is None else t
    if dgamma is not None and dbeta is None:
        dbeta = dgamma.new_empty(0)
    return dparts, or_empty(dresidual), or_empty(dbias), or_empty(dgamma), or_empty(dbeta)


def bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    dn, dh, saved, mask, order, wanted, *out = args
    like, normed = dh if dn is None else dn, _normed(dn, saved, order)
    m, D = like.shape[-2:]
    wide = D > BWD_ROW
    rows = (BWD_COLUMNS if wide else bwd_config(D, target(like.device).arch))["ROWS"]
    vectors = (wanted.bias is not None) + (1 + wanted.beta if normed else 0)
    partials = 4 * vectors * programs(like.device, m, rows) * D
    through = (saved.h, saved.mean, saved.rstd, saved.gamma) if normed else ()
    read, written = moved(dn, dh, *through, mask.rng) + partials, moved(*outputs, *out) + partials
    if wide and normed:  # the first pass, and its sums
        again = (dh,) if dn is None or order in (POST, DROP) else ()
        read += moved(dn, *again, *through, mask.rng if order == DROP else None) + 8 * m
        written += 8 * m
    return Cost(read, written)
