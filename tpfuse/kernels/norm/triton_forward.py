"""The fused norm's Triton side, forward.

    z = sum_r parts_r + bias + tables[index]    h = residual + dropout(z)    n = norm(h)  (DROP_N: dropout(norm(h)))

Each op is this with something omitted: an absent tensor is None, for which Triton compiles no code.  Without h the
norm is of z as it was read.  Rows of up to 16384 columns lie in registers, as two power-of-two tiles A + B that cover
D with as little waste as possible (768 = 512 + 256), several rows a program where they are short; wider rows are
walked in chunks.  D is a constant, so that the masks of columns that are there compile to nothing.

Offsets are int64.  Statistics are those of h as rounded and stored, so that an n recomputed from them is bitwise the
first.  With leaves parts are added as a binary tree, and launch parameters follow from D alone, since how many rows are
here depends on the split.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.device import RankSum, load, sum_ranks
from ..runtime.launch import launch, target
from ..runtime.leaves import placed
from ..runtime.op import Cost, dense, least, moved
from ..runtime.philox import NO_MASK, Mask, SplitKernelMask, keep_device, kernel_mask, mask_key_device
from ..runtime.triton import tl, triton
from ..runtime.tuning import tuned
from .config import apply_config, fwd_chunks_config, fwd_config
from .kinds import KINDS
from .records import ALONE, DROP, PRE, Add, NormVectors, Recompute

# A mask with as many fields is of rows in two pieces: Triton 3.6 has no hasattr of a record.
SPLIT_FIELDS = tl.constexpr(len(SplitKernelMask._fields))

# ---- records that kernels take ----


class Parts(NamedTuple):
    """parts or dn [R, m, D], strides (row, 1) within a part."""

    ptr: Tensor | None
    stride_r: int = 0
    stride_m: int = 0


class Outputs(NamedTuple):
    """What forward fills; None is omitted."""

    h: Tensor | None = None  # [m, D]
    n: Tensor | None = None  # [m, D]
    mean: Tensor | None = None  # [m], fp32
    rstd: Tensor | None = None  # [m], fp32


# ---- device functions ----


@triton.jit
def drop(z, key, mask, rows, columns):
    """Returns dropout(z) of a tile z [ROWS, N], rows [ROWS] of this shard, columns [N]; z itself where key is None.

    Row words are 32 bits wide: a division of 64 costs as much as five elements.
    """
    if key is None:
        return z
    else:
        k0, k1, first_sample = key
        row, batch = tl.cast(mask.first_row, tl.uint32) + rows.to(tl.uint32), tl.cast(mask.batch, tl.uint32)
        if len(mask) == SPLIT_FIELDS:
            row = tl.where(rows < mask.split, row, row + tl.cast(mask.jump, tl.uint32))
        position, sample = row // batch, first_sample + row % batch
        column, word = columns.to(tl.uint32)[None, :], tl.cast(mask.site_head, tl.uint32)
        threshold = tl.cast(mask.threshold, tl.uint32)
        kept = keep_device(k0, k1, position[:, None], word, column, sample[:, None], threshold)
        return z * tl.where(kept, mask.scale, 0.0)  # a product: with what is added next it becomes one instruction


@triton.jit
def live_rows(rows, M, ROWS: tl.constexpr):
    """Returns which of a program's rows exist; one row a program always does."""
    if ROWS == 1:
        return tl.full([1], True, tl.int1)
    else:
        return rows < M


@triton.jit
def gamma_tile(gamma_ptr, offsets, within, KIND: tl.constexpr):
    gamma = load(gamma_ptr, offsets, within)
    if KIND.offset != 0.0:
        gamma += KIND.offset
    return gamma


@triton.jit
def _h_tile(parts, add, mask, key, h_ptr, rows, columns, live, D: tl.constexpr, R: tl.constexpr):
    """Returns h of one tile, stored, and as it was rounded; 0 outside."""
    within = (columns < D)[None, :]
    inside = live[:, None] & within
    z = sum_ranks(parts.ptr, rows[:, None] * parts.stride_m + columns[None, :], inside, parts.stride_r, R)
    if add.bias is not None:
        z += load(add.bias, columns[None, :], within)
    if add.position_weight is not None:
        index = tl.load(add.positions + rows, mask=live, other=0)
        z += load(add.position_weight, index[:, None] * D + columns[None, :], inside)
    if add.type_weight is not None:
        index = tl.load(add.types + rows, mask=live, other=0)
        z += load(add.type_weight, index[:, None] * D + columns[None, :], inside)
    z = drop(z, key, mask, rows, columns)
    offsets = rows[:, None] * D + columns[None, :]
    if add.residual is not None:
        z += load(add.residual, offsets, inside)
    if h_ptr is not None:
        h = z.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + offsets, h, mask=inside)
        z = h.to(tl.float32)
    return tl.where(inside, z, 0.0)


@triton.jit
def _n_tile(
    h, mean, rstd, gamma_ptr, beta_ptr, mask, key, n_ptr, rows, columns, live, D: tl.constexpr, KIND: tl.constexpr
):
    within = (columns < D)[None, :]
    n = (h - mean[:, None]) * rstd[:, None] * gamma_tile(gamma_ptr, columns[None, :], within, KIND)
    if beta_ptr is not None:
        n += load(beta_ptr, columns[None, :], within)
    n = drop(n, key, mask, rows, columns)
    tl.store(n_ptr + rows[:, None] * D + columns[None, :], n.to(n_ptr.dtype.element_ty), mask=live[:, None] & within)


@triton.jit
def _squares(h, mean, columns, D: tl.constexpr):
    """Returns the sum of (h - mean)^2 over the columns that exist."""
    d = tl.where((columns < D)[None, :], h - mean[:, None], 0.0)
    return tl.sum(d * d, 1)


# ---- kernels ----


@triton.jit
def _fwd_kernel(
    parts,  # [R, m, D] in: Parts
    add,  # in: Add
    gamma_ptr, beta_ptr,  # [D] in
    mask,  # KernelMask
    out,  # Outputs
    M, eps,
    D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    KIND: tl.constexpr, DROP_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = live_rows(rows, M, ROWS)
    key_h, key_n = None, None
    if mask.rng_ptr is not None:
        if DROP_N:
            key_n = mask_key_device(mask.rng_ptr)
        else:
            key_h = mask_key_device(mask.rng_ptr)
    a = tl.arange(0, A)
    b = A + tl.arange(0, max(B, 1))
    h_a = _h_tile(parts, add, mask, key_h, out.h, rows, a, live, D, R)
    if B > 0:
        h_b = _h_tile(parts, add, mask, key_h, out.h, rows, b, live, D, R)
    if gamma_ptr is not None:
        mean = tl.zeros([ROWS], tl.float32)
        if KIND.centred:
            mean = tl.sum(h_a, 1)
            if B > 0:
                mean += tl.sum(h_b, 1)
            mean = mean / D
            tl.store(out.mean + rows, mean, mask=live)
        square = _squares(h_a, mean, a, D)
        if B > 0:
            square += _squares(h_b, mean, b, D)
        rstd = tl.rsqrt(square / D + eps)
        tl.store(out.rstd + rows, rstd, mask=live)
        _n_tile(h_a, mean, rstd, gamma_ptr, beta_ptr, mask, key_n, out.n, rows, a, live, D, KIND)
        if B > 0:
            _n_tile(h_b, mean, rstd, gamma_ptr, beta_ptr, mask, key_n, out.n, rows, b, live, D, KIND)


@triton.jit
def _fwd_chunks_kernel(
    parts, add, gamma_ptr, beta_ptr, mask, out, M, eps,  # as above
    D: tl.constexpr, R: tl.constexpr, A: tl.constexpr, KIND: tl.constexpr, DROP_N: tl.constexpr,
):  # fmt: skip
    """One row, chunk by chunk: Welford's mean and squares in every lane, then the lanes together; n in a second walk
    over h."""
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = live_rows(rows, M, 1)
    key_h, key_n = None, None
    if mask.rng_ptr is not None:
        if DROP_N:
            key_n = mask_key_device(mask.rng_ptr)
        else:
            key_h = mask_key_device(mask.rng_ptr)
    lanes = tl.arange(0, A)
    mean_lane = tl.zeros([1, A], tl.float32)
    square_lane = tl.zeros([1, A], tl.float32)
    count = 0.0
    for start in tl.range(0, D, A):
        columns = start + lanes
        h = _h_tile(parts, add, mask, key_h, out.h, rows, columns, live, D, R)
        count += 1.0
        within = (columns < D)[None, :]
        if KIND.centred:
            d = tl.where(within, h - mean_lane, 0.0)
            mean_lane += d / count
            square_lane += d * tl.where(within, h - mean_lane, 0.0)
        else:
            square_lane += h * h
    if gamma_ptr is not None:
        mean = tl.zeros([1], tl.float32)
        if KIND.centred:
            # lanes beyond D in the last chunk have one fewer
            counts = tl.maximum((D - lanes + A - 1) // A, 0).to(tl.float32)[None, :]
            mean = tl.sum(mean_lane * counts, 1) / D
            d = mean_lane - mean[:, None]
            square = tl.sum(square_lane + counts * d * d, 1)
            tl.store(out.mean + rows, mean, mask=live)
        else:
            square = tl.sum(square_lane, 1)
        rstd = tl.rsqrt(square / D + eps)
        tl.store(out.rstd + rows, rstd, mask=live)
        if out.h is not None:
            tl.debug_barrier()  # h was written by other threads
        for start in tl.range(0, D, A):
            columns = start + lanes
            if out.h is not None:
                h = load(out.h, rows[:, None] * D + columns[None, :], (columns < D)[None, :])
            else:
                h = load(parts.ptr, rows[:, None] * parts.stride_m + columns[None, :], (columns < D)[None, :])
            _n_tile(h, mean, rstd, gamma_ptr, beta_ptr, mask, key_n, out.n, rows, columns, live, D, KIND)


@triton.jit
def _apply_kernel(
    x_ptr,  # [m, D] in
    mean_ptr, rstd_ptr,  # [m] in, fp32
    gamma_ptr, beta_ptr,  # [D] in
    y_ptr,  # [m, D] out
    M, D: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = live_rows(rows, M, ROWS)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    x = load(x_ptr, rows[:, None] * D + columns[None, :], live[:, None] & (columns < D)[None, :])
    mean = tl.zeros([ROWS], tl.float32)
    if KIND.centred:
        mean = tl.load(mean_ptr + rows, mask=live, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
    _n_tile(x, mean, rstd, gamma_ptr, beta_ptr, None, None, y_ptr, rows, columns, live, D, KIND)


FWD_ROW = 16384  # columns up to which a row lies in registers


# ---- launchers ----


def strided(parts: Tensor | None) -> Parts:
    """Returns parts as a kernel takes them; rows may lie apart, columns may not."""
    if parts is None:
        return Parts(None)
    parts = parts if parts.stride(2) == 1 else parts.contiguous()
    return Parts(parts, parts.stride(0), parts.stride(1))


def forward(
    parts: Tensor, add: Add, norm: NormVectors, mask: Mask, *, order: str, out: Outputs, leaves: int = 0
) -> None:
    """Launches what fills ``out``; without h there, R is 1 and nothing is added."""
    R, m, D = parts.shape
    device, arch = parts.device, target(parts.device).arch
    name, kernel, default = (
        ("fused_norm_fwd", _fwd_kernel, fwd_config(D))
        if D <= FWD_ROW
        else ("fused_norm_fwd_chunks", _fwd_chunks_kernel, fwd_chunks_config(D, arch))
    )
    config = default if leaves else tuned(name, arch, parts.dtype, (m, D), default=default)
    grid = (-(-m // config.get("ROWS", 1)),)
    add, norm = dense(add), dense(norm)
    if leaves:
        parts, add, norm = placed((parts, add, norm))
    args = strided(parts), add, norm.gamma, norm.beta, kernel_mask(mask), out, m, norm.eps
    constants = dict(D=D, R=RankSum(R, leaves > 0), KIND=KINDS[norm.kind], DROP_N=order == DROP)
    launch(kernel, grid, device, *args, **constants, **config)


def fwd_launch(
    parts: Tensor, add: Add, norm: NormVectors, mask: Mask, order: str, leaves: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, m, D = parts.shape
    dtype = parts.dtype if add.residual is None else add.residual.dtype
    h = parts.new_empty(0) if order == ALONE else parts.new_empty(m, D, dtype=dtype)
    out = Outputs(None if order == ALONE else h)
    if norm.gamma is None:
        forward(parts, add, norm, mask, order=order, out=out, leaves=leaves)
        return h, h.new_empty(0), h.new_empty(0), h.new_empty(0)
    n, rstd = parts.new_empty(m, D), parts.new_empty(m, dtype=torch.float32)
    mean = rstd.new_empty(m if KINDS[norm.kind].centred else 0)
    forward(parts, add, norm, mask, order=order, out=out._replace(n=n, mean=mean, rstd=rstd), leaves=leaves)
    return h, n, mean, rstd


def fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """A wide row with a norm is read again from h; of a table a row is read for each of m rows, all different."""
    parts, add, *rest = args
    _, m, D = parts.shape
    position, token_type = (None if w is None else w[:m] for w in (add.position_weight, add.type_weight))
    cost = least((parts, add._replace(position_weight=position, type_weight=token_type), *rest), outputs)
    h, _, _, rstd = outputs
    return cost._replace(read=cost.read + moved(h)) if D > FWD_ROW and rstd.numel() else cost


def apply_launch(recipe: Recompute) -> Tensor:
    m, D = recipe.h.shape
    recipe = dense(recipe)
    x, y = recipe.h, recipe.h.new_empty(m, D, dtype=recipe.dtype)
    config = tuned("norm_apply", target(x.device).arch, x.dtype, (m, D), default=apply_config(D))
    grid = -(-m // config["ROWS"]), -(-D // config["A"])
    tensors = x, recipe.mean, recipe.rstd, recipe.gamma, recipe.beta, y
    launch(_apply_kernel, grid, x.device, *tensors, m, D=D, KIND=KINDS[recipe.kind], **config)
    return y


def reduce_launch(parts: Tensor) -> Tensor:
    """The launcher of reduce_parts.

    What is not rows [R, m, D] is summed in rows whose width divides 1024: a kernel is compiled for each width.
    """
    if parts.dim() == 3:
        return drop_launch(parts, NO_MASK)
    n = math.prod(parts.shape[1:])
    D = math.gcd(n, 1024)
    return drop_launch(parts.reshape(len(parts), n // D, D), NO_MASK).view(parts.shape[1:])


def drop_launch(parts: Tensor, mask: Mask) -> Tensor:
    """[R, m, D] -> [m, D]: the launcher of dropout, of one part."""
    total = parts.new_empty(parts.shape[1:])
    forward(parts, Add(), NormVectors(), mask, order=PRE, out=Outputs(total))
    return total
