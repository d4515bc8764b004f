"""The Triton side of activations: act(z) in one pass; dz = dy act'(z), the bias gradient's partial sums and, if asked, act(z) in one more.

A gated activation is act(gate) up of z = (gate, up, gate, up, ..): [M, 2N] -> [M, N].  The partial sums, one row a program, are added
by a second small kernel: no atomics, the same bits in every run.  Offsets are int64, arithmetic fp32.
"""

import torch
from torch import Tensor

from ._device import activate_tile, activate_tile_backward, load
from ._fused_norm import REDUCE, _reduce_kernel
from ._launch import launch, multiprocessors
from ._op import Cost, least
from ._triton import tl, triton

GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}  # by the activation of their gate


def form(activation: str) -> dict:
    """How kernels are told."""
    return dict(ACTIVATION=GATED.get(activation, activation), GATED=activation in GATED)


def width(activation: str) -> int:
    """Columns of z for one of act(z)."""
    return 2 if activation in GATED else 1


# ---- kernels ----


@triton.jit
def _activation_fwd_kernel(
    z_ptr,  # [W n] in, W = 2 where GATED
    y_ptr,  # [n] out
    n,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = 2 if GATED else 1
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at, at_z = start + tl.arange(0, BLOCK)[None, :], start * W + tl.arange(0, BLOCK * W)[None, :]
    y = activate_tile(load(z_ptr, at_z, at_z < n * W), ACTIVATION, GATED)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _activation_bwd_kernel(
    dy_ptr,  # [M, N] in
    z_ptr,  # [M, W N] in, W = 2 where GATED; None: the columns of dy are summed
    dz_ptr,  # [M, W N] out
    y_ptr,  # [M, N] out
    partial_ptr,  # [P, W N] out, fp32
    M, N,
    ROWS: tl.constexpr, A: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = 2 if GATED else 1
    P = tl.num_programs(0)
    columns = tl.program_id(1) * A + tl.arange(0, A)
    columns_z = tl.program_id(1) * A * W + tl.arange(0, A * W)
    db = tl.zeros([ROWS, A * W], tl.float32)
    for i in range(tl.cdiv(tl.cdiv(M, ROWS) - tl.program_id(0), P)):
        rows = ((tl.program_id(0) + i * P).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        at, mask = rows * N + columns[None, :], (rows < M) & (columns < N)[None, :]
        d = load(dy_ptr, at, mask)
        if z_ptr is not None:
            at_z, mask_z = rows * (N * W) + columns_z[None, :], (rows < M) & (columns_z < N * W)[None, :]
            z = load(z_ptr, at_z, mask_z)
            d = activate_tile_backward(d, z, ACTIVATION, GATED)
            tl.store(dz_ptr + at_z, d.to(dz_ptr.dtype.element_ty), mask=mask_z)
            if y_ptr is not None:
                tl.store(y_ptr + at, activate_tile(z, ACTIVATION, GATED).to(y_ptr.dtype.element_ty), mask=mask)
        db += d
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * (N * W) + columns_z, tl.sum(db, 0), mask=columns_z < N * W)


# ---- launch parameters ----

FWD = dict(BLOCK=2048, num_warps=4)
BWD = dict(ROWS=8, A=256, num_warps=4)


def partial_rows(dy: Tensor) -> int:
    """P for dy [M, N]: about eight programs a multiprocessor, but partials of at most a fortieth of the traffic."""
    M, N = dy.shape
    chunks = max(1, -(-N // BWD["A"]))
    return max(1, min(-(-8 * multiprocessors(dy) // chunks), -(-M // 64)))


# ---- launchers ----


def activation_fwd_launch(z: Tensor, activation: str, y: Tensor | None = None) -> Tensor:
    z = z.contiguous()
    y = z.new_empty(z.shape[0], z.shape[1] // width(activation)) if y is None else y
    launch(_activation_fwd_kernel, (-(-y.numel() // FWD["BLOCK"]),), z.device, z, y, y.numel(), **form(activation), **FWD)
    return y


def activation_bwd_launch(
    dy: Tensor, z: Tensor, activation: str, rebuild: bool, dz: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    dy, z = dy.contiguous(), z.contiguous()
    dz = z.new_empty(z.shape) if dz is None else dz
    y = z.new_empty(dy.shape) if rebuild and y is None else y
    db = _sum_columns(dy, z, dz, y, activation)
    return dz, db, z.new_empty(0) if y is None else y


def column_sum_launch(x: Tensor) -> Tensor:
    """[M, N] -> [N] in fp32"""
    return _sum_columns(x.contiguous(), None, None, None, "none")


def _sum_columns(dy: Tensor, z: Tensor | None, dz: Tensor | None, y: Tensor | None, activation: str) -> Tensor:
    M, N = dy.shape
    partial = dy.new_empty(partial_rows(dy), N * width(activation), dtype=torch.float32)
    grid = len(partial), -(-N // BWD["A"])
    launch(_activation_bwd_kernel, grid, dy.device, dy, z, dz, y, partial, M, N, **form(activation), **BWD)
    return reduce_partials(partial)


def reduce_partials(partial: Tensor) -> Tensor:
    """[P, N] fp32 -> [N], always in the same order."""
    P, N = partial.shape
    total = partial.new_empty(N)
    launch(_reduce_kernel, (-(-N // REDUCE["A"]), 1), partial.device, partial, total, P, N, **REDUCE)
    return total


# ---- costs ----


def with_partials(cost: Cost, rows: int, columns: int, flops: int = 0) -> Cost:
    """``cost`` and fp32 partial sums [rows, columns], written and read again."""
    return Cost(cost.read + 4 * rows * columns, cost.written + 4 * rows * columns, cost.flops + flops)


def activation_bwd_cost(args: tuple, outputs: tuple) -> Cost:
    return with_partials(least(args, outputs), partial_rows(args[0]), args[1].shape[1])
