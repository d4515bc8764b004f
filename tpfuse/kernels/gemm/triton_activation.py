"""The Triton side of activations: act(z) in one pass; dz = dy act'(z), the bias gradient's partial sums and, if asked,
act(z) in one more.

A gated activation is act(gate) up of z = (gate, up, gate, up, ..): [M, 2N] -> [M, N].  A second small kernel adds the
partial sums, one row a program: without atomics, so every run gives the same bits.  Offsets are int64, arithmetic is
fp32.  Kernels take an activation's device function (activation.py) as a constexpr.
"""

from typing import Any

import torch
from torch import Tensor

from ..runtime.device import load
from ..runtime.launch import launch, multiprocessors
from ..runtime.op import Cost, least, new_vector
from ..runtime.partials import reduce_partials
from ..runtime.triton import tl, triton
from ..runtime.tuning import LaunchConfig
from .activation import ACTIVATIONS, GATED, identity_tile, width


def constants(activation: str) -> LaunchConfig:
    """Returns the constexprs by which a kernel knows an activation."""
    name = GATED.get(activation, activation)
    return dict(ACT=identity_tile if name == "none" else ACTIVATIONS[name].tile, GATED=activation in GATED)


# ---- device functions ----


@triton.jit
def _pairs(z):
    """[R, 2C], gate and up side by side -> gate, up [R, C]"""
    return tl.split(tl.reshape(z, (z.shape[0], z.shape[1] // 2, 2)))


@triton.jit
def activate_tile(z, ACT: tl.constexpr, GATED: tl.constexpr):
    """z [R, C] -> act(z) [R, C];  GATED: z [R, 2C] -> act(gate) up [R, C]"""
    if GATED:
        gate, up = _pairs(z)
        value, _ = ACT(gate)
        return value * up
    else:
        value, _ = ACT(z)
        return value


@triton.jit
def activate_tile_backward(dy, z, ACT: tl.constexpr, GATED: tl.constexpr):
    """dy [R, C] -> dz of z's shape"""
    if GATED:
        gate, up = _pairs(z)
        d = dy * up
        value, slope = ACT(gate)
        return tl.reshape(tl.join(d * slope, dy * value), z.shape)
    else:
        _, slope = ACT(z)
        return dy * slope


# ---- kernels ----


@triton.jit
def _activation_fwd_kernel(
    z_ptr,  # [W n] in, W = 2 where GATED
    y_ptr,  # [n] out
    n,
    BLOCK: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = 2 if GATED else 1
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets, offsets_z = start + tl.arange(0, BLOCK)[None, :], start * W + tl.arange(0, BLOCK * W)[None, :]
    y = activate_tile(load(z_ptr, offsets_z, offsets_z < tl.cast(n, tl.int64) * W), ACT, GATED)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=offsets < n)


@triton.jit
def _activation_bwd_kernel(
    dy_ptr,  # [M, N] in
    z_ptr,  # [M, W N] in, W = 2 where GATED; None: the columns of dy are summed
    dz_ptr,  # [M, W N] out
    y_ptr,  # [M, N] out
    partial_ptr,  # [P, W N] out, fp32; None: nothing is summed
    M, N,
    ROWS: tl.constexpr, A: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = 2 if GATED else 1
    P = tl.num_programs(0)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    columns_z = tl.program_id(1) * A * W + tl.arange(0, A * W)
    db = tl.zeros([ROWS, A * W], tl.float32)
    for i in range(tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), P)):
        rows = ((tl.program_id(0) + i * P).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        offsets, mask = rows * N + columns[None, :], (rows < M) & (columns < N)[None, :]
        d = load(dy_ptr, offsets, mask)
        if z_ptr is not None:
            offsets_z, mask_z = rows * (N * W) + columns_z[None, :], (rows < M) & (columns_z < N * W)[None, :]
            z = load(z_ptr, offsets_z, mask_z)
            d = activate_tile_backward(d, z, ACT, GATED)
            tl.store(dz_ptr + offsets_z, d.to(dz_ptr.dtype.element_ty), mask=mask_z)
            if y_ptr is not None:
                tl.store(y_ptr + offsets, activate_tile(z, ACT, GATED).to(y_ptr.dtype.element_ty), mask=mask)
        db += d
    if partial_ptr is not None:
        sums_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * (N * W)
        tl.store(sums_ptr + columns_z, tl.sum(db, 0), mask=columns_z < N * W)


# ---- launch parameters ----

FWD = dict(BLOCK=2048, num_warps=4)
BWD = dict(ROWS=8, A=256, num_warps=4)


def partial_rows(dy: Tensor, fixed: bool = False) -> int:
    """Returns P for dy [M, N]: about eight programs a multiprocessor, partials of at most a fortieth of the traffic.

    ``fixed``: P, which is in a sum's order, does not depend on N.
    """
    M, N = dy.shape
    if fixed:
        return max(1, min(256, -(-M // 64)))
    chunks = max(1, -(-N // BWD["A"]))
    return max(1, min(-(-8 * multiprocessors(dy) // chunks), -(-M // 64)))


# ---- launchers ----


def activation_fwd_launch(z: Tensor, activation: str, y: Tensor | None = None) -> Tensor:
    z = z.contiguous()
    y = z.new_empty(z.shape[0], z.shape[1] // width(activation)) if y is None else y
    n = y.numel()
    grid = (-(-n // FWD["BLOCK"]),)
    launch(_activation_fwd_kernel, grid, z.device, z_ptr=z, y_ptr=y, n=n, **constants(activation), **FWD)
    return y


def activation_bwd_launch(
    dy: Tensor,
    z: Tensor,
    activation: str,
    rebuild: bool,
    bias: torch.dtype | None,
    dz: Tensor | None = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dy, z = dy.contiguous(), z.contiguous()
    dz = z.new_empty(z.shape) if dz is None else dz
    y = z.new_empty(dy.shape) if rebuild and y is None else y
    db = _sum_columns(dy, activation, bias, dict(z_ptr=z, dz_ptr=dz, y_ptr=y))
    return dz, db, z.new_empty(0) if y is None else y


def column_sum_launch(x: Tensor, dtype: torch.dtype, fixed: bool = False) -> Tensor:
    """[M, N] -> [N], summed in fp32 and rounded to ``dtype``; ``fixed``: in an order that does not depend on N"""
    return _sum_columns(x.contiguous(), "none", dtype, dict(z_ptr=None, dz_ptr=None, y_ptr=None), fixed=fixed)


def bias_grad_launch(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return column_sum_launch(dy, dtype, fixed=True)


def _sum_columns(
    dy: Tensor, activation: str, dtype: torch.dtype | None, tensors: dict[str, Tensor | None], *, fixed: bool = False
) -> Tensor:
    """Returns the sums of dz over its rows in ``dtype`` (None: no sums, and an empty tensor); dz is dy where
    ``tensors``, the kernel's by name, hold no z."""
    (M, N), P, columns = dy.shape, partial_rows(dy, fixed), dy.shape[1] * width(activation)
    partial = None if dtype is None else dy.new_empty(P, columns, dtype=torch.float32)
    grid = P, -(-N // BWD["A"])
    sizes = dict(M=M, N=N)
    launch(
        _activation_bwd_kernel, grid, dy.device,
        dy_ptr=dy, partial_ptr=partial, **tensors, **sizes, **constants(activation), **BWD,
    )  # fmt: skip
    return reduce_partials(partial, new_vector(dy, columns, dtype))


# ---- costs ----


def with_partials(cost: Cost, rows: int, columns: int) -> Cost:
    """Returns ``cost`` with fp32 partial sums [rows, columns], written once and read once."""
    size = 4 * rows * columns
    return cost._replace(read=cost.read + size, written=cost.written + size)


def activation_bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    dy, z, _, _, bias = args
    return with_partials(least(args, outputs), partial_rows(dy), 0 if bias is None else z.shape[1:].numel())
