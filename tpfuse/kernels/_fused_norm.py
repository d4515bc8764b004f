"""The Triton side of the fused norm family, forward: reduce_bias_dropout_add_norm, layer and RMS norm, dropout, embed_finish, rank sums.

    z = sum_r parts_r + bias + tables[index]      h = residual + dropout(z)      n = norm(h)      (DROP_N: n = dropout(norm(h)))

Each op is this with something left out: an absent tensor is None, for which Triton compiles no code.  Without h the norm is of z as it
was read.  Rows of up to 16384 columns lie in registers, as two power-of-two tiles A + B that cover D with as little waste as possible
(768 = 512 + 256), several rows a program where they are short; wider rows are walked in chunks.  D is a constant, so that the
masks of columns that are there compile to nothing.

Parts are one tensor [R, m, D], or R buffers [m, D] of peers, told by a table of their addresses.  Offsets are int64.  Statistics are those
of h as rounded and stored, so an n made again from them is bitwise the first.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._device import load, sum_ranks
from ._launch import launch, next_power_of_2, target
from ._op import Cost, least, moved
from ._philox import keep_device, mask_key_device, scale, threshold
from ._triton import tl, triton
from ._tuning import tuned

# ---- device functions ----


@triton.jit
def drop(z, key, rows, columns, where):
    """dropout(z) of a tile z [ROWS, N], rows [ROWS] of this shard, columns [N]; z itself where key is None.

    Row words are 32 bits wide: a division of 64 costs as much as five elements.
    """
    if key is None:
        return z
    else:
        k0, k1, first_sample = key
        first_row, batch, site_head, threshold, scale = where
        row = tl.cast(first_row, tl.uint32) + rows.to(tl.uint32)
        position, sample = row // tl.cast(batch, tl.uint32), first_sample + row % tl.cast(batch, tl.uint32)
        column, word = columns.to(tl.uint32)[None, :], tl.cast(site_head, tl.uint32)
        kept = keep_device(k0, k1, position[:, None], word, column, sample[:, None], tl.cast(threshold, tl.uint32))
        return z * tl.where(kept, scale, 0.0)  # a product: with what is added next it becomes one instruction


@triton.jit
def live_rows(rows, M, ROWS: tl.constexpr):
    """Which of a program's rows there are; one row a program is always there."""
    if ROWS == 1:
        return tl.full([1], True, tl.int1)
    else:
        return rows < M


@triton.jit
def _h_tile(
    parts_ptr, bias_ptr, position_ptr, positions_ptr, type_ptr, types_ptr, residual_ptr, key, h_ptr, rows, columns, live, where,
    stride_r, stride_m, D: tl.constexpr, R: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """h of one tile, stored, and as it was rounded; 0 outside."""
    within = (columns < D)[None, :]
    mask = live[:, None] & within
    z = sum_ranks(parts_ptr, rows[:, None] * stride_m + columns[None, :], mask, stride_r, R, TYPE)
    if bias_ptr is not None:
        z += load(bias_ptr, columns[None, :], within)
    if position_ptr is not None:
        z += load(position_ptr, tl.load(positions_ptr + rows, mask=live, other=0)[:, None] * D + columns[None, :], mask)
    if type_ptr is not None:
        z += load(type_ptr, tl.load(types_ptr + rows, mask=live, other=0)[:, None] * D + columns[None, :], mask)
    z = drop(z, key, rows, columns, where)
    offsets = rows[:, None] * D + columns[None, :]
    if residual_ptr is not None:
        z += load(residual_ptr, offsets, mask)
    if h_ptr is not None:
        h = z.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + offsets, h, mask=mask)
        z = h.to(tl.float32)
    return tl.where(mask, z, 0.0)


@triton.jit
def _n_tile(h, mean, rstd, gamma_ptr, beta_ptr, key, n_ptr, rows, columns, live, where, D: tl.constexpr):
    within = (columns < D)[None, :]
    n = (h - mean[:, None]) * rstd[:, None] * load(gamma_ptr, columns[None, :], within)
    if beta_ptr is not None:
        n += load(beta_ptr, columns[None, :], within)
    n = drop(n, key, rows, columns, where)
    tl.store(n_ptr + rows[:, None] * D + columns[None, :], n.to(n_ptr.dtype.element_ty), mask=live[:, None] & within)


@triton.jit
def _squares(h, mean, columns, D: tl.constexpr):
    """sum over the columns that are there of (h - mean)^2"""
    d = tl.where((columns < D)[None, :], h - mean[:, None], 0.0)
    return tl.sum(d * d, 1)


# ---- kernels ----


@triton.jit
def _fwd_kernel(
    parts_ptr,  # [R, m, D] in, strides (stride_r, stride_m, 1); with a TYPE [R] addresses of [m, D] of that type
    bias_ptr,  # [D] in
    position_ptr, positions_ptr, type_ptr, types_ptr,  # tables [_, D] and indices [m] in
    residual_ptr,  # [m, D] in
    gamma_ptr, beta_ptr,  # [D] in
    rng_ptr,  # [3] in
    h_ptr, n_ptr,  # [m, D] out
    mean_ptr, rstd_ptr,  # [m] out, fp32
    M, stride_r, stride_m, eps, first_row, batch, site_head, threshold, scale,
    D: tl.constexpr, R: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    RMS: tl.constexpr, DROP_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = live_rows(rows, M, ROWS)
    where = (first_row, batch, site_head, threshold, scale)
    key_h, key_n = None, None
    if rng_ptr is not None:
        if DROP_N:
            key_n = mask_key_device(rng_ptr)
        else:
            key_h = mask_key_device(rng_ptr)
    a = tl.arange(0, A)
    b = A + tl.arange(0, max(B, 1))
    h_a = _h_tile(
        parts_ptr, bias_ptr, position_ptr, positions_ptr, type_ptr, types_ptr, residual_ptr, key_h, h_ptr, rows, a, live, where,
        stride_r, stride_m, D, R, TYPE,
    )  # fmt: skip
    if B > 0:
        h_b = _h_tile(
            parts_ptr, bias_ptr, position_ptr, positions_ptr, type_ptr, types_ptr, residual_ptr, key_h, h_ptr, rows, b, live, where,
            stride_r, stride_m, D, R, TYPE,
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
        _n_tile(h_a, mean, rstd, gamma_ptr, beta_ptr, key_n, n_ptr, rows, a, live, where, D)
        if B > 0:
            _n_tile(h_b, mean, rstd, gamma_ptr, beta_ptr, key_n, n_ptr, rows, b, live, where, D)


@triton.jit
def _fwd_chunks_kernel(
    parts_ptr, bias_ptr, position_ptr, positions_ptr, type_ptr, types_ptr, residual_ptr, gamma_ptr, beta_ptr, rng_ptr,  # as above
    h_ptr, n_ptr, mean_ptr, rstd_ptr,
    M, stride_r, stride_m, eps, first_row, batch, site_head, threshold, scale,
    D: tl.constexpr, R: tl.constexpr, TYPE: tl.constexpr, A: tl.constexpr, RMS: tl.constexpr, DROP_N: tl.constexpr,
):  # fmt: skip
    """One row, chunk by chunk: Welford's mean and squares in every lane, then the lanes together; n in a second walk over h."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = live_rows(rows, M, 1)
    where = (first_row, batch, site_head, threshold, scale)
    key_h, key_n = None, None
    if rng_ptr is not None:
        if DROP_N:
            key_n = mask_key_device(rng_ptr)
        else:
            key_h = mask_key_device(rng_ptr)
    lanes = tl.arange(0, A)
    mean_lane = tl.zeros([1, A], tl.float32)
    square_lane = tl.zeros([1, A], tl.float32)
    count = 0.0
    for start in tl.range(0, D, A):
        columns = start + lanes
        h = _h_tile(
            parts_ptr, bias_ptr, position_ptr, positions_ptr, type_ptr, types_ptr, residual_ptr, key_h, h_ptr, rows, columns, live, where,
            stride_r, stride_m, D, R, TYPE,
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
        if h_ptr is not None:
            tl.debug_barrier()  # h was written by other threads
        for start in tl.range(0, D, A):
            columns = start + lanes
            if h_ptr is not None:
                h = load(h_ptr, rows[:, None] * D + columns[None, :], (columns < D)[None, :])
            else:
                h = load(parts_ptr, rows[:, None] * stride_m + columns[None, :], (columns < D)[None, :])
            _n_tile(h, mean, rstd, gamma_ptr, beta_ptr, key_n, n_ptr, rows, columns, live, where, D)


@triton.jit
def _apply_kernel(
    x_ptr,  # [m, D] in
    mean_ptr, rstd_ptr,  # [m] in, fp32
    gamma_ptr, beta_ptr,  # [D] in
    y_ptr,  # [m, D] out
    M, D: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = live_rows(rows, M, ROWS)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    x = load(x_ptr, rows[:, None] * D + columns[None, :], live[:, None] & (columns < D)[None, :])
    mean = tl.zeros([ROWS], tl.float32)
    if not RMS:
        mean = tl.load(mean_ptr + rows, mask=live, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
    _n_tile(x, mean, rstd, gamma_ptr, beta_ptr, None, y_ptr, rows, columns, live, None, D)


@triton.jit
def sum_partials(partial_ptr, out_ptr, columns, P, D, ROWS: tl.constexpr, A: tl.constexpr):
    """partial [P, D] fp32 -> out [D], some columns of it"""
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


# ---- launch parameters: the shapes at which sm_90 was read to be free of spills; a measured table may replace them ----

REDUCE = dict(ROWS=32, A=64, num_warps=4)
FWD_ROW = 16384  # columns up to which a row lies in registers


def tiles(D: int) -> tuple[int, int]:
    """Powers of two A >= B (or B = 0) with A + B >= D, least in sum, A at most 8192: 768 -> 512 + 256, 1000 -> 1024 + 0."""
    whole = next_power_of_2(D)
    half = whole // 2
    rest = next_power_of_2(D - half) if D > half else 0
    return (half, rest) if half >= 128 and 0 < rest < half or whole > 8192 else (whole, 0)


def warps(elements: int, each: int, least: int = 1) -> int:
    """So that a thread has ``each`` elements or a few more: a power of two between ``least`` and 16."""
    return min(max(next_power_of_2(elements // (32 * each) + 1) // 2, least), 16)


def fwd_config(D: int) -> dict[str, int]:
    """D <= FWD_ROW: rows in registers"""
    A, B = tiles(D)
    rows = max(1, 1024 // (A + B))
    return dict(ROWS=rows, A=A, B=B, num_warps=warps(rows * (A + B), 32))


def fwd_chunks_config(D: int, arch: str) -> dict[str, int]:
    config = dict(A=min(max(D & -D, 2048), 4096), num_warps=8)  # a chunk that divides D, if there is one
    return config | dict(maxnreg=128) if arch.startswith("sm_") else config  # else the assembler aims at 80 registers and spills


def apply_config(D: int) -> dict[str, int]:
    chunk = min(D & -D, 2048) if D % 256 == 0 else min(next_power_of_2(D), 1024)
    return dict(ROWS=max(4096 // chunk, 1), A=chunk, num_warps=4)


# ---- launchers ----


class Peers(NamedTuple):
    """Parts [R, m, D] that lie in R buffers, each [m, D] and contiguous: a table of their addresses, multiples of 16."""

    addresses: Tensor  # int64 [R]
    m: int
    D: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.addresses), self.m, self.D


def place(parts: Tensor | Peers, strides: bool = True) -> tuple[Tensor, int, int, object]:
    """-> what a kernel takes for parts: pointer, stride_r, stride_m, TYPE.  ``strides``: rows may lie apart."""
    if isinstance(parts, Peers):
        return parts.addresses, 0, parts.D, getattr(tl, str(parts.dtype).removeprefix("torch."))
    if parts.stride(2) != 1 or not (strides or parts.stride(1) == parts.shape[2]):
        parts = parts.contiguous()
    return parts, parts.stride(0), parts.stride(1), None


def coordinates(p: float = 0.0, site: int = 0, first_row: int = 0, batch: int = 1) -> tuple:
    return first_row, batch, site << 16, threshold(p) << 16, scale(p)


def forward(
    parts, gamma, beta, rng, where, eps, rms, *, h, n=None, mean=None, rstd=None,
    bias=None, tables=(None, None, None, None), residual=None, drop_n=False,
) -> None:  # fmt: skip
    """Launches what fills h (None: R = 1, and nothing is added), n, mean and rstd."""
    R, m, D = parts.shape
    pointer, stride_r, stride_m, element = place(parts)
    residual = None if residual is None else residual.contiguous()
    tensors = pointer, bias, *tables, residual, gamma, beta, rng, h, n, mean, rstd
    numbers = m, stride_r, stride_m, eps, *where
    narrow = D <= FWD_ROW
    arch = target(pointer.device).arch
    name, kernel, default = ("", _fwd_kernel, fwd_config(D)) if narrow else ("_chunks", _fwd_chunks_kernel, fwd_chunks_config(D, arch))
    config = tuned(f"fused_norm_fwd{name}", arch, parts.dtype, (m, D), default)
    grid = (-(-m // config["ROWS"]) if narrow else m,)
    launch(kernel, grid, pointer.device, *tensors, *numbers, D=D, R=R, TYPE=element, RMS=rms, DROP_N=drop_n, **config)


def outputs(like: Tensor, m: int, D: int, dtype: torch.dtype, normed: bool, rms: bool) -> tuple[Tensor, Tensor, Tensor]:
    """n, mean, rstd; without a norm empty"""
    if not normed:
        return like.new_empty(0), like.new_empty(0), like.new_empty(0)
    fp32 = dict(dtype=torch.float32)
    return like.new_empty(m, D, dtype=dtype), like.new_empty(0 if rms else m, **fp32), like.new_empty(m, **fp32)


def fwd_launch(parts, bias, residual, gamma, beta, rng, p, site, first_row, batch, eps, rms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The launcher of reduce_bias_dropout_add_norm_fwd; parts [R, m, D] or :class:`Peers`."""
    _, m, D = parts.shape
    h = (parts.addresses if isinstance(parts, Peers) else parts).new_empty(m, D, dtype=(parts if residual is None else residual).dtype)
    n, mean, rstd = outputs(h, m, D, parts.dtype, gamma is not None, rms)
    where = coordinates(p, site, first_row, batch)
    forward(parts, gamma, beta, rng, where, eps, rms, h=h, n=n, mean=mean, rstd=rstd, bias=bias, residual=residual)
    return h, n, mean, rstd


def fwd_cost(args: tuple, outputs: tuple) -> Cost:
    """Of any op that :func:`forward` finishes in one launch: a wide row with a norm is read again from h."""
    cost = least(args, outputs)
    h, _, _, rstd = outputs
    return cost._replace(read=cost.read + moved(h)) if h.shape[1] > FWD_ROW and rstd.numel() else cost


def norm_launch(x, gamma, beta, eps, rms, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The launcher of norm_fwd."""
    y, mean, rstd = outputs(x, *x.shape, dtype, True, rms)
    forward(x[None], gamma, beta, None, coordinates(), eps, rms, h=None, n=y, mean=mean, rstd=rstd)
    return y, mean, rstd


def apply_launch(x, mean, rstd, gamma, beta, eps, rms, dtype) -> Tensor:
    """The launcher of norm_apply."""
    m, D = x.shape
    x, y = x.contiguous(), x.new_empty(m, D, dtype=dtype)
    config = tuned("norm_apply", target(x.device).arch, x.dtype, (m, D), apply_config(D))
    grid = -(-m // config["ROWS"]), -(-D // config["A"])
    launch(_apply_kernel, grid, x.device, x, mean, rstd, gamma, beta, y, m, D=D, RMS=rms, **config)
    return y


def dropout_launch(x, rng, p, site, first_row, batch) -> Tensor:
    """The launcher of dropout_fwd."""
    y = x.new_empty(x.shape)
    forward(x[None], None, None, rng, coordinates(p, site, first_row, batch), 0.0, False, h=y)
    return y


def reduce_launch(parts) -> Tensor:
    """The launcher of reduce_parts."""
    total = parts.new_empty(parts.shape[1:])
    forward(parts, None, None, None, coordinates(), 0.0, False, h=total)
    return total
