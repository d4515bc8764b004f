"""Experts' GEMMs on a CPU: rows are brought into order at once, an expert's product is one GEMM into its place, and all
that is done element by element is done for all rows in one pass.

The bits are the reference's.  A product in its place is aligned as one in memory of its own where every row begins a
cache line; where it does not the reference is taken.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gemm.runs import gated_gradient, in_runs, multiply, value_of, widened
from ..runtime import matmul
from ..runtime.op import acc_dtype, launched, row_blocks
from .products import ALIGNED, Product, halves, times_transposed
from .records import ExpertRows, Sides
from .reference import (
    experts_dact_ref,
    experts_down_ref,
    experts_dx_ref,
    experts_up_in_halves,
    experts_up_ref,
    experts_wgrad_ref,
)


def _begin_lines(*tensors: Tensor) -> bool:
    """True if every row of the tensors, of weights every expert's, begins a cache line."""
    return all(t.is_contiguous() and not t.data_ptr() % ALIGNED and not t[:1].nbytes % ALIGNED for t in tensors)


def _times(x: Tensor, w: Tensor, place: Tensor) -> None:
    """x [r, N], w [N, K] -> x w [r, K]"""
    matmul.mm(x, w, place=place)


def _in_order(x: Tensor, index: Tensor | None) -> Tensor:
    """Returns rows sorted by expert."""
    return x if index is None else x.index_select(0, index)


def _multiply(product: Product, x: Tensor, weights: Tensor, *, offsets: Tensor, y: Tensor) -> Tensor:
    """x [n, K] sorted by expert -> y [n, ..], filled with each expert's product of its rows and its weight."""
    sizes = offsets.diff().tolist()
    busy = [expert for expert, size in enumerate(sizes) if size]
    pieces = (t.split([sizes[expert] for expert in busy]) for t in (x, y))
    for expert, rows, place in zip(busy, *pieces, strict=True):
        product(rows, weights[expert], place)
    return y


def _placed(x: Tensor, rows: ExpertRows, count: int, room: int) -> Tensor:
    """x [n, D] sorted by expert -> [count + room, D], each row at its place and the others 0."""
    if rows.row_index is None:
        absent = count + room - len(x)
        return F.pad(x, (0, 0, 0, absent)) if absent else x
    y = x.new_empty(count + room, x.shape[1])
    y[count if len(x) == count else 0 :] = 0
    return y.index_copy_(0, rows.row_index, x)


@torch.no_grad()
def experts_up_cpu(x: Tensor, rows: ExpertRows, w1: Tensor, activation: str, tile: int = 0) -> tuple[Tensor, Tensor]:
    if launched(x):
        return experts_up_ref(x, rows, w1, activation, tile=tile)
    ordered = _in_order(x, rows.row_index)
    z = x.new_empty(len(ordered), 2, w1.shape[1] // 2)
    if tile or not _begin_lines(ordered, z.flatten(0, 1), w1.flatten(0, 1)):
        return experts_up_in_halves(x, rows, w1, activation, tile=tile)
    _multiply(halves, ordered, w1, offsets=rows.offsets, y=z)
    return z, value_of(z, activation)


@torch.no_grad()
def experts_down_cpu(
    a: Tensor, rows: ExpertRows, w2: Tensor, weights: Tensor | None, count: int, tile: int = 0, room: int = 0
) -> Tensor:
    y = a.new_empty(len(a), w2.shape[1])
    if tile or not _begin_lines(a, y, w2):
        return experts_down_ref(a, rows, w2, weights, count=count, tile=tile, room=room)
    _multiply(times_transposed, a, w2, offsets=rows.offsets, y=y)
    if weights is not None:
        for i, j in row_blocks(*y.shape):
            y[i:j].mul_(weights[i:j, None])
    return _placed(y, rows, count, room)


@torch.no_grad()
def experts_dact_cpu(
    dy: Tensor, rows: ExpertRows, w2: Tensor, z: Tensor, weights: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    ordered = _in_order(dy, rows.row_index)
    acc, da = acc_dtype(z), z.new_empty(len(z), w2.shape[2])
    if not _begin_lines(ordered, da, w2):
        return experts_dact_ref(dy, rows, w2, z, weights=weights, activation=activation)
    _multiply(_times, ordered, w2, offsets=rows.offsets, y=da)
    dz, dg = z.new_empty(len(z), 2 * w2.shape[2]), z.new_empty(len(z), dtype=acc)
    runs = in_runs(6, z, (da, dz, dg, weights.to(acc)[:, None]))
    for ((x, _), (d, _), (product, _), *rooms), z_rows, (da_rows, dz_rows, dg_rows, g) in runs:
        x.copy_(da_rows)
        d = widened(torch.mul(x, g, out=d).to(z.dtype), d)
        gated_gradient(d, z_rows, activation, rooms=rooms, dz=dz_rows, y=da_rows)
        a = widened(da_rows, d)
        torch.sum(x.mul_(a), -1, out=dg_rows)
        multiply(a, g, da_rows, product)
    return dz, da, dg


@torch.no_grad()
def experts_dx_cpu(dz: Tensor, rows: ExpertRows, w1: Tensor, count: int, room: int) -> Tensor:
    dx = dz.new_empty(len(dz), w1.shape[2])
    if not _begin_lines(dz, dx, w1):
        return experts_dx_ref(dz, rows, w1, count, room=room)
    _multiply(_times, dz, w1, offsets=rows.offsets, y=dx)
    return _placed(dx, rows, count, room)


@torch.no_grad()
def experts_wgrad_cpu(sides: Sides, dtype: torch.dtype) -> Tensor:
    dy, x = _in_order(sides.dy, sides.dy_index), _in_order(sides.x, sides.x_index)
    if dtype != dy.dtype or not _begin_lines(dy, x):
        return experts_wgrad_ref(sides, dtype)
    sizes = sides.offsets.diff().tolist()
    dw = dy.new_empty(len(sizes), dy.shape[1], x.shape[1])
    for place, dy_e, x_e in zip(dw, dy.split(sizes), x.split(sizes), strict=True):
        matmul.mm(dy_e.t(), x_e, place=place)
    return dw
