"""The Triton side of experts' GEMMs: tiles of rows of one expert, found on the device.

    up       z = x[index] W1_e', a = act(gate) up       rows by index; z and a sorted
    down     y[place] = g (a W2_e')                      each row to its place: unsummed parts [k, m, D] themselves
    dact     da = dy[index] W2_e;  dz = g da act'(z), g a, and dg = sum da a by partial sums over tiles of columns
    dx       dx[place] = dz W1_e
    wgrad    dW_e = dy_e' x_e: a program owns a tile of one expert and adds its rows in order; no atomics

Expert e has ceil(n_e / BM) tiles of rows.  A program finds its tile's expert from ``offsets``, so the host need not
know how many rows an expert has: it starts ceil(n / BM) + E - 1 tiles, the most that there can be, and those beyond do
nothing.  Sizes of tiles are a function of dtype and widths, not of the rows: a row has the same bits whatever is beside
it, and so does an expert's dW, on however many ranks experts are.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..gemm.activation import width
from ..gemm.triton_activation import activate_tile, activate_tile_backward, constants
from ..gemm.triton_gemm import _halves
from ..runtime.device import swizzle
from ..runtime.launch import launch, next_power_of_2, target
from ..runtime.op import dense
from ..runtime.partials import reduce_partials
from ..runtime.triton import tl, triton
from ..runtime.tuning import LaunchConfig
from .records import ExpertRows, Sides

# ---- device functions ----


@triton.jit
def _tile_rows(tile, offsets_ptr, E, BM: tl.constexpr, EXPERTS: tl.constexpr):
    """Row tile number -> its expert, E where there is none; the places of its first row and of its expert's end."""
    e = tl.arange(0, EXPERTS)
    begin = tl.load(offsets_ptr + e, mask=e < E, other=0).to(tl.int32)
    end = tl.load(offsets_ptr + 1 + e, mask=e < E, other=0).to(tl.int32)
    tiles = tl.cdiv(end - begin, BM)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    is_it = e == expert
    row = tl.sum(tl.where(is_it, begin + (tile - upto + tiles) * BM, 0), 0)
    return tl.minimum(expert, E), row, tl.sum(tl.where(is_it, end, 0), 0)


@triton.jit
def _product(
    x_ptr, rows, live, w_ptr, columns, N, K, NT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Returns the tile x[rows] W', or where not NT x[rows] W, [BM, BN] in fp32: x [.., K], W [N, K], else [K, N]."""
    acc = tl.zeros([BM, BN], tl.float32)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
    within = (columns < N)[None, :]
    for k in tl.range(0, K, BK):
        inner = k + tl.arange(0, BK)
        x = tl.load(x_rows + inner[None, :], mask=live[:, None] & (inner < K)[None, :], other=0.0)
        if NT:
            places = columns.to(tl.int64)[None, :] * K + inner[:, None]
        else:
            places = inner.to(tl.int64)[:, None] * N + columns[None, :]
        w = tl.load(w_ptr + places, mask=within & (inner < K)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def _dact_half(
    da, i, live, column, g, z_ptr, dz_ptr, ga_ptr, F, BN: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Stores dz and g a of BN columns from ``column`` on, rows i of a tile at whose start pointers point; returns their
    share of dg [BM]."""
    W: tl.constexpr = 2 if GATED else 1
    rows = i.to(tl.int64)[:, None]
    columns, columns_z = column + tl.arange(0, BN)[None, :], column * W + tl.arange(0, BN * W)[None, :]
    mask, mask_z = live[:, None] & (columns < F), live[:, None] & (columns_z < F * W)
    offsets, offsets_z = rows * F + columns, rows * (F * W) + columns_z
    z = tl.load(z_ptr + offsets_z, mask=mask_z, other=0.0).to(tl.float32)
    a = activate_tile(z, ACT, GATED).to(ga_ptr.dtype.element_ty).to(tl.float32)  # as forward rounded it
    tl.store(ga_ptr + offsets, (g[:, None] * a).to(ga_ptr.dtype.element_ty), mask=mask)
    dz = activate_tile_backward(g[:, None] * da, z, ACT, GATED)
    tl.store(dz_ptr + offsets_z, dz.to(dz_ptr.dtype.element_ty), mask=mask_z)
    return tl.sum(da * a, 1)


# ---- kernels ----


@triton.jit
def _up_kernel(
    x_ptr,  # [.., D] in
    index_ptr,  # [n] in: the row of x at each place; None: x is sorted
    offsets_ptr,  # [E + 1] in
    w_ptr,  # [E, W F, D] in, W = 2 where GATED
    z_ptr,  # [n, W F] out
    a_ptr,  # [n, F] out
    E, tiles_m, N, D,  # N = W F
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, EXPERTS: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tl.cdiv(N, BN), GROUP_M)
    expert, row, end = _tile_rows(tile_m, offsets_ptr, E, BM, EXPERTS)
    if expert < E:
        i = tl.arange(0, BM)
        live = row + i < end
        rows = row + i
        if index_ptr is not None:
            rows = tl.load(index_ptr + row + i, mask=live, other=0)
        columns = tile_n * BN + tl.arange(0, BN)
        w_ptr += expert.to(tl.int64) * N * D
        z = _product(x_ptr, rows, live, w_ptr, columns, N, D, True, BM, BN, BK).to(z_ptr.dtype.element_ty)
        z_ptr += row.to(tl.int64) * N
        tl.store(z_ptr + i.to(tl.int64)[:, None] * N + columns[None, :], z, mask=live[:, None] & (columns < N)[None, :])
        W: tl.constexpr = 2 if GATED else 1
        F = N // W
        a = activate_tile(z.to(tl.float32), ACT, GATED).to(a_ptr.dtype.element_ty)
        columns = tile_n * (BN // W) + tl.arange(0, BN // W)
        a_ptr += row.to(tl.int64) * F
        tl.store(a_ptr + i.to(tl.int64)[:, None] * F + columns[None, :], a, mask=live[:, None] & (columns < F)[None, :])


@triton.jit
def _down_kernel(
    x_ptr,  # [n, K] in, sorted
    place_ptr,  # [n] in: the row of y for each place; None: y is sorted
    offsets_ptr,  # [E + 1] in
    w_ptr,  # [E, N, K] in, or where not NT [E, K, N]
    weights_ptr,  # [n] in, of rows; None: 1
    y_ptr,  # [.., N] out
    E, tiles_m, N, K,
    NT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tl.cdiv(N, BN), GROUP_M)
    expert, row, end = _tile_rows(tile_m, offsets_ptr, E, BM, EXPERTS)
    if expert < E:
        rows = row + tl.arange(0, BM)
        live = rows < end
        columns = tile_n * BN + tl.arange(0, BN)
        y = _product(x_ptr, rows, live, w_ptr + expert.to(tl.int64) * N * K, columns, N, K, NT, BM, BN, BK)
        if weights_ptr is not None:
            y *= tl.load(weights_ptr + rows, mask=live, other=0.0).to(tl.float32)[:, None]
        places = rows.to(tl.int64)
        if place_ptr is not None:
            places = tl.load(place_ptr + rows, mask=live, other=0).to(tl.int64)
        mask = live[:, None] & (columns < N)[None, :]
        tl.store(y_ptr + places[:, None] * N + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dact_kernel(
    dy_ptr,  # [.., D] in
    index_ptr,  # [n] in: the row of dy at each place; None: dy is sorted
    offsets_ptr,  # [E + 1] in
    w_ptr,  # [E, D, F] in
    z_ptr,  # [n, W F] in, W = 2 where GATED
    weights_ptr,  # [n] in, of rows
    dz_ptr,  # [n, W F] out
    ga_ptr,  # [n, F] out
    partial_ptr,  # [column tiles, n] out, fp32: of dg
    E, tiles_m, n, F, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, EXPERTS: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tl.cdiv(F, BN), GROUP_M)
    expert, row, end = _tile_rows(tile_m, offsets_ptr, E, BM, EXPERTS)
    if expert < E:
        i = tl.arange(0, BM)
        live = row + i < end
        rows = row + i
        if index_ptr is not None:
            rows = tl.load(index_ptr + row + i, mask=live, other=0)
        columns = tile_n * BN + tl.arange(0, BN)
        da = _product(dy_ptr, rows, live, w_ptr + expert.to(tl.int64) * D * F, columns, F, D, False, BM, BN, BK)
        g = tl.load(weights_ptr + row + i, mask=live, other=0.0).to(tl.float32)
        start = row.to(tl.int64)
        W: tl.constexpr = 2 if GATED else 1
        z_ptr += start * (F * W)
        dz_ptr += start * (F * W)
        ga_ptr += start * F
        left, right = _halves(da)
        column = tile_n * BN
        dg = _dact_half(left, i, live, column, g, z_ptr, dz_ptr, ga_ptr, F, BN // 2, ACT, GATED)
        dg += _dact_half(right, i, live, column + BN // 2, g, z_ptr, dz_ptr, ga_ptr, F, BN // 2, ACT, GATED)
        tl.store(partial_ptr + tile_n.to(tl.int64) * n + row + i, dg, mask=live)


@triton.jit
def _wgrad_kernel(
    dy_ptr,  # [.., N] in
    dy_index_ptr,  # [n] in; None: dy is sorted
    x_ptr,  # [.., K] in
    x_index_ptr,  # [n] in; None: x is sorted
    offsets_ptr,  # [E + 1] in
    dw_ptr,  # [E, N, K] out, or where ADD in and out
    N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    tiles_n, tiles_k = tl.cdiv(N, BN), tl.cdiv(K, BK)
    expert, tile = tl.program_id(0) // (tiles_n * tiles_k), tl.program_id(0) % (tiles_n * tiles_k)
    columns_n = (tile // tiles_k) * BN + tl.arange(0, BN)
    columns_k = (tile % tiles_k) * BK + tl.arange(0, BK)
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros([BN, BK], tl.float32)
    for row in tl.range(begin, end, BM):
        rows = row + tl.arange(0, BM)
        live = rows < end
        left, right = rows.to(tl.int64), rows.to(tl.int64)
        if dy_index_ptr is not None:
            left = tl.load(dy_index_ptr + rows, mask=live, other=0).to(tl.int64)
        if x_index_ptr is not None:
            right = tl.load(x_index_ptr + rows, mask=live, other=0).to(tl.int64)
        dy_mask, x_mask = live[None, :] & (columns_n < N)[:, None], live[:, None] & (columns_k < K)[None, :]
        dy = tl.load(dy_ptr + left[None, :] * N + columns_n[:, None], mask=dy_mask, other=0.0)
        x = tl.load(x_ptr + right[:, None] * K + columns_k[None, :], mask=x_mask, other=0.0)
        acc = tl.dot(dy, x, acc, input_precision="ieee")
    dw_ptr += expert.to(tl.int64) * N * K
    places = dw_ptr + columns_n.to(tl.int64)[:, None] * K + columns_k[None, :]
    mask = (columns_n < N)[:, None] & (columns_k < K)[None, :]
    if ADD:
        acc += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, acc.to(dw_ptr.dtype.element_ty), mask=mask)


# ---- launch parameters: a function of the dtype and of widths, which all ranks share ----

TILES = {
    "sm_90": dict(BM=128, BN=128, BK=64, GROUP_M=8, num_warps=8, num_stages=3),
    "sm_80": dict(BM=128, BN=128, BK=32, GROUP_M=8, num_warps=8, num_stages=3),
    "gfx942": dict(BM=128, BN=128, BK=64, GROUP_M=8, num_warps=8, num_stages=2),
    "cpu": dict(BM=16, BN=32, BK=16, GROUP_M=2),  # the interpreter: several tiles of small matrices
    # Any GPU: none has matrix units for fp32.
    "fp32": dict(BM=64, BN=64, BK=16, GROUP_M=8, num_warps=8, num_stages=2),
}
LOAD = 16  # bytes, that a thread loads at once where rows start at multiples of it


def _tiles(x: Tensor, widths: tuple[int, ...]) -> LaunchConfig:
    """Returns the tiles of a GEMM between tensors like x with rows of these widths: smaller ones where numbers are
    loaded one by one, which takes registers."""
    arch = target(x.device).arch
    tiles = TILES["fp32"] if x.dtype == torch.float32 and arch != "cpu" else TILES.get(arch, TILES["sm_80"])
    aligned = all(columns * x.element_size() % LOAD == 0 for columns in widths)
    return tiles if aligned or arch == "cpu" else tiles | dict(BN=64, BK=32, num_stages=2)


def dact_tiles(dy: Tensor, w2: Tensor, activation: str) -> LaunchConfig:
    """Returns the tiles of dact, whose columns are pairs in z where it is gated."""
    tiles = _tiles(dy, w2.shape[1:])
    return tiles | dict(BN=tiles["BN"] // width(activation))


def _wgrad_tiles(dy: Tensor, x: Tensor) -> LaunchConfig:
    """Returns a wgrad's tiles: BN columns of dy by BK of x, BM rows a step."""
    tiles = _tiles(x, (dy.shape[1], x.shape[1]))
    return {name: value for name, value in tiles.items() if name != "GROUP_M"} | dict(BM=tiles["BK"], BK=tiles["BN"])


# ---- launchers ----


class _Grid(NamedTuple):
    """The tiles of a launch: of rows, and with those of columns all."""

    tiles_m: int
    programs: int

    @classmethod
    def of(cls, n: int, experts: int, columns: int, tiles: LaunchConfig) -> "_Grid":
        tiles_m = -(-n // tiles["BM"]) + experts - 1 if n else 0
        return cls(tiles_m, tiles_m * -(-columns // tiles["BN"]))


def experts_up_launch(x: Tensor, rows: ExpertRows, w1: Tensor, activation: str, tile: int = 0) -> tuple[Tensor, Tensor]:
    """Runs the kernel, whose tiles have one size whatever ``tile`` is."""
    x, w1, (index, offsets) = x.contiguous(), w1.contiguous(), dense(rows)
    n, (E, N, D), tiles = _count(x, index), w1.shape, _tiles(x, w1.shape[1:])
    z, a = x.new_empty(n, N), x.new_empty(n, N // width(activation))
    tiles_m, programs = _Grid.of(n, E, columns=N, tiles=tiles)
    launch(
        _up_kernel, (programs,), x.device,
        x_ptr=x, index_ptr=index, offsets_ptr=offsets, w_ptr=w1, z_ptr=z, a_ptr=a, E=E, tiles_m=tiles_m, N=N, D=D,
        EXPERTS=next_power_of_2(E), **constants(activation), **tiles,
    )  # fmt: skip
    return z, a


def _down(x: Tensor, rows: ExpertRows, w: Tensor, weights: Tensor | None, y: Tensor, nt: bool) -> Tensor:
    """Fills rows of y with those of x [n, K] times W', or where not ``nt`` times W."""
    x, w, (place, offsets) = x.contiguous(), w.contiguous(), dense(rows)
    weights = None if weights is None else weights.contiguous()
    (n, K), E, N, tiles = x.shape, len(w), y.shape[1], _tiles(x, w.shape[1:])
    tiles_m, programs = _Grid.of(n, E, columns=N, tiles=tiles)
    launch(
        _down_kernel, (programs,), x.device,
        x_ptr=x, place_ptr=place, offsets_ptr=offsets, w_ptr=w, weights_ptr=weights, y_ptr=y,
        E=E, tiles_m=tiles_m, N=N, K=K, NT=nt, EXPERTS=next_power_of_2(E), **tiles,
    )  # fmt: skip
    return y


def _with_room(x: Tensor, D: int, count: int, room: int) -> Tensor:
    """Returns [count + room, D] for as many rows as ``x`` has among the first ``count``: 0 where none will stand."""
    y = x.new_empty(count + room, D)
    y[count if len(x) == count else 0 :].zero_()
    return y


def experts_down_launch(
    a: Tensor, rows: ExpertRows, w2: Tensor, weights: Tensor | None, count: int, tile: int = 0, room: int = 0
) -> Tensor:
    """Runs the kernel, whose tiles have one size whatever ``tile`` is."""
    return _down(a, rows, w2, weights, y=_with_room(a, w2.shape[1], count, room=room), nt=True)


def experts_dx_launch(dz: Tensor, rows: ExpertRows, w1: Tensor, count: int, room: int) -> Tensor:
    return _down(dz, rows, w1, None, y=_with_room(dz, w1.shape[2], count, room=room), nt=False)


def experts_dact_launch(
    dy: Tensor, rows: ExpertRows, w2: Tensor, z: Tensor, weights: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    dy, w2, z, weights, (index, offsets) = (*(t.contiguous() for t in (dy, w2, z, weights)), dense(rows))
    n, (E, D, F), tiles = len(z), w2.shape, dact_tiles(dy, w2, activation)
    dz, ga, dg = z.new_empty(z.shape), z.new_empty(n, F), z.new_empty(n, dtype=torch.float32)
    partial = z.new_empty(-(-F // tiles["BN"]), n, dtype=torch.float32)
    tiles_m, programs = _Grid.of(n, E, columns=F, tiles=tiles)
    launch(
        _dact_kernel, (programs,), dy.device,
        dy_ptr=dy, index_ptr=index, offsets_ptr=offsets, w_ptr=w2, z_ptr=z, weights_ptr=weights, dz_ptr=dz, ga_ptr=ga,
        partial_ptr=partial, E=E, tiles_m=tiles_m, n=n, F=F, D=D, EXPERTS=next_power_of_2(E),
        **constants(activation), **tiles,
    )  # fmt: skip
    return dz, ga, reduce_partials(partial, dg)


def _wgrad(sides: Sides, dw: Tensor, add: bool) -> None:
    dy, x, offsets, dy_index, x_index = dense(sides)
    (E, N, K), tiles = dw.shape, _wgrad_tiles(dy, x)
    grid = E * -(-N // tiles["BN"]) * -(-K // tiles["BK"])
    launch(
        _wgrad_kernel, (grid,), dy.device,
        dy_ptr=dy, dy_index_ptr=dy_index, x_ptr=x, x_index_ptr=x_index, offsets_ptr=offsets, dw_ptr=dw, N=N, K=K,
        ADD=add, **tiles,
    )  # fmt: skip


def experts_wgrad_launch(sides: Sides, dtype: torch.dtype) -> Tensor:
    E, N, K = len(sides.offsets) - 1, sides.dy.shape[1], sides.x.shape[1]
    dw = sides.dy.new_empty(E, N, K, dtype=dtype)
    _wgrad(sides, dw, add=False)
    return dw


def experts_wgrad_add_launch(sides: Sides, total: Tensor) -> None:
    _wgrad(sides, total, add=True)


def _count(x: Tensor, index: Tensor | None) -> int:
    return len(x) if index is None else len(index)
