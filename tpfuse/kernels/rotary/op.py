"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

    for each pair (a, b) of a head's columns and its angle's cos and sin, both times the attention factor
    forward   ya = a cos - b sin       yb = b cos + a sin
    backward  the same with -sin: a rotation's adjoint is the rotation back, so x is not saved

Shapes: x, y [M, H, E], cos, sin [P, F] with 2F <= E, positions [M]: row i takes table row positions[i], without
positions row i. Rotate-half (transformers' Llama) pairs column j with j + F, interleaved 2j with 2j + 1; columns from
2F on pass through.  The arithmetic is fp32 (fp64 for fp64), y is rounded once to x's dtype.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..losses.op import check_ids
from ..runtime.device import load
from ..runtime.errors import check, check_floating
from ..runtime.function import Function, once_differentiable
from ..runtime.launch import launch, next_power_of_2, target
from ..runtime.op import ELEMENTWISE, Cost, acc_dtype, autocast, moved, op
from ..runtime.triton import tl, triton
from ..runtime.tuning import tuned
from .reference import rotate


class Rotation(NamedTuple):
    cos: Tensor  # [P, F]
    sin: Tensor
    positions: Tensor | None  # int64 [M]
    interleaved: bool


# ---- reference ----


def rope_fwd_ref(x: Tensor, rotation: Rotation, back: bool) -> Tensor:
    cos, sin = (t[: len(x)] if rotation.positions is None else t[rotation.positions] for t in rotation[:2])
    cos, sin = (t[:, None].to(acc_dtype(x)) for t in (cos, -sin if back else sin))
    return rotate(x, cos, sin, rotation.interleaved)


# ---- Triton ----


@triton.jit
def _rope_kernel(
    x_ptr,  # [M, H, E] in, strides (stride_m, stride_h, 1)
    cos_ptr, sin_ptr,  # [P, F] in
    positions_ptr,  # [M] in
    y_ptr,  # [M, H, E] out
    M, H, E, F, stride_m, stride_h,
    ROWS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    heads = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    live = (rows < M)[:, None, None] & (heads < H)[None, :, None]
    x_ptr += rows[:, None, None] * stride_m + heads[None, :, None] * stride_h
    y_ptr += (rows[:, None, None] * H + heads[None, :, None]) * E
    positions = rows
    if positions_ptr is not None:
        positions = tl.load(positions_ptr + rows, mask=rows < M, other=0)
    pairs = tl.arange(0, PAIRS)
    angles = (positions[:, None] * F + pairs[None, :])[:, None, :]
    has_angle = (rows < M)[:, None, None] & (pairs < F)[None, None, :]
    cos, sin = load(cos_ptr, angles, has_angle), load(sin_ptr, angles, has_angle)
    if BACK:
        sin = -sin
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PAIRS)[None, None, :]
        mask = live & (columns < 2 * F)
        a, b = tl.split(load(x_ptr, columns, mask).reshape(ROWS, HEADS, PAIRS, 2))
        y = tl.join(a * cos - b * sin, b * cos + a * sin).reshape(ROWS, HEADS, 2 * PAIRS)
        tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        columns = pairs[None, None, :]
        mask = live & (columns < F)
        a, b = load(x_ptr, columns, mask), load(x_ptr, F + columns, mask)
        tl.store(y_ptr + columns, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + F + columns, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)
    if REST > 0:
        columns = 2 * F + tl.arange(0, REST)[None, None, :]
        mask = live & (columns < E)
        tl.store(y_ptr + columns, tl.load(x_ptr + columns, mask=mask), mask=mask)


def fwd_config(H: int, E: int) -> dict[str, int]:
    """Returns launch parameters: all heads of a row, so that its angles are read once, as far as 4096 elements go; then
    more rows."""
    width = next_power_of_2(E)
    heads = min(next_power_of_2(H), max(4096 // width, 1))
    return dict(ROWS=max(4096 // (heads * width), 1), HEADS=heads, num_warps=4)


def fwd_launch(x: Tensor, rotation: Rotation, back: bool) -> Tensor:
    M, H, E = x.shape
    F = rotation.cos.shape[1]
    if x.stride(2) != 1:
        x = x.contiguous()
    tables = (None if t is None else t.contiguous() for t in rotation[:3])
    y = x.new_empty(M, H, E)
    config = tuned("rope", target(x.device).arch, x.dtype, (M, H, E), default=fwd_config(H, E))
    config |= dict(
        PAIRS=next_power_of_2(F),
        REST=next_power_of_2(E - 2 * F) if E > 2 * F else 0,
        INTERLEAVED=rotation.interleaved,
        BACK=back,
    )
    grid = -(-M // config["ROWS"]), -(-H // config["HEADS"])
    sizes = M, H, E, F, *x.stride()[:2]
    launch(_rope_kernel, grid, x.device, x, *tables, y, *sizes, **config)
    return y


def fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """Counts positions as different as they can be."""
    x, (cos, sin, positions, _), _ = args
    (M, H, _), F = x.shape, cos.shape[1]
    return Cost(moved(x, cos[:M], sin[:M], positions), moved(*outputs), 6 * M * H * F)


rope_fwd = op(rope_fwd_ref, kind=ELEMENTWISE, launch=fwd_launch, fake=lambda x, *_: x.new_empty(x.shape), cost=fwd_cost)


# ---- autograd ----


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Rotation) -> Tensor:
        ctx.save_for_backward(*rotation[:3])
        ctx.interleaved = rotation.interleaved
        return rope_fwd(x, rotation, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, positions = ctx.saved_tensors
        return rope_fwd(dy, Rotation(cos, sin, positions, ctx.interleaved), True), None


# ---- public ----


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """Rotates pairs of columns of every head by the angles of its row's position.

    x [..., H, E], read in place where its last stride is 1; its leading dimensions, flattened, are the rows.  cos,
    sin [P, F] in fp32 or fp64, of :func:`rope_table`, not differentiated, rotate the first 2F <= E columns; the rest
    passes.  ``positions`` int64 in the leading dimensions' shape, each in [0, P): the table row of every row of x;
    None: row i takes table row i, so an [S, B, H, E] needs them.

    Returns x's shape and dtype; under autocast x is cast.  Raises ValueError for shapes and dtypes that break these
    rules and, on a CPU, for positions that the table does not have.
    """
    check(x.dim() >= 3, f"rope: x must be [..., H, E], got {tuple(x.shape)}")
    check_floating("rope", "x", x)
    *leading, H, E = x.shape
    rows = math.prod(leading)
    check(
        cos.dim() == 2 and cos.shape == sin.shape and 2 <= 2 * cos.shape[1] <= E,
        f"rope: cos and sin must be [P, F] with 2 <= 2F <= {E}, got {tuple(cos.shape)} and {tuple(sin.shape)}",
    )
    check(
        cos.dtype == sin.dtype and cos.dtype in (torch.float32, torch.float64),
        f"rope: cos and sin must be both float32 or both float64, got {cos.dtype} and {sin.dtype}",
    )
    if positions is None:
        check(
            rows <= len(cos), f"rope: without positions a table of {len(cos)} rows serves as many rows of x, got {rows}"
        )
    else:
        check(
            list(positions.shape) == leading and positions.dtype == torch.int64,
            f"rope: positions must be {leading} int64, got {list(positions.shape)} {positions.dtype}",
        )
        positions = positions.reshape(-1)
        check_ids("rope: positions", positions, cos.shape[0])
    (x,) = autocast(x)
    rotation = Rotation(cos, sin, positions, interleaved)
    return _Rope.apply(x.reshape(rows, H, E), rotation).view(*leading, H, E)
