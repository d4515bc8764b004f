"""The Triton side of the fused norm family, backward: what :mod:`._fused_norm` does forward, with one thing or another left out.

    d = sum_r dn_r        "pre"    dx = norm_backward(d) + dh            dresidual = dx, dparts = dropout(dx), dbias = sum_rows dparts
                          "post"   dx = norm_backward(d + dh)            the same
                          "drop"   dx = norm_backward(dropout(d + dh))   dparts = dx
    x_hat = (h - mean) rstd,  g = d gamma;  norm_backward(d) = rstd (g - mean(g) - x_hat mean(g x_hat))
    dgamma = sum_rows d x_hat,  dbeta = sum_rows d

Rows of up to 8192 columns lie in registers.  The vector gradients stay in fp32 registers while a program strides over the rows; it writes
one partial, and a 2-D reduction adds those: no atomics, the same bits in every run.  Beyond 8192 columns there are two passes (row sums,
then columns), because one would spill.  An absent tensor is None, for which Triton compiles no code.
"""

import torch
from torch import Tensor

from ._device import load, sum_ranks
from ._fused_norm import REDUCE, Peers, coordinates, drop, live_rows, place, sum_partials, tiles, warps
from ._launch import launch, next_power_of_2, target
from ._op import Cost, check, moved
from ._philox import mask_key_device
from ._triton import tl, triton
from ._tuning import tuned

# ---- device functions ----


@triton.jit
def _statistics(mean_ptr, rstd_ptr, rows, live, RMS: tl.constexpr):
    """mean (0 for RMS) and rstd of some rows, [ROWS, 1]"""
    rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
    mean = rstd * 0.0
    if not RMS:
        mean = tl.load(mean_ptr + rows, mask=live, other=0.0)
    return mean[:, None], rstd[:, None]


@triton.jit
def _d_tile(
    dn_ptr, dh_ptr, key, rows, columns, live, where, stride_r, stride_m, D: tl.constexpr, R: tl.constexpr, TYPE: tl.constexpr,
    ORDER: tl.constexpr,
):  # fmt: skip
    """What enters the norm's backward, 0 outside: sum_r dn_r, without dn dh; what else the order says."""
    mask = live[:, None] & (columns < D)[None, :]
    if dn_ptr is not None:
        d = sum_ranks(dn_ptr, rows[:, None] * stride_m + columns[None, :], mask, stride_r, R, TYPE)
        if ORDER != "pre":
            if dh_ptr is not None:
                d += load(dh_ptr, rows[:, None] * D + columns[None, :], mask)
    else:
        d = load(dh_ptr, rows[:, None] * D + columns[None, :], mask)
    if ORDER == "drop":
        d = drop(d, key, rows, columns, where)
    return d


@triton.jit
def _x_tile(h_ptr, mean, rstd, rows, columns, live, D: tl.constexpr):
    """x_hat; outside any finite number, since d is 0 there"""
    return (load(h_ptr, rows[:, None] * D + columns[None, :], live[:, None] & (columns < D)[None, :]) - mean) * rstd


@triton.jit
def _gamma_tile(gamma_ptr, rows, columns, D: tl.constexpr):
    """gamma for every row, from the cache each time: held, it would be 16 registers a thread, and spill others."""
    return load(gamma_ptr, rows[:, None] * 0 + columns[None, :], (columns < D)[None, :])


@triton.jit
def _out_tile(
    dx, dn_ptr, dh_ptr, dparts_ptr, dresidual_ptr, key, rows, columns, live, where, stride_out, D: tl.constexpr, ORDER: tl.constexpr
):  # fmt: skip
    """Adds what passed the norm by, stores dresidual and dparts; returns dparts before rounding, 0 outside."""
    mask, offsets = live[:, None] & (columns < D)[None, :], rows[:, None] * D + columns[None, :]
    if ORDER == "pre":
        if dn_ptr is not None:
            if dh_ptr is not None:
                dx += load(dh_ptr, offsets, mask)
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + offsets, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
    if ORDER != "drop":
        dx = drop(dx, key, rows, columns, where)
    tl.store(dparts_ptr + rows[:, None] * stride_out + columns[None, :], dx.to(dparts_ptr.dtype.element_ty), mask=mask)
    return tl.where(mask, dx, 0.0)


@triton.jit
def _store_partials(dbias_ptr, dgamma_ptr, dbeta_ptr, columns, D: tl.constexpr, dbias, dgamma, dbeta):
    """[P, D] each: this program's row"""
    at = tl.program_id(0).to(tl.int64) * D + columns
    if dbias_ptr is not None:
        tl.store(dbias_ptr + at, tl.sum(dbias, 0), mask=columns < D)
    if dgamma_ptr is not None:
        tl.store(dgamma_ptr + at, tl.sum(dgamma, 0), mask=columns < D)
    if dbeta_ptr is not None:
        tl.store(dbeta_ptr + at, tl.sum(dbeta, 0), mask=columns < D)


# ---- kernels ----


@triton.jit
def _bwd_kernel(
    dn_ptr,  # [R, m, D] in, strides (stride_r, stride_m, 1); with a TYPE [R] addresses of [m, D] of that type
    dh_ptr, h_ptr,  # [m, D] in
    mean_ptr, rstd_ptr,  # [m] in, fp32
    gamma_ptr,  # [D] in
    rng_ptr,  # [3] in
    dparts_ptr,  # [m, D] out, rows stride_out apart
    dresidual_ptr,  # [m, D] out
    dbias_ptr, dgamma_ptr, dbeta_ptr,  # [P, D] out, fp32
    M, stride_r, stride_m, stride_out, first_row, batch, site_head, threshold, scale,
    D: tl.constexpr, R: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    RMS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    P = tl.num_programs(0)
    where = (first_row, batch, site_head, threshold, scale)
    key = None
    if rng_ptr is not None:
        key = mask_key_device(rng_ptr)
    a = tl.arange(0, A)
    b = A + tl.arange(0, max(B, 1))
    dbias_a, dgamma_a, dbeta_a = tl.zeros([ROWS, A], tl.float32), tl.zeros([ROWS, A], tl.float32), tl.zeros([ROWS, A], tl.float32)
    if B > 0:
        dbias_b, dgamma_b, dbeta_b = tl.zeros([ROWS, B], tl.float32), tl.zeros([ROWS, B], tl.float32), tl.zeros([ROWS, B], tl.float32)
    for i in range(tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), P)):
        rows = (tl.program_id(0) + i * P).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        live = live_rows(rows, M, ROWS)
        d_a = _d_tile(dn_ptr, dh_ptr, key, rows, a, live, where, stride_r, stride_m, D, R, TYPE, ORDER)
        if B > 0:
            d_b = _d_tile(dn_ptr, dh_ptr, key, rows, b, live, where, stride_r, stride_m, D, R, TYPE, ORDER)
        if gamma_ptr is not None:
            mean, rstd = _statistics(mean_ptr, rstd_ptr, rows, live, RMS)
            x_a = _x_tile(h_ptr, mean, rstd, rows, a, live, D)
            g_a = d_a * _gamma_tile(gamma_ptr, rows, a, D)
            dgamma_a += d_a * x_a
            dbeta_a += d_a
            mean_g, mean_gx = tl.sum(g_a, 1), tl.sum(g_a * x_a, 1)
            if B > 0:
                x_b = _x_tile(h_ptr, mean, rstd, rows, b, live, D)
                g_b = d_b * _gamma_tile(gamma_ptr, rows, b, D)
                dgamma_b += d_b * x_b
                dbeta_b += d_b
                mean_g += tl.sum(g_b, 1)
                mean_gx += tl.sum(g_b * x_b, 1)
            mean_g, mean_gx = mean_g[:, None] / D, mean_gx[:, None] / D
            if RMS:
                mean_g = mean_g * 0.0
            d_a = rstd * (g_a - mean_g - x_a * mean_gx)
            if B > 0:
                d_b = rstd * (g_b - mean_g - x_b * mean_gx)
        dbias_a += _out_tile(d_a, dn_ptr, dh_ptr, dparts_ptr, dresidual_ptr, key, rows, a, live, where, stride_out, D, ORDER)
        if B > 0:
            dbias_b += _out_tile(d_b, dn_ptr, dh_ptr, dparts_ptr, dresidual_ptr, key, rows, b, live, where, stride_out, D, ORDER)
    _store_partials(dbias_ptr, dgamma_ptr, dbeta_ptr, a, D, dbias_a, dgamma_a, dbeta_a)
    if B > 0:
        _store_partials(dbias_ptr, dgamma_ptr, dbeta_ptr, b, D, dbias_b, dgamma_b, dbeta_b)


@triton.jit
def _bwd_rows_kernel(
    dn_ptr, dh_ptr, h_ptr, mean_ptr, rstd_ptr, gamma_ptr, rng_ptr,  # as above
    sums_ptr,  # [m, 2] out, fp32: mean(g), mean(g x_hat)
    M, stride_r, stride_m, first_row, batch, site_head, threshold, scale,
    D: tl.constexpr, R: tl.constexpr, TYPE: tl.constexpr, A: tl.constexpr, RMS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    where = (first_row, batch, site_head, threshold, scale)
    key = None
    if rng_ptr is not None:
        key = mask_key_device(rng_ptr)
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = live_rows(rows, M, 1)
    mean, rstd = _statistics(mean_ptr, rstd_ptr, rows, live, RMS)
    sum_g, sum_gx = tl.zeros([1, A], tl.float32), tl.zeros([1, A], tl.float32)
    for start in tl.range(0, D, A):
        columns = start + tl.arange(0, A)
        d = _d_tile(dn_ptr, dh_ptr, key, rows, columns, live, where, stride_r, stride_m, D, R, TYPE, ORDER)
        g = d * _gamma_tile(gamma_ptr, rows, columns, D)
        if not RMS:
            sum_g += g
        sum_gx += g * _x_tile(h_ptr, mean, rstd, rows, columns, live, D)
    tl.store(sums_ptr + 2 * rows, tl.sum(sum_g, 1) / D)
    tl.store(sums_ptr + 2 * rows + 1, tl.sum(sum_gx, 1) / D)


@triton.jit
def _bwd_columns_kernel(
    dn_ptr, dh_ptr, h_ptr, mean_ptr, rstd_ptr, gamma_ptr, rng_ptr, sums_ptr, dparts_ptr, dresidual_ptr,  # as above
    dbias_ptr, dgamma_ptr, dbeta_ptr,
    M, stride_r, stride_m, stride_out, first_row, batch, site_head, threshold, scale,
    D: tl.constexpr, R: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, RMS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    P = tl.num_programs(0)
    where = (first_row, batch, site_head, threshold, scale)
    key = None
    if rng_ptr is not None:
        key = mask_key_device(rng_ptr)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    dbias, dgamma, dbeta = tl.zeros([ROWS, A], tl.float32), tl.zeros([ROWS, A], tl.float32), tl.zeros([ROWS, A], tl.float32)
    if gamma_ptr is not None:
        gamma = load(gamma_ptr, columns[None, :], (columns < D)[None, :])
    for i in range(tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), P)):
        rows = (tl.program_id(0) + i * P).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        live = live_rows(rows, M, ROWS)
        d = _d_tile(dn_ptr, dh_ptr, key, rows, columns, live, where, stride_r, stride_m, D, R, TYPE, ORDER)
        if gamma_ptr is not None:
            mean, rstd = _statistics(mean_ptr, rstd_ptr, rows, live, RMS)
            x = _x_tile(h_ptr, mean, rstd, rows, columns, live, D)
            dgamma += d * x
            dbeta += d
            mean_g = tl.load(sums_ptr + 2 * rows, mask=live, other=0.0)[:, None]
            mean_gx = tl.load(sums_ptr + 2 * rows + 1, mask=live, other=0.0)[:, None]
            d = rstd * (d * gamma - mean_g - x * mean_gx)
        dbias += _out_tile(d, dn_ptr, dh_ptr, dparts_ptr, dresidual_ptr, key, rows, columns, live, where, stride_out, D, ORDER)
    _store_partials(dbias_ptr, dgamma_ptr, dbeta_ptr, columns, D, dbias, dgamma, dbeta)


@triton.jit
def _reduce_vectors_kernel(
    dbias_partial_ptr, dgamma_partial_ptr, dbeta_partial_ptr,  # [P, D] in, fp32
    dbias_ptr, dgamma_ptr, dbeta_ptr,  # [D] out
    P, D,
    ROWS: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
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


# ---- launch parameters: the shapes at which sm_90 was read to be free of spills; a measured table may replace them ----

BWD_ROW = 8192  # columns up to which a row lies in registers
BWD_ROWS = dict(A=4096, num_warps=8)
BWD_COLUMNS = dict(ROWS=1, A=2048, num_warps=8)


def bwd_config(D: int, arch: str) -> dict[str, int]:
    """D <= BWD_ROW: rows in registers, about 16 elements a thread.  128 registers keep two programs of 8 warps on a multiprocessor."""
    A, B = tiles(D)
    rows = max(1, 4096 // next_power_of_2(A + B))
    config = dict(ROWS=rows, A=A, B=B, num_warps=min(2 * warps(rows * A, 32), 16))
    return config | dict(maxnreg=128) if arch.startswith("sm_") and A == D >= 1024 else config  # others would spill


def programs(device: torch.device, m: int, rows: int) -> int:
    """Partials add 2.4 P / m of the traffic."""
    return max(1, min(2 * target(device).multiprocessors, -(-m // max(16, rows))))


# ---- launchers ----


def backward(dn, dh, h, mean, rstd, gamma, rng, where, rms, order, *, dparts, dresidual=None, dbias=None, dgamma=None, dbeta=None) -> None:
    """Launches what fills dparts, dresidual and the vector gradients.  Without gamma h, mean and rstd are not read."""
    m, D = dparts.shape
    dh, h = (None if t is None else t.contiguous() for t in (dh, h))
    pointer, stride_r, stride_m, element = (None, 0, 0, None) if dn is None else place(dn)
    R = 1 if dn is None else dn.shape[0]
    device, arch, dtype = dparts.device, target(dparts.device).arch, (dh if dn is None else dn).dtype
    entering = pointer, dh, *((None,) * 3 if gamma is None else (h, mean, rstd)), gamma, rng
    flags = dict(D=D, R=R, TYPE=element, RMS=rms, ORDER=order)
    name, default = ("fused_norm_bwd", bwd_config(D, arch)) if D <= BWD_ROW else ("fused_norm_bwd_columns", BWD_COLUMNS)
    config = tuned(name, arch, dtype, (m, D), default)
    P = programs(device, m, config["ROWS"])
    vectors = dbias, dgamma, dbeta
    partials = [None if v is None else dparts.new_empty(P, D, dtype=torch.float32) for v in vectors]
    leaving = dparts, dresidual, *partials
    strides = m, stride_r, stride_m
    if D <= BWD_ROW:
        launch(_bwd_kernel, (P,), device, *entering, *leaving, *strides, dparts.stride(0), *where, **flags, **config)
    else:
        sums = dparts.new_empty(m, 2, dtype=torch.float32)
        if gamma is not None:
            rows = tuned("fused_norm_bwd_rows", arch, dtype, (m, D), BWD_ROWS)
            first = *entering[:-1], rng if order == "drop" else None
            launch(_bwd_rows_kernel, (m,), device, *first, sums, *strides, *where, **flags, **rows)
        grid = P, -(-D // config["A"])
        launch(_bwd_columns_kernel, grid, device, *entering, sums, *leaving, *strides, dparts.stride(0), *where, **flags, **config)
    if any(v is not None for v in vectors):
        launch(_reduce_vectors_kernel, (-(-D // REDUCE["A"]), 3), device, *partials, *vectors, P, D, **REDUCE)


def norm_gradients(gamma: Tensor | None, has_beta: bool) -> tuple[Tensor | None, Tensor | None]:
    """dgamma and dbeta to be filled; None where there is none"""
    if gamma is None:
        return None, None
    return gamma.new_empty(gamma.shape), gamma.new_empty(gamma.shape) if has_beta else None


def cost(dn, dh, saved, gamma, rng, order, written, vectors) -> Cost:
    """Of :func:`backward` that filled ``written``; ``vectors`` is how many of the three gradients it made."""
    like = dh if dn is None else dn
    m, D = like.shape[-2:]
    wide = D > BWD_ROW
    rows = (BWD_COLUMNS if wide else bwd_config(D, target(like.device).arch))["ROWS"]
    partials = 4 * vectors * programs(like.device, m, rows) * D
    normed = (*saved, gamma) if gamma is not None else ()
    read, write = moved(dn, dh, *normed, rng) + partials, moved(*written) + partials
    if wide and normed:  # the first pass, and its sums
        again = () if dn is not None and order == "pre" else (dh,)
        read += moved(dn, *again, *normed, *((rng,) if order == "drop" else ())) + 8 * m
        write += 8 * m
    return Cost(read, write)


def bwd_launch(
    dn, dh, h, mean, rstd, gamma, rng, p, site, first_row, batch, rms, post_norm, has_bias, has_beta, residual_dtype, parts_dtype, out=None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The launcher of reduce_bias_dropout_add_norm_bwd; dn [R, m, D] or :class:`Peers`."""
    m, D = (dh if dn is None else dn).shape[-2:]
    check(out is None or out.stride(1) == 1, "reduce_bias_dropout_add_norm_bwd: the columns of out must lie side by side")
    new = (dh if dn is None else dn.addresses if isinstance(dn, Peers) else dn).new_empty
    gamma = None if dn is None and not post_norm else gamma  # nothing comes through the norm
    dparts = new(m, D, dtype=parts_dtype) if out is None else out
    dresidual = None if residual_dtype is None else new(m, D, dtype=residual_dtype)
    dbias = new(D, dtype=torch.float32) if has_bias else None
    dgamma, dbeta = norm_gradients(gamma, has_beta)
    vectors = dict(dbias=dbias, dgamma=dgamma, dbeta=dbeta)
    where, order = coordinates(p, site, first_row, batch), "post" if post_norm else "pre"
    backward(dn, dh, h, mean, rstd, gamma, rng, where, rms, order, dparts=dparts, dresidual=dresidual, **vectors)
    dparts = dparts if out is None else new(0, dtype=parts_dtype)
    return dparts, *given(new, dresidual, dbias), *given(new if gamma is None else gamma.new_empty, dgamma, dbeta)


def given(new, *outputs: Tensor | None) -> list[Tensor]:
    """An op returns an empty tensor for None."""
    return [new(0, dtype=torch.float32) if t is None else t for t in outputs]


def bwd_cost(args: tuple, outputs: tuple) -> Cost:
    dn, dh, *saved, gamma, rng = args[:7]
    rms, post_norm, has_bias, has_beta, _, _, *out = args[11:]
    gamma = None if dn is None and not post_norm else gamma
    vectors = has_bias + (0 if gamma is None else 1 + has_beta)
    return cost(dn, dh, saved, gamma, rng, "post" if post_norm else "pre", (*outputs, *out), vectors)


def norm_bwd_launch(dy, dh, x, mean, rstd, gamma, has_beta, rms) -> tuple[Tensor, Tensor, Tensor]:
    """The launcher of norm_bwd."""
    dx, (dgamma, dbeta) = x.new_empty(x.shape), norm_gradients(gamma, has_beta)
    backward(dy, dh, x, mean, rstd, gamma, None, coordinates(), rms, "pre", dparts=dx, dgamma=dgamma, dbeta=dbeta)
    return dx, *given(gamma.new_empty, dgamma, dbeta)


def norm_bwd_cost(args: tuple, outputs: tuple) -> Cost:
    dy, dh, *saved, gamma, has_beta, _ = args
    return cost(dy, dh, saved, gamma, None, "pre", outputs, 1 + has_beta)
