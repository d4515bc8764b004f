"""The Triton side of linear: one persistent GEMM with fp32 accumulators, and the epilogues applied to its tiles.

    linear       z = A B + bias,  c = act(z)                         forward, dgrad, wgrad
    dgrad_act    dz = (A B) act'(z),  its column sums,  act(z)       dgrad through the activation before the GEMM

Layouts as in BLAS: "NT" x w', A [M, K] and B [N, K];  "NN" dy w, A [M, K] and B [K, N];  "TN" dy' x, A [K, M] and B
[K, N].  Programs stride over the tiles, in columns of GROUP_M row tiles.  Tiles move by TMA where the GPU has it and
every tensor's rows start at a multiple of 16 bytes, otherwise by pointers, in the same kernel.  The epilogue works on
half a tile at a time, which keeps it in registers.  An activation is taken of z as rounded and stored.  An absent
tensor is None, for which Triton compiles no code.

With ``leaf`` or ``fixed`` (op.py) tiles are of one size, in which an element's products are added in one order whatever
M and N are, and a program holds the whole tree over the leaves that are here.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime import tuning
from ..runtime.device import join, load, swizzle
from ..runtime.errors import check
from ..runtime.launch import describable, has_tma, launch, target
from ..runtime.op import new_vector
from ..runtime.partials import reduce_partials
from ..runtime.triton import TensorDescriptor, tl, triton
from ..runtime.tuning import LaunchConfig, tuned
from .activation import width
from .triton_activation import (
    activate_tile,
    activate_tile_backward,
    activation_bwd_launch,
    activation_fwd_launch,
    column_sum_launch,
    constants,
)

# ---- device functions ----


@triton.jit
def _get(x, row, column, M, N, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """Loads the tile of x [M, N] that starts at (row, column); 0 outside."""
    if TMA:
        return x.load([row, column])
    else:
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        return tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _put(x, value, row, column, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """Stores a tile of x [M, N] and returns it as it was rounded."""
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
def _leaf(
    a, b, row, column, M, N, first, K, stride_a, stride_b,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LAYOUT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of A B over k from ``first`` to K, in fp32."""
    acc = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(first, K, BK):
        if LAYOUT == "TN":
            x = _get(a, k, row, K, M, stride_a, BK, BM, TMA).T
        else:
            x = _get(a, row, k, M, K, stride_a, BM, BK, TMA)
        if LAYOUT == "NT":
            y = _get(b, column, k, N, K, stride_b, BN, BK, TMA).T
        else:
            y = _get(b, k, column, K, N, stride_b, BK, BN, TMA)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def _tree(
    a, b, row, column, M, N, K, leaf, stride_a, stride_b, NODE: tl.constexpr, LEAVES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LAYOUT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of the sum of A B over LEAVES leaves as a binary tree, each node rounded to NODE.

    A leaf is carried up as a bit into a binary number: ``one``, ``two`` .. are nodes of so many leaves that wait for
    their right neighbours.
    """
    x = tl.zeros([BM, BN], NODE)
    one, two, four, eight, sixteen = x, x, x, x, x
    for i in tl.range(0, LEAVES):
        first = i * leaf
        end = tl.minimum(first + leaf, K)
        x = _leaf(a, b, row, column, M, N, first, end, stride_a, stride_b, BM, BN, BK, LAYOUT, TMA).to(NODE)
        if i & 1 == 0:
            one = x
        else:
            x = join(one, x)
            if LEAVES > 2:
                if i & 2 == 0:
                    two = x
                else:
                    x = join(two, x)
                    if LEAVES > 4:
                        if i & 4 == 0:
                            four = x
                        else:
                            x = join(four, x)
                            if LEAVES > 8:
                                if i & 8 == 0:
                                    eight = x
                                else:
                                    x = join(eight, x)
                                    if LEAVES > 16:
                                        if i & 16 == 0:
                                            sixteen = x
                                        else:
                                            x = join(sixteen, x)
    return x.to(tl.float32)


@triton.jit
def _halves(acc):
    """[BM, BN] -> two tiles that stand side by side"""
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _linear_half(
    t, row, column, bias_ptr, z, c, M, N,
    BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if bias_ptr is not None:
        columns = column + tl.arange(0, BN)
        t += load(bias_ptr, columns, columns < N)[None, :]
    if z is not None:
        t = _put(z, t, row, column, M, N, BM, BN, TMA)
    W: tl.constexpr = 2 if GATED else 1
    _put(c, activate_tile(t, ACT, GATED), row, column // W, M, N // W, BM, BN // W, TMA)


@triton.jit
def _dgrad_act_half(
    t, row, column, z, dz, y, partial_ptr, M, N,
    BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = 2 if GATED else 1
    s = _get(z, row, column * W, M, N * W, N * W, BM, BN * W, TMA).to(tl.float32)
    if y is not None:
        _put(y, activate_tile(s, ACT, GATED), row, column, M, N, BM, BN, TMA)
    d = activate_tile_backward(t, s, ACT, GATED)
    _put(dz, d, row, column * W, M, N * W, BM, BN * W, TMA)
    columns = column * W + tl.arange(0, BN * W)
    if partial_ptr is not None:
        tl.store(partial_ptr + (row // BM).to(tl.int64) * (N * W) + columns, tl.sum(d, 0), mask=columns < N * W)


# ---- kernels ----


@triton.jit
def _linear_kernel(
    a, b,  # in, see LAYOUT: descriptors where TMA, else pointers
    bias_ptr,  # [N] in
    z,  # [M, N] out
    c,  # [M, N] out, [M, N / 2] where GATED
    M, N, K, leaf, stride_a, stride_b,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, LEAVES: tl.constexpr,
    LAYOUT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for i in tl.range(0, tl.cdiv(tiles_m * tiles_n - tl.program_id(0), tl.num_programs(0)), flatten=FLATTEN):
        tile_m, tile_n = swizzle(tl.program_id(0) + i * tl.num_programs(0), tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BM, tile_n * BN
        if LEAVES == 1:
            acc = _leaf(a, b, row, column, M, N, 0, K, stride_a, stride_b, BM, BN, BK, LAYOUT, TMA)
        else:
            NODE: tl.constexpr = c.dtype if TMA else c.dtype.element_ty
            acc = _tree(
                a, b, row, column, M, N, K, leaf, stride_a, stride_b, NODE, LEAVES, BM, BN, BK, LAYOUT, TMA
            )  # fmt: skip
        left, right = _halves(acc)
        _linear_half(left, row, column, bias_ptr, z, c, M, N, BM, BN // 2, ACT, GATED, TMA)
        _linear_half(right, row, column + BN // 2, bias_ptr, z, c, M, N, BM, BN // 2, ACT, GATED, TMA)


@triton.jit
def _dgrad_act_kernel(
    a, b,  # [M, K], [K, N] in
    z,  # [M, W N] in, W = 2 where GATED
    dz,  # [M, W N] out
    y,  # [M, N] out
    partial_ptr,  # [row tiles, W N] out, fp32; None: nothing is summed
    M, N, K, stride_a, stride_b,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for i in tl.range(0, tl.cdiv(tiles_m * tiles_n - tl.program_id(0), tl.num_programs(0)), flatten=FLATTEN):
        tile_m, tile_n = swizzle(tl.program_id(0) + i * tl.num_programs(0), tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BM, tile_n * BN
        left, right = _halves(_leaf(a, b, row, column, M, N, 0, K, stride_a, stride_b, BM, BN, BK, "NN", TMA))
        _dgrad_act_half(left, row, column, z, dz, y, partial_ptr, M, N, BM, BN // 2, ACT, GATED, TMA)
        _dgrad_act_half(right, row, column + BN // 2, z, dz, y, partial_ptr, M, N, BM, BN // 2, ACT, GATED, TMA)


# ---- launch parameters, and which path a call takes ----

# FLATTEN loads a tile's operands while the tile before is finished.
TILES = {
    "sm_90": dict(BM=128, BN=256, BK=64, GROUP_M=8, FLATTEN=True, num_warps=8, num_stages=3),
    "sm_80": dict(BM=128, BN=128, BK=32, GROUP_M=8, FLATTEN=False, num_warps=8, num_stages=3),
    "gfx942": dict(BM=128, BN=128, BK=64, GROUP_M=8, FLATTEN=False, num_warps=8, num_stages=2),
    "cpu": dict(BM=16, BN=32, BK=16, GROUP_M=2, FLATTEN=False),  # the interpreter: several tiles of small matrices
    # Any GPU: none has matrix units for fp32.
    "fp32": dict(BM=64, BN=64, BK=32, GROUP_M=8, FLATTEN=False, num_warps=8, num_stages=2),
}
# Over those of one leaf: registers for the nodes of a tree.
TREE = {
    "sm_90": dict(FLATTEN=False, num_warps=16),
    "sm_80": dict(BN=64),
    "gfx942": dict(BN=64),
    "cpu": {},
}


@functools.cache
def _default(op: str, activation: str, arch: str, dtype: torch.dtype) -> LaunchConfig:
    tiles = TILES["fp32"] if dtype == torch.float32 and arch != "cpu" else TILES.get(arch, TILES["sm_80"])
    if op == "linear_dgrad_act":  # as many columns of z: more would spill where the activation is rebuilt too
        tiles = tiles | dict(BN=min(tiles["BN"], 128) // width(activation))
    return dict(path="torch") | tiles


def parameters(op: str, activation: str, arch: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> LaunchConfig:
    """Returns the path of the GEMM C [M, N] = A B over K, shape (M, N, K), and a fused kernel's tiles."""
    return tuned(f"{op} {activation}", arch, dtype, shape, default=_default(op, activation, arch, dtype=dtype))


def path(op: str, activation: str, arch: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> str:
    """Returns the path a call takes: "fused", one GEMM kernel with its epilogue, where that was measured to be faster
    than "torch", which is torch's GEMM (cuBLAS) and one pass over its result.

    ``op`` is one of linear_fwd, linear_dgrad, linear_dgrad_act, linear_wgrad; ``activation`` "none" where there is
    none; ``arch`` as in "sm_90"; ``shape`` (M, N, K) of the GEMM C [M, N] = A B over K.
    """
    return parameters(op, activation, arch, dtype=dtype, shape=shape)["path"]


@functools.cache
def _fixed(op: str, activation: str, arch: str, dtype: torch.dtype, tree: bool) -> LaunchConfig:
    """Returns the launch parameters of every call with leaves, which are summed where ``tree``."""
    config = {name: value for name, value in _default(op, activation, arch, dtype=dtype).items() if name != "path"}
    config["BN"] = min(config["BN"], 128)  # by descriptors what it is by pointers
    return config if not tree or dtype == torch.float32 else config | TREE.get(arch, TREE["sm_80"])


def fused(
    op: str, activation: str, like: Tensor, shape: tuple[int, int, int], leaf: int | None = None
) -> LaunchConfig | None:
    """Returns the fused kernel's launch parameters; None for the other path, which no call with leaves takes."""
    if leaf is not None:
        return _fixed(op, activation, target(like.device).arch, dtype=like.dtype, tree=leaf > 0)
    answers = parameters, tuned, tuning._table
    return _choice(answers, op, activation, target(like.device).arch, dtype=like.dtype, shape=shape)


@functools.lru_cache(maxsize=4096)
def _choice(
    answers: tuple[Any, ...], op: str, activation: str, arch: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> LaunchConfig | None:
    """Returns what ``fused`` does; computed once while ``answers``, the functions that give it, are not replaced."""
    config = parameters(op, activation, arch, dtype=dtype, shape=shape)
    return {name: value for name, value in config.items() if name != "path"} if config["path"] == "fused" else None


# ---- launchers ----


class Product(NamedTuple):
    """C = A B of a fused kernel."""

    layout: str  # "NT", "NN" or "TN"
    a: Tensor
    b: Tensor
    config: LaunchConfig  # tiles and launch options
    leaf: int | None = None

    @property
    def leaves(self) -> int:
        """The number of leaves of the contraction that are here."""
        K = self.a.shape[0] if self.layout == "TN" else self.a.shape[1]
        return max(1, -(-K // self.leaf)) if self.leaf else 1


def _run(kernel: Any, product: Product, tiles: dict[str, Tensor | None], arguments: LaunchConfig) -> None:
    """Starts ``kernel``.

    ``tiles``: the contiguous tensors that the epilogue reads and writes tile by tile, by argument name, with the same
    number of rows as C; ``arguments``: the kernel's others.
    """
    layout, a, b, config, leaf = product
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    (K, M) = a.shape if layout == "TN" else a.shape[::-1]
    N = b.shape[0] if layout == "NT" else b.shape[1]
    BM, BN, BK = (config[k] for k in ("BM", "BN", "BK"))
    blocks = dict(a=(BK, BM) if layout == "TN" else (BM, BK), b=(BN, BK) if layout == "NT" else (BK, BN))
    present = {name: t for name, t in tiles.items() if t is not None}
    blocks |= {name: (BM, BN // 2 * t.shape[1] // max(N, 1)) for name, t in present.items()}
    present |= dict(a=a, b=b)
    tensors: dict[str, Tensor | TensorDescriptor | None] = {**tiles, "a": a, "b": b}
    arch, multiprocessors = target(a.device)
    no_end_in_a_tile = (leaf or 0) % BK == 0
    tma = has_tma(arch) and all(describable(t) for t in present.values()) and no_end_in_a_tile
    if tma:
        tensors |= {name: TensorDescriptor.from_tensor(present[name], list(block)) for name, block in blocks.items()}
    else:  # pointers take registers too
        BN = min(BN, 128)
    grid = (min(-(-M // BM) * -(-N // BN), multiprocessors),)
    sizes = dict(M=M, N=N, K=K, stride_a=a.stride(0), stride_b=b.stride(0))
    launch(kernel, grid, a.device, **tensors, **sizes, **arguments, **config | dict(BN=BN), TMA=tma)


def gemm(
    product: Product, c: Tensor, *, bias: Tensor | None = None, z: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """Fills c with act(A B + bias) and z, where given, with A B + bias; returns c."""
    bias = None if bias is None else bias.contiguous()
    count = product.leaves
    check(count in (1, 2, 4, 8, 16, 32), f"linear: the leaves of a GEMM must be a power of two up to 32, got {count}")
    leaves = dict(leaf=product.leaf if count > 1 else None, LEAVES=count, LAYOUT=product.layout)
    _run(_linear_kernel, product, dict(z=z, c=c), dict(bias_ptr=bias) | leaves | constants(activation))
    return c


def linear_fwd_launch(
    x: Tensor, w: Tensor, b: Tensor | None, activation: str, leaf: int | None = None
) -> tuple[Tensor, Tensor]:
    M, K, N = *x.shape, len(w)
    plain = activation == "none"
    if config := fused("linear_fwd", activation, x, (M, N, K), leaf=leaf):
        z = None if plain else x.new_empty(M, N)
        y = x.new_empty(M, N // width(activation))
        gemm(Product("NT", x, w, config, leaf=leaf), y, bias=b, z=z, activation=activation)
        return y, x.new_empty(0) if z is None else z
    z = F.linear(x, w, None if b is None else b.to(x.dtype))
    return (z, z.new_empty(0)) if plain else (activation_fwd_launch(z, activation), z)


def linear_dgrad_launch(dy: Tensor, w: Tensor, leaf: int | None = None) -> Tensor:
    M, K, N = *dy.shape, w.shape[1]
    config = fused("linear_dgrad", "none", dy, (M, N, K), leaf=leaf)
    return gemm(Product("NN", dy, w, config, leaf=leaf), dy.new_empty(M, N)) if config else dy @ w


def linear_dgrad_act_launch(
    dy: Tensor,
    w: Tensor,
    z: Tensor,
    activation: str,
    rebuild: bool,
    bias: torch.dtype | None,
    fixed: bool = False,
    *places: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dz, y = (*places, None, None)[:2]
    M, K, N = *dy.shape, w.shape[1]
    config = fused("linear_dgrad_act", activation, dy, (M, N, K), leaf=0 if fixed else None)
    if config is None:
        return activation_bwd_launch(dy @ w, z, activation, rebuild=rebuild, bias=bias, dz=dz, y=y)
    z = z.contiguous()
    dz = z.new_empty(z.shape) if dz is None else dz
    y = z.new_empty(M, N) if rebuild and y is None else y
    columns = z.shape[1]
    partial = None if bias is None else z.new_empty(-(-M // config["BM"]), columns, dtype=torch.float32)
    _run(
        _dgrad_act_kernel,
        Product("NN", dy, w, config),
        dict(z=z, dz=dz, y=y),
        dict(partial_ptr=partial) | constants(activation),
    )
    return (
        dz,
        reduce_partials(partial, new_vector(z, columns, bias)),
        y if rebuild and y is not None else z.new_empty(0),
    )


def linear_wgrad_launch(
    dy: Tensor, x: Tensor, dtype: torch.dtype, bias: torch.dtype | None, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """The bias gradient is a pass over dy of its own: in the GEMM it would take the operand through registers."""
    db = new_vector(dy, 0, None) if bias is None else column_sum_launch(dy, bias, fixed=fixed)
    K, M, N = *dy.shape, x.shape[1]
    if config := fused("linear_wgrad", "none", dy, (M, N, K), leaf=0 if fixed else None):
        return gemm(Product("TN", dy, x, config), dy.new_empty(M, N, dtype=dtype)), db
    return (dy.t() @ x).to(dtype), db
