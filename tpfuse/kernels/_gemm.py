"""The Triton side of linear: one persistent GEMM with fp32 accumulators, and what happens to a tile before it is stored.

    linear       z = A B + bias + add,  c = act(z)          forward; dgrad plus a residual's gradient; wgrad into a buffer
    dgrad_act    dz = (A B) act'(z),  its sums over the rows of a tile,  act(z) again          through the activation before a GEMM

Layouts as in BLAS: "NT" x w', A [M, K] and B [N, K];  "NN" dy w, A [M, K] and B [K, N];  "TN" dy' x, A [K, M] and B [K, N].  Programs
stride over the tiles, in columns of GROUP_M row tiles.  Tiles move by TMA where there is one and every tensor's rows start at a
multiple of 16 bytes, else by pointers: the same kernel.  The epilogue works on half a tile at a time, which keeps it in registers.
An activation is taken of z as rounded and stored.  An absent tensor is None, for which Triton compiles no code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._activation import (
    activation_bwd_launch,
    activation_fwd_launch,
    column_sum_launch,
    form,
    partial_rows,
    reduce_partials,
    width,
    with_partials,
)
from ._device import activate_tile, activate_tile_backward, load, swizzle
from ._launch import launch, target
from ._op import Cost, check, least, moved
from ._triton import TensorDescriptor, tl, triton
from ._tuning import tuned

# ---- device functions ----


@triton.jit
def _get(x, row, column, M, N, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """The tile of x [M, N] that starts there; 0 outside."""
    if TMA:
        return x.load([row, column])
    else:
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        return tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _put(x, value, row, column, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """Stores a tile of x [M, N]; returns it as it was rounded."""
    if TMA:
        value = value.to(x.dtype)
        x.store([row, column], value)
    else:
        value = value.to(x.dtype.element_ty)
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        tl.store(x + rows.to(tl.int64)[:, None] * N + columns[None, :], value, mask=mask)
    return value.to(tl.float32)


@triton.jit
def _product(
    a, b, row, column, M, N, K, stride_a, stride_b,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LAYOUT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of A B in two halves, side by side."""
    acc = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK):
        if LAYOUT == "TN":
            x = _get(a, k, row, K, M, stride_a, BK, BM, TMA).T
        else:
            x = _get(a, row, k, M, K, stride_a, BM, BK, TMA)
        if LAYOUT == "NT":
            y = _get(b, column, k, N, K, stride_b, BN, BK, TMA).T
        else:
            y = _get(b, k, column, K, N, stride_b, BK, BN, TMA)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _linear_half(
    t, row, column, bias_ptr, add, z, c, M, N,
    BM: tl.constexpr, BN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if bias_ptr is not None:
        columns = column + tl.arange(0, BN)
        t += load(bias_ptr, columns, columns < N)[None, :]
    if add is not None:
        t += _get(add, row, column, M, N, N, BM, BN, TMA).to(tl.float32)
    if z is not None:
        t = _put(z, t, row, column, M, N, BM, BN, TMA)
    W: tl.constexpr = 2 if GATED else 1
    _put(c, activate_tile(t, ACTIVATION, GATED), row, column // W, M, N // W, BM, BN // W, TMA)


@triton.jit
def _dgrad_act_half(
    t, row, column, z, dz, y, partial_ptr, M, N,
    BM: tl.constexpr, BN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = 2 if GATED else 1
    s = _get(z, row, column * W, M, N * W, N * W, BM, BN * W, TMA).to(tl.float32)
    if y is not None:
        _put(y, activate_tile(s, ACTIVATION, GATED), row, column, M, N, BM, BN, TMA)
    d = activate_tile_backward(t, s, ACTIVATION, GATED)
    _put(dz, d, row, column * W, M, N * W, BM, BN * W, TMA)
    columns = column * W + tl.arange(0, BN * W)
    tl.store(partial_ptr + (row // BM).to(tl.int64) * (N * W) + columns, tl.sum(d, 0), mask=columns < N * W)


# ---- kernels ----


@triton.jit
def _linear_kernel(
    a, b,  # in, see LAYOUT: descriptors where TMA, else pointers
    bias_ptr,  # [N] in
    add,  # [M, N] in; may be c
    z,  # [M, N] out
    c,  # [M, N] out, [M, N / 2] where GATED
    M, N, K, stride_a, stride_b,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    LAYOUT: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for i in tl.range(0, tl.cdiv(tiles_m * tiles_n - tl.program_id(0), tl.num_programs(0)), flatten=FLATTEN):
        tile_m, tile_n = swizzle(tl.program_id(0) + i * tl.num_programs(0), tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BM, tile_n * BN
        left, right = _product(a, b, row, column, M, N, K, stride_a, stride_b, BM, BN, BK, LAYOUT, TMA)
        _linear_half(left, row, column, bias_ptr, add, z, c, M, N, BM, BN // 2, ACTIVATION, GATED, TMA)
        _linear_half(right, row, column + BN // 2, bias_ptr, add, z, c, M, N, BM, BN // 2, ACTIVATION, GATED, TMA)


@triton.jit
def _dgrad_act_kernel(
    a, b,  # [M, K], [K, N] in
    z,  # [M, W N] in, W = 2 where GATED
    dz,  # [M, W N] out
    y,  # [M, N] out
    partial_ptr,  # [row tiles, W N] out, fp32
    M, N, K, stride_a, stride_b,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for i in tl.range(0, tl.cdiv(tiles_m * tiles_n - tl.program_id(0), tl.num_programs(0)), flatten=FLATTEN):
        tile_m, tile_n = swizzle(tl.program_id(0) + i * tl.num_programs(0), tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BM, tile_n * BN
        left, right = _product(a, b, row, column, M, N, K, stride_a, stride_b, BM, BN, BK, "NN", TMA)
        _dgrad_act_half(left, row, column, z, dz, y, partial_ptr, M, N, BM, BN // 2, ACTIVATION, GATED, TMA)
        _dgrad_act_half(right, row, column + BN // 2, z, dz, y, partial_ptr, M, N, BM, BN // 2, ACTIVATION, GATED, TMA)


# ---- launch parameters, and which path a call takes ----

# FLATTEN loads a tile's operands while the one before is finished; with ``add`` there is no room for that on sm_90.
TILES = {
    "sm_90": dict(BM=128, BN=256, BK=64, GROUP_M=8, FLATTEN=True, num_warps=8, num_stages=3),
    "sm_80": dict(BM=128, BN=128, BK=32, GROUP_M=8, FLATTEN=False, num_warps=8, num_stages=3),
    "gfx942": dict(BM=128, BN=128, BK=64, GROUP_M=8, FLATTEN=False, num_warps=8, num_stages=2),
    "cpu": dict(BM=16, BN=32, BK=16, GROUP_M=2, FLATTEN=False),  # the interpreter: several tiles of small matrices
    "fp32": dict(BM=64, BN=64, BK=32, GROUP_M=8, FLATTEN=False, num_warps=8, num_stages=2),  # any GPU: there are no matrix units for it
}


def parameters(op: str, activation: str, arch: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> dict:
    """Of the GEMM C [M, N] = A B over K, shape (M, N, K): its path, and a fused kernel's tiles."""
    tiles = TILES["fp32"] if dtype == torch.float32 and arch != "cpu" else TILES.get(arch, TILES["sm_80"])
    if op == "linear_dgrad_act":  # as many columns of z: more would spill where the activation is rebuilt too
        tiles = tiles | dict(BN=min(tiles["BN"], 128) // width(activation))
    if op.endswith("_add"):
        tiles = tiles | dict(FLATTEN=False)
    return tuned(f"{op} {activation}", arch, dtype, shape, dict(path="torch") | tiles)


def path(op: str, activation: str, arch: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> str:
    """What a call takes: "fused", one GEMM kernel with its epilogue, where that was measured to be faster than "torch", torch's GEMM
    (cuBLAS) and one pass over its result.

    ``op`` is one of linear_fwd, linear_dgrad, linear_dgrad_act, linear_wgrad; ``activation`` "none" where there is none; ``arch`` as in
    "sm_90"; ``shape`` (M, N, K) of the GEMM C [M, N] = A B over K.
    """
    return parameters(op, activation, arch, dtype, shape)["path"]


def _fused(op: str, activation: str, like: Tensor, *shape: int) -> dict | None:
    """The fused kernel's launch parameters; None for the other path."""
    config = parameters(op, activation, target(like.device).arch, like.dtype, shape)
    return _without_path(config) if config["path"] == "fused" else None


def _without_path(config: dict) -> dict:
    return {name: value for name, value in config.items() if name != "path"}


# ---- launchers ----


def _tma(arch: str) -> bool:
    return arch == "cpu" or (arch.startswith("sm_") and int(arch[3:]) >= 90)


def _describable(x: Tensor) -> bool:
    """What a descriptor asks of x [M, N]: the copy engine counts in 16 bytes."""
    return (
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
        and x.stride(0) * x.element_size() % 16 == 0
    )


def _run(kernel, layout: str, a: Tensor, b: Tensor, tiles: dict[str, Tensor | None], config: dict, **others) -> None:
    """``tiles``: what the epilogue reads and writes beside C's tiles, contiguous, by argument name; with the same number of rows as C."""
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    (K, M) = a.shape if layout == "TN" else a.shape[::-1]
    N = b.shape[0] if layout == "NT" else b.shape[1]
    BM, BN, BK = (config[k] for k in ("BM", "BN", "BK"))
    blocks = dict(a=(BK, BM) if layout == "TN" else (BM, BK), b=(BN, BK) if layout == "NT" else (BK, BN))
    blocks |= {name: (BM, BN // 2 * t.shape[1] // max(N, 1)) for name, t in tiles.items() if t is not None}
    tensors = dict(a=a, b=b, **tiles)
    arch, multiprocessors = target(a.device)
    tma = _tma(arch) and all(_describable(tensors[name]) for name in blocks)
    if tma:
        tensors |= {name: TensorDescriptor.from_tensor(tensors[name], list(block)) for name, block in blocks.items()}
    else:  # pointers take registers too
        BN = min(BN, 128)
    grid = (min(-(-M // BM) * -(-N // BN), multiprocessors),)
    sizes = dict(M=M, N=N, K=K, stride_a=a.stride(0), stride_b=b.stride(0))
    launch(kernel, grid, a.device, **tensors, **sizes, **others, **config | dict(BN=BN), TMA=tma)


def gemm(layout: str, a: Tensor, b: Tensor, config: dict, c: Tensor, *, bias=None, add=None, z=None, activation: str = "none") -> Tensor:
    """Fills c with act(A B + bias + add), and z, if given, with what the activation is taken of.  c may be ``add``."""
    add, bias = (None if t is None else t.contiguous() for t in (add, bias))
    _run(_linear_kernel, layout, a, b, dict(add=add, z=z, c=c), config, bias_ptr=bias, LAYOUT=layout, **form(activation))
    return c


def linear_fwd_launch(x: Tensor, w: Tensor, b: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    M, K, N = *x.shape, len(w)
    plain = activation == "none"
    if config := _fused("linear_fwd", activation, x, M, N, K):
        z = None if plain else x.new_empty(M, N)
        y = gemm("NT", x, w, config, x.new_empty(M, N // width(activation)), bias=b, z=z, activation=activation)
        return y, x.new_empty(0) if z is None else z
    z = F.linear(x, w, None if b is None else b.to(x.dtype))
    return (z, z.new_empty(0)) if plain else (activation_fwd_launch(z, activation), z)


def linear_dgrad_launch(dy: Tensor, w: Tensor) -> Tensor:
    M, K, N = *dy.shape, w.shape[1]
    config = _fused("linear_dgrad", "none", dy, M, N, K)
    return gemm("NN", dy, w, config, dy.new_empty(M, N)) if config else dy @ w


def linear_dgrad_act_launch(
    dy: Tensor, w: Tensor, z: Tensor, activation: str, rebuild: bool, dz: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    M, K, N = *dy.shape, w.shape[1]
    config = _fused("linear_dgrad_act", activation, dy, M, N, K)
    if config is None:
        return activation_bwd_launch(dy @ w, z, activation, rebuild, dz, y)
    z = z.contiguous()
    dz = z.new_empty(z.shape) if dz is None else dz
    tiles = dict(z=z, dz=dz, y=z.new_empty(M, N) if rebuild and y is None else y)
    partial = z.new_empty(-(-M // config["BM"]), z.shape[1], dtype=torch.float32)
    _run(_dgrad_act_kernel, "NN", dy, w, tiles, config, partial_ptr=partial, **form(activation))
    return dz, reduce_partials(partial), tiles["y"] if rebuild else z.new_empty(0)


def linear_wgrad_launch(dy: Tensor, x: Tensor, dtype: torch.dtype, has_bias: bool) -> tuple[Tensor, Tensor]:
    """The bias gradient is a pass more over dy: as part of the GEMM it would take the operand's tiles through registers."""
    db = column_sum_launch(dy) if has_bias else dy.new_empty(0, dtype=torch.float32)
    K, M, N = *dy.shape, x.shape[1]
    config = _fused("linear_wgrad", "none", dy, M, N, K)
    return gemm("TN", dy, x, config, dy.new_empty(M, N, dtype=dtype)) if config else (dy.t() @ x).to(dtype), db


def linear_dgrad_add(dy: Tensor, w: Tensor, add: Tensor) -> Tensor:
    """dy W + add, the sum in fp32: a residual's gradient joins where it would cost a pass."""
    return _add("linear_dgrad_add", "NN", dy, w, (len(dy), w.shape[1], len(w)), add, torch.empty_like(add))


def linear_wgrad_add(dy: Tensor, x: Tensor, dw: Tensor) -> Tensor:
    """dw [N, K] += dy' x in place, dw contiguous and in fp32: gradients of micro-batches add up without being rounded."""
    check(
        dw.is_contiguous() and dw.dtype == torch.float32, f"linear_wgrad_add: dw must be contiguous and fp32, got {dw.dtype} {dw.stride()}"
    )
    return _add("linear_wgrad_add", "TN", dy, x, (*dw.shape, len(x)), dw, dw)


def _add(op: str, layout: str, a: Tensor, b: Tensor, shape: tuple[int, int, int], add: Tensor, c: Tensor) -> Tensor:
    config = parameters(op, "none", target(a.device).arch, a.dtype, shape)
    return gemm(layout, a, b, _without_path(config), c, add=add)


# ---- costs ----


def linear_fwd_cost(args: tuple, outputs: tuple) -> Cost:
    (x, w, _, activation), (_, z) = args, outputs
    cost = least(args, outputs)._replace(flops=2 * x.numel() * len(w))
    if _fused("linear_fwd", activation, x, len(x), *w.shape):
        return cost
    return cost._replace(read=cost.read + moved(z))


def linear_dgrad_cost(args: tuple, outputs: tuple) -> Cost:
    dy, w = args
    return least(args, outputs)._replace(flops=2 * dy.numel() * w.shape[1])


def linear_dgrad_act_cost(args: tuple, outputs: tuple) -> Cost:
    dy, w, z, activation, _ = args
    M, K, N = *dy.shape, w.shape[1]
    cost = least(args, outputs)._replace(flops=2 * M * K * N)
    if config := _fused("linear_dgrad_act", activation, dy, M, N, K):
        return with_partials(cost, -(-M // config["BM"]), z.shape[1])
    da = dy.new_empty(1, 1).expand(M, N)
    between = da.element_size() * M * N
    return with_partials(cost._replace(read=cost.read + between, written=cost.written + between), partial_rows(da), z.shape[1])


def linear_wgrad_cost(args: tuple, outputs: tuple) -> Cost:
    dy, x, _, has_bias = args
    cost = least(args, outputs)._replace(flops=2 * dy.numel() * x.shape[1])
    return with_partials(cost._replace(read=cost.read + moved(dy)), partial_rows(dy), dy.shape[1]) if has_bias else cost
