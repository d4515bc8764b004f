"""The Triton side of reduce_bias_dropout_add_norm: kernels, launch parameters, launchers.

Rows of up to 8192 columns (forward 16384) lie in registers, as two power-of-two tiles A + B that cover D with as little waste as
possible (768 = 512 + 256); wider rows are walked in chunks.  Backward keeps the three vector gradients in fp32 registers while it strides
over the rows, writes one partial a program, and a 2-D reduction adds those: no atomics, the same bits in every run.  Beyond 8192
columns backward is two passes (row sums, then columns), because one pass would spill.

Offsets are int64.  Statistics are those of h' as rounded and stored.  An absent tensor is None, for which Triton compiles no code.
"""

import torch
from torch import Tensor

from ._device import load, sum_ranks
from ._launch import launch, multiprocessors, next_power_of_2
from ._philox import keep_device, mask_key_device, scale, threshold
from ._triton import tl, triton

# ---- device functions ----


@triton.jit
def _dropout(z, rng_ptr, rows, columns, first_row, batch, site_head, threshold, scale):
    """z [ROWS, N], rows [ROWS] of this shard, columns [N]"""
    k0, k1, first_sample = mask_key_device(rng_ptr)
    row = first_row + rows
    position, sample = (row // batch).to(tl.uint32), first_sample + (row % batch).to(tl.uint32)
    word = site_head.to(tl.uint32)
    kept = keep_device(k0, k1, position[:, None], word, columns.to(tl.uint32)[None, :], sample[:, None], threshold.to(tl.uint32))
    return tl.where(kept, z * scale, 0.0)


@triton.jit
def _h_tile(
    parts_ptr, bias_ptr, residual_ptr, rng_ptr, h_ptr, rows, columns, live, D, stride_r, stride_m,
    first_row, batch, site_head, threshold, scale, R: tl.constexpr,
):  # fmt: skip
    """h' of one tile, stored, and as it was rounded; 0 outside."""
    mask = live[:, None] & (columns < D)[None, :]
    z = sum_ranks(parts_ptr, rows[:, None] * stride_m + columns[None, :], mask, stride_r, R)
    if bias_ptr is not None:
        z += load(bias_ptr, columns, columns < D)[None, :]
    if rng_ptr is not None:
        z = _dropout(z, rng_ptr, rows, columns, first_row, batch, site_head, threshold, scale)
    offsets = rows[:, None] * D + columns[None, :]
    if residual_ptr is not None:
        z += load(residual_ptr, offsets, mask)
    h = z.to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + offsets, h, mask=mask)
    return tl.where(mask, h.to(tl.float32), 0.0)


@triton.jit
def _n_tile(h, mean, rstd, gamma_ptr, beta_ptr, n_ptr, rows, columns, live, D):
    n = (h - mean[:, None]) * rstd[:, None] * load(gamma_ptr, columns, columns < D)[None, :]
    if beta_ptr is not None:
        n += load(beta_ptr, columns, columns < D)[None, :]
    mask = live[:, None] & (columns < D)[None, :]
    tl.store(n_ptr + rows[:, None] * D + columns[None, :], n.to(n_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _squares(h, mean, columns, D):
    """sum over the columns that are there of (h - mean)^2"""
    d = tl.where((columns < D)[None, :], h - mean[:, None], 0.0)
    return tl.sum(d * d, 1)


# ---- forward ----


@triton.jit
def _fwd_kernel(
    parts_ptr,  # [R, m, D] in, strides (stride_r, stride_m, 1)
    bias_ptr,  # [D] in
    residual_ptr,  # [m, D] in
    gamma_ptr, beta_ptr,  # [D] in
    rng_ptr,  # [3] in
    h_ptr, n_ptr,  # [m, D] out
    mean_ptr, rstd_ptr,  # [m] out, fp32
    M, D, stride_r, stride_m, eps, first_row, batch, site_head, threshold, scale,
    R: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < M
    a = tl.arange(0, A)
    b = A + tl.arange(0, max(B, 1))
    h_a = _h_tile(
        parts_ptr, bias_ptr, residual_ptr, rng_ptr, h_ptr, rows, a, live, D, stride_r, stride_m,
        first_row, batch, site_head, threshold, scale, R,
    )  # fmt: skip
    if B > 0:
        h_b = _h_tile(
            parts_ptr, bias_ptr, residual_ptr, rng_ptr, h_ptr, rows, b, live, D, stride_r, stride_m,
            first_row, batch, site_head, threshold, scale, R,
        )  # fmt: skip
    if gamma_ptr is not None:
        mean = tl.zeros([ROWS], tl.float32)
        if not RMS:
            mean = tl.sum(h_a, 1)
            if B > 0:
                mean += tl.sum(h_b, 1)
            mean = mean / D
            tl.store(mean_ptr + rows, mean, mask=live)
        square = _squares(h_a, mean, a, D)
        if B > 0:
            square += _squares(h_b, mean, b, D)
        rstd = tl.rsqrt(square / D + eps)
        tl.store(rstd_ptr + rows, rstd, mask=live)
        _n_tile(h_a, mean, rstd, gamma_ptr, beta_ptr, n_ptr, rows, a, live, D)
        if B > 0:
            _n_tile(h_b, mean, rstd, gamma_ptr, beta_ptr, n_ptr, rows, b, live, D)


@triton.jit
def _fwd_chunks_kernel(
    parts_ptr, bias_ptr, residual_ptr, gamma_ptr, beta_ptr, rng_ptr, h_ptr, n_ptr, mean_ptr, rstd_ptr,  # as above
    M, D, stride_r, stride_m, eps, first_row, batch, site_head, threshold, scale,
    R: tl.constexpr, A: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    """One row, chunk by chunk: Welford's mean and squares in every lane, then the lanes together; n' in a second walk over h'."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = rows < M
    lanes = tl.arange(0, A)
    mean_lane = tl.zeros([1, A], tl.float32)
    square_lane = tl.zeros([1, A], tl.float32)
    count = 0.0
    for start in tl.range(0, D, A):
        columns = start + lanes
        h = _h_tile(
            parts_ptr, bias_ptr, residual_ptr, rng_ptr, h_ptr, rows, columns, live, D, stride_r, stride_m,
            first_row, batch, site_head, threshold, scale, R,
        )  # fmt: skip
        count += 1.0
        there = (columns < D)[None, :]
        if RMS:
            square_lane += h * h
        else:
            d = tl.where(there, h - mean_lane, 0.0)
            mean_lane += d / count
            square_lane += d * tl.where(there, h - mean_lane, 0.0)
    if gamma_ptr is not None:
        mean = tl.zeros([1], tl.float32)
        if RMS:
            square = tl.sum(square_lane, 1)
        else:
            counts = tl.maximum((D - lanes + A - 1) // A, 0).to(tl.float32)[None, :]  # lanes beyond D in the last chunk have one fewer
            mean = tl.sum(mean_lane * counts, 1) / D
            d = mean_lane - mean[:, None]
            square = tl.sum(square_lane + counts * d * d, 1)
            tl.store(mean_ptr + rows, mean, mask=live)
        rstd = tl.rsqrt(square / D + eps)
        tl.store(rstd_ptr + rows, rstd, mask=live)
        tl.debug_barrier()  # h' was written by other threads
        for start in tl.range(0, D, A):
            columns = start + lanes
            h = load(h_ptr, rows[:, None] * D + columns[None, :], (columns < D)[None, :])
            _n_tile(h, mean, rstd, gamma_ptr, beta_ptr, n_ptr, rows, columns, live, D)


# ---- backward ----


@triton.jit
def _d_tile(dn_ptr, dh_ptr, offsets, mask, stride_r, R: tl.constexpr, POST: tl.constexpr):
    """What enters the norm's backward: sum_r dn_r (post-norm: + dh'); without dn, dh'."""
    if dn_ptr is not None:
        d = sum_ranks(dn_ptr, offsets, mask, stride_r, R)
        if POST:
            if dh_ptr is not None:
                d += load(dh_ptr, offsets, mask)
    else:
        d = load(dh_ptr, offsets, mask)
    return d


@triton.jit
def _out_tile(
    dx, dparts_ptr, dresidual_ptr, rng_ptr, offsets, mask, rows, columns, first_row, batch, site_head, threshold, scale
):  # fmt: skip
    """Stores dresidual and dparts; returns dparts before rounding, for the bias gradient."""
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + offsets, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
    if rng_ptr is not None:
        dx = _dropout(dx, rng_ptr, rows, columns, first_row, batch, site_head, threshold, scale)
    tl.store(dparts_ptr + offsets, dx.to(dparts_ptr.dtype.element_ty), mask=mask)
    return tl.where(mask, dx, 0.0)


@triton.jit
def _dx_tile(d, x_hat, gamma, mean_g, mean_gx, rstd, dh_ptr, offsets, mask, POST: tl.constexpr):
    dx = rstd[:, None] * (d * gamma - mean_g[:, None] - x_hat * mean_gx[:, None])
    if not POST:
        if dh_ptr is not None:
            dx += load(dh_ptr, offsets, mask)
    return dx


@triton.jit
def _store_partials(partial_ptr, columns, D, dbias, dgamma, dbeta):
    """[3, P, D]: this program's row of dbias, dgamma, dbeta"""
    P = tl.num_programs(0).to(tl.int64)
    at = partial_ptr + tl.program_id(0).to(tl.int64) * D + columns
    tl.store(at, tl.sum(dbias, 0), mask=columns < D)
    tl.store(at + P * D, tl.sum(dgamma, 0), mask=columns < D)
    tl.store(at + 2 * P * D, tl.sum(dbeta, 0), mask=columns < D)


@triton.jit
def _bwd_kernel(
    dn_ptr,  # [R, m, D] in, strides (stride_r, D, 1)
    dh_ptr, h_ptr,  # [m, D] in
    mean_ptr, rstd_ptr,  # [m] in, fp32
    gamma_ptr,  # [D] in
    rng_ptr,  # [3] in
    dparts_ptr, dresidual_ptr,  # [m, D] out
    partial_ptr,  # [3, P, D] out, fp32
    M, D, stride_r, first_row, batch, site_head, threshold, scale,
    R: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, RMS: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    P = tl.num_programs(0)
    a = tl.arange(0, A)
    b = A + tl.arange(0, max(B, 1))
    dbias_a, dgamma_a, dbeta_a = tl.zeros([ROWS, A], tl.float32), tl.zeros([ROWS, A], tl.float32), tl.zeros([ROWS, A], tl.float32)
    if B > 0:
        dbias_b, dgamma_b, dbeta_b = tl.zeros([ROWS, B], tl.float32), tl.zeros([ROWS, B], tl.float32), tl.zeros([ROWS, B], tl.float32)
    if gamma_ptr is not None:
        gamma_a = load(gamma_ptr, a, a < D)[None, :]
        if B > 0:
            gamma_b = load(gamma_ptr, b, b < D)[None, :]
    for i in range(tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), P)):
        rows = (tl.program_id(0) + i * P).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        live = rows < M
        mask_a, off_a = live[:, None] & (a < D)[None, :], rows[:, None] * D + a[None, :]
        dx_a = _d_tile(dn_ptr, dh_ptr, off_a, mask_a, stride_r, R, POST)
        if B > 0:
            mask_b, off_b = live[:, None] & (b < D)[None, :], rows[:, None] * D + b[None, :]
            dx_b = _d_tile(dn_ptr, dh_ptr, off_b, mask_b, stride_r, R, POST)
        if gamma_ptr is not None:
            rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
            mean = tl.zeros([ROWS], tl.float32)
            if not RMS:
                mean = tl.load(mean_ptr + rows, mask=live, other=0.0)
            x_a = tl.where(mask_a, (load(h_ptr, off_a, mask_a) - mean[:, None]) * rstd[:, None], 0.0)
            g = dx_a * gamma_a
            sum_g, sum_gx = tl.sum(g, 1), tl.sum(g * x_a, 1)
            if B > 0:
                x_b = tl.where(mask_b, (load(h_ptr, off_b, mask_b) - mean[:, None]) * rstd[:, None], 0.0)
                g_b = dx_b * gamma_b
                sum_g += tl.sum(g_b, 1)
                sum_gx += tl.sum(g_b * x_b, 1)
            if RMS:
                sum_g = sum_g * 0.0
            dgamma_a += dx_a * x_a
            dbeta_a += dx_a
            dx_a = _dx_tile(dx_a, x_a, gamma_a, sum_g / D, sum_gx / D, rstd, dh_ptr, off_a, mask_a, POST)
            if B > 0:
                dgamma_b += dx_b * x_b
                dbeta_b += dx_b
                dx_b = _dx_tile(dx_b, x_b, gamma_b, sum_g / D, sum_gx / D, rstd, dh_ptr, off_b, mask_b, POST)
        else:
            if dn_ptr is not None:
                if dh_ptr is not None:
                    dx_a += load(dh_ptr, off_a, mask_a)
                    if B > 0:
                        dx_b += load(dh_ptr, off_b, mask_b)
        dbias_a += _out_tile(
            dx_a, dparts_ptr, dresidual_ptr, rng_ptr, off_a, mask_a, rows, a, first_row, batch, site_head, threshold, scale
        )  # fmt: skip
        if B > 0:
            dbias_b += _out_tile(
                dx_b, dparts_ptr, dresidual_ptr, rng_ptr, off_b, mask_b, rows, b, first_row, batch, site_head, threshold, scale
            )  # fmt: skip
    _store_partials(partial_ptr, a, D, dbias_a, dgamma_a, dbeta_a)
    if B > 0:
        _store_partials(partial_ptr, b, D, dbias_b, dgamma_b, dbeta_b)


@triton.jit
def _bwd_rows_kernel(
    dn_ptr, dh_ptr, h_ptr, mean_ptr, rstd_ptr, gamma_ptr,  # as above
    sums_ptr,  # [m, 2] out, fp32: mean(g), mean(g x_hat)
    M, D, stride_r,
    R: tl.constexpr, A: tl.constexpr, RMS: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if not RMS:
        mean = tl.load(mean_ptr + row)
    sum_g, sum_gx = tl.zeros([A], tl.float32), tl.zeros([A], tl.float32)
    for start in tl.range(0, D, A):
        columns = start + tl.arange(0, A)
        mask, offsets = columns < D, row * D + columns
        g = _d_tile(dn_ptr, dh_ptr, offsets, mask, stride_r, R, POST) * load(gamma_ptr, columns, mask)
        if not RMS:
            sum_g += g
        sum_gx += g * (load(h_ptr, offsets, mask) - mean)
    tl.store(sums_ptr + 2 * row, tl.sum(sum_g, 0) / D)
    tl.store(sums_ptr + 2 * row + 1, tl.sum(sum_gx, 0) * rstd / D)


@triton.jit
def _bwd_columns_kernel(
    dn_ptr, dh_ptr, h_ptr, mean_ptr, rstd_ptr, gamma_ptr, rng_ptr, sums_ptr, dparts_ptr, dresidual_ptr, partial_ptr,  # as above
    M, D, stride_r, first_row, batch, site_head, threshold, scale,
    R: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, RMS: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    P = tl.num_programs(0)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    dbias, dgamma, dbeta = tl.zeros([ROWS, A], tl.float32), tl.zeros([ROWS, A], tl.float32), tl.zeros([ROWS, A], tl.float32)
    for i in range(tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), P)):
        rows = (tl.program_id(0) + i * P).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        live = rows < M
        mask, offsets = live[:, None] & (columns < D)[None, :], rows[:, None] * D + columns[None, :]
        d = _d_tile(dn_ptr, dh_ptr, offsets, mask, stride_r, R, POST)
        if gamma_ptr is not None:
            gamma = load(gamma_ptr, columns, columns < D)[None, :]
            rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
            mean = tl.zeros([ROWS], tl.float32)
            if not RMS:
                mean = tl.load(mean_ptr + rows, mask=live, other=0.0)
            x_hat = tl.where(mask, (load(h_ptr, offsets, mask) - mean[:, None]) * rstd[:, None], 0.0)
            mean_g = tl.load(sums_ptr + 2 * rows, mask=live, other=0.0)
            mean_gx = tl.load(sums_ptr + 2 * rows + 1, mask=live, other=0.0)
            dgamma += d * x_hat
            dbeta += d
            d = _dx_tile(d, x_hat, gamma, mean_g, mean_gx, rstd, dh_ptr, offsets, mask, POST)
        else:
            if dn_ptr is not None:
                if dh_ptr is not None:
                    d += load(dh_ptr, offsets, mask)
        dbias += _out_tile(
            d, dparts_ptr, dresidual_ptr, rng_ptr, offsets, mask, rows, columns, first_row, batch, site_head, threshold, scale
        )  # fmt: skip
    _store_partials(partial_ptr, columns, D, dbias, dgamma, dbeta)


@triton.jit
def _reduce_kernel(
    partial_ptr,  # [3, P, D] in, fp32
    out_ptr,  # [3, D] out, fp32
    P, D,
    ROWS: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * A + tl.arange(0, A)
    vector = tl.program_id(1).to(tl.int64)
    total = tl.zeros([ROWS, A], tl.float32)
    for start in tl.range(0, P, ROWS):
        p = start + tl.arange(0, ROWS)
        total += load(partial_ptr, (vector * P + p[:, None]) * D + columns[None, :], (p < P)[:, None] & (columns < D)[None, :])
    tl.store(out_ptr + vector * D + columns, tl.sum(total, 0), mask=columns < D)


# ---- launch parameters: the shapes at which sm_90 was read to be free of spills; a measured table may replace them ----

FWD_ROW, BWD_ROW = 16384, 8192  # columns up to which a row lies in registers


def tiles(D: int) -> tuple[int, int]:
    """Powers of two A >= B (or B = 0) with A + B >= D, least in sum: 768 -> 512 + 256, 1000 -> 1024 + 0."""
    whole = next_power_of_2(D)
    half = whole // 2
    rest = next_power_of_2(D - half) if D > half else 0
    return (half, rest) if half >= 128 and 0 < rest < half else (whole, 0)


def _warps(n: int, least: int) -> int:
    """The power of two at or below n, between ``least`` and 16."""
    return min(max(1 << (max(n, 1).bit_length() - 1), least), 16)


def fwd_config(D: int) -> dict[str, int]:
    """D <= FWD_ROW: rows in registers"""
    A, B = tiles(D)
    if D > BWD_ROW:
        A, B = BWD_ROW, next_power_of_2(D - BWD_ROW)
    return dict(ROWS=1, A=A, B=B, num_warps=_warps((A + B) // 1024, 1))


def fwd_chunks_config(D: int) -> dict[str, int]:
    chunk, warps = (8192, 16) if D % 8192 == 0 else (2048, 8)
    return dict(A=chunk, num_warps=warps)


def bwd_config(D: int) -> dict[str, int]:
    """D <= BWD_ROW: rows in registers"""
    A, B = tiles(D)
    return dict(ROWS=2 if A + B <= 1024 else 1, A=A, B=B, num_warps=_warps((A + B) // 512, 2))


BWD_ROWS = dict(A=4096, num_warps=8)
BWD_COLUMNS = dict(ROWS=1, A=2048, num_warps=8)
REDUCE = dict(ROWS=32, A=64, num_warps=4)


# ---- launchers ----


def _coordinates(p: float, site: int, first_row: int, batch: int) -> tuple:
    return first_row, batch, site << 16, threshold(p) << 16, scale(p)


def fwd_launch(parts, bias, residual, gamma, beta, rng, p, site, first_row, batch, eps, rms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The launcher of reduce_bias_dropout_add_norm_fwd."""
    R, m, D = parts.shape
    if parts.stride(2) != 1:
        parts = parts.contiguous()
    residual = None if residual is None else residual.contiguous()
    h = parts.new_empty(m, D, dtype=parts.dtype if residual is None else residual.dtype)
    nothing = (h.new_empty(0), h.new_empty(0), h.new_empty(0))
    n, mean, rstd = (
        nothing if gamma is None else (parts.new_empty(m, D), *(h.new_empty(s, dtype=torch.float32) for s in (0 if rms else m, m)))
    )
    tensors = parts, bias, residual, gamma, beta, rng, h, n, mean, rstd
    numbers = m, D, parts.stride(0), parts.stride(1), eps, *_coordinates(p, site, first_row, batch)
    if D <= FWD_ROW:
        config = fwd_config(D)
        launch(_fwd_kernel, (-(-m // config["ROWS"]),), parts.device, *tensors, *numbers, R=R, RMS=rms, **config)
    else:
        launch(_fwd_chunks_kernel, (m,), parts.device, *tensors, *numbers, R=R, RMS=rms, **fwd_chunks_config(D))
    return h, n, mean, rstd


def bwd_launch(
    dn, dh, h, mean, rstd, gamma, rng, p, site, first_row, batch, rms, post_norm, has_bias, has_beta, residual_dtype, parts_dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The launcher of reduce_bias_dropout_add_norm_bwd."""
    like = dh if dn is None else dn
    m, D = like.shape[-2:]
    if dn is None and not post_norm:
        gamma = None  # nothing comes through the norm
    if dn is not None and (dn.stride(2) != 1 or dn.stride(1) != D):
        dn = dn.contiguous()
    R, stride_r = (1, 0) if dn is None else (dn.shape[0], dn.stride(0))
    dparts = like.new_empty(m, D, dtype=parts_dtype)
    dresidual = None if residual_dtype is None else like.new_empty(m, D, dtype=residual_dtype)
    programs = max(1, min(2 * multiprocessors(like), -(-m // 16)))  # partials add 2.4 P / m of the traffic
    partial = like.new_empty(3, programs, D, dtype=torch.float32)
    saved = (None,) * 3 if gamma is None else (h, mean, rstd)
    where = m, D, stride_r, *_coordinates(p, site, first_row, batch)
    flags = dict(R=R, RMS=rms, POST=post_norm)
    if D <= BWD_ROW:
        tensors = dn, dh, *saved, gamma, rng, dparts, dresidual, partial
        launch(_bwd_kernel, (programs,), like.device, *tensors, *where, **flags, **bwd_config(D))
    else:
        sums = like.new_empty(m, 2, dtype=torch.float32)
        if gamma is not None:
            launch(_bwd_rows_kernel, (m,), like.device, dn, dh, *saved, gamma, sums, m, D, stride_r, **flags, **BWD_ROWS)
        tensors = dn, dh, *saved, gamma, rng, sums, dparts, dresidual, partial
        grid = programs, -(-D // BWD_COLUMNS["A"])
        launch(_bwd_columns_kernel, grid, like.device, *tensors, *where, **flags, **BWD_COLUMNS)
    vectors = like.new_empty(3, D, dtype=torch.float32)
    launch(_reduce_kernel, (-(-D // REDUCE["A"]), 3), like.device, partial, vectors, programs, D, **REDUCE)
    dbias, dgamma, dbeta = vectors.unbind(0)
    nothing = vectors.new_empty(0)
    normed = gamma is not None
    return (
        dparts,
        nothing if dresidual is None else dresidual,
        dbias.clone() if has_bias else nothing.clone(),
        dgamma.to(gamma.dtype, copy=True) if normed else nothing.clone(),
        dbeta.to(gamma.dtype, copy=True) if normed and has_beta else nothing.clone(),
    )
