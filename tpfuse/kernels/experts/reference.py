"""The definition of experts' GEMMs in plain torch: every product has all rows of one expert, in memory of its own."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..gemm.op import activation_bwd, activation_fwd
from ..runtime import matmul
from ..runtime.op import acc_dtype
from ..runtime.tiles import check_alike, check_tiles_device, in_tiles
from .products import ALIGNED, FEW, begins_a_line, halves
from .records import ExpertRows, Sides


def _experts_with_rows(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields the experts that have rows, and their places."""
    bounds = offsets.tolist()
    for expert, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if begin < end:
            yield expert, slice(begin, end)


def _rows(x: Tensor, index: Tensor | None, places: slice) -> Tensor:
    """Returns the rows at some places of the order, as a tensor of their own."""
    return x[places].clone() if index is None else x.index_select(0, index[places])


def _destinations(rows: ExpertRows, places: slice) -> Tensor | slice:
    return places if rows.row_index is None else rows.row_index[places]


def _product(x: Tensor, w: Tensor, tile: int) -> Tensor:
    """x [n, K], w [N, K] -> x w' [n, N], by tiles of so many rows unless 0."""
    multiply = lambda rows: (matmul.row if rows.shape[0] == 1 else matmul.linear)(rows, w)
    return in_tiles(lambda rows: (multiply(rows),), x, tile)[0]


def check_expert_tiles(x: Tensor, w1: Tensor, w2: Tensor, tile: int) -> None:
    """Raises an error where experts' products in tiles of so many rows are not built, or do not treat rows alike."""
    if tile:
        check_tiles_device("experts", x)
        for w in (w1[0, ::2], w2[0]):
            check_alike("experts", lambda rows, w: _product(rows, w, tile=0), tile, w)


def experts_up_ref(x: Tensor, rows: ExpertRows, w1: Tensor, activation: str, tile: int = 0) -> tuple[Tensor, Tensor]:
    """x [.., D] by rows -> z [n, 2F], a [n, F]; on a CPU by tiles of so many rows of an expert unless 0."""
    n, N = (x if rows.row_index is None else rows.row_index).shape[0], w1.shape[1]
    z, a = x.new_empty(n, N), x.new_empty(n, N // 2)
    for e, places in _experts_with_rows(rows.offsets):
        product = _product(_rows(x, rows.row_index, places), begins_a_line(w1[e]), tile)
        z[places], a[places] = product, activation_fwd(product, activation)
    return z, a


def experts_up_in_halves(
    x: Tensor, rows: ExpertRows, w1: Tensor, activation: str, tile: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns experts_up's results as a CPU keeps them: z [n, 2, F], a product for gate and one for up of an expert."""
    n, (_, N, D) = (x if rows.row_index is None else rows.row_index).shape[0], w1.shape
    z, aligned = x.new_empty(n, 2, N // 2), D * w1.element_size() % ALIGNED == 0
    for e, places in _experts_with_rows(rows.offsets):
        x_e, w = _rows(x, rows.row_index, places), begins_a_line(w1[e])
        if x_e.shape[0] <= FEW and not tile:
            halves(x_e, w, z[places])
            continue
        for half in range(2):
            z[places, half] = _product(x_e, w[half::2] if aligned else w[half::2].contiguous(), tile)
    return z, activation_fwd(z, activation)


def experts_down_ref(
    a: Tensor, rows: ExpertRows, w2: Tensor, weights: Tensor | None, count: int, tile: int = 0, room: int = 0
) -> Tensor:
    """a [n, F], weights [n], None for 1 -> y [count + room, D], whose row ``rows.row_index[i]`` is that of place i, and
    others 0.

    ``tile`` as of experts_up; ``room`` is for results of the same rows that come from elsewhere.
    """
    y = a.new_zeros(count + room, w2.shape[1])
    for e, places in _experts_with_rows(rows.offsets):
        product = _product(_rows(a, None, places), begins_a_line(w2[e]), tile)
        weighted = product if weights is None else product * weights[places, None]
        y[_destinations(rows, places)] = weighted.to(y.dtype)
    return y


def experts_dact_ref(
    dy: Tensor, rows: ExpertRows, w2: Tensor, z: Tensor, weights: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dy [.., D] by rows, z [n, 2F] or [n, 2, F], weights [n] -> dz [n, 2F], g a [n, F], dg [n] in fp32"""
    acc, n, F = acc_dtype(z), z.shape[0], w2.shape[2]
    dz, ga, dg = z.new_empty(n, 2 * F), z.new_empty(n, F), z.new_empty(n, dtype=acc)
    for e, places in _experts_with_rows(rows.offsets):
        g, z_e = weights[places, None].to(acc), _rows(z, None, places)
        da = matmul.mm(_rows(dy, rows.row_index, places), begins_a_line(w2[e])).to(acc)
        a = activation_fwd(z_e, activation).to(acc)
        dg[places], ga[places] = (da * a).sum(-1), (a * g).to(z.dtype)
        dz[places], _, _ = activation_bwd((da * g).to(z.dtype), z_e, activation, rebuild=False, bias=None)
    return dz, ga, dg


def experts_dx_ref(dz: Tensor, rows: ExpertRows, w1: Tensor, count: int, room: int) -> Tensor:
    """dz [n, 2F] -> dx [count + room, D], whose row ``rows.row_index[i]`` is that of place i; others are 0.

    So is the ``room`` behind ``count``, which is for gradients of the same rows that come from elsewhere.
    """
    dx = dz.new_zeros(count + room, w1.shape[2])
    for e, places in _experts_with_rows(rows.offsets):
        dx[_destinations(rows, places)] = matmul.mm(_rows(dz, None, places), begins_a_line(w1[e]))
    return dx


def experts_wgrad_ref(sides: Sides, dtype: torch.dtype) -> Tensor:
    """-> dW [E, N, K] in ``dtype``, dW_e = dy_e' x_e; 0 of an expert without rows"""
    dy, x, offsets, dy_index, x_index = sides
    dw = dy.new_zeros(len(offsets) - 1, dy.shape[1], x.shape[1], dtype=dtype)
    for e, places in _experts_with_rows(offsets):
        dw[e] = matmul.mm(_rows(dy, dy_index, places).t(), _rows(x, x_index, places))
    return dw


def experts_wgrad_add_ref(sides: Sides, total: Tensor) -> None:
    """Adds dW of experts_wgrad to ``total`` [E, N, K] in its dtype, fp32 (fp64 for fp64), unrounded."""
    dy, x, offsets, dy_index, x_index = sides
    for e, places in _experts_with_rows(offsets):
        dy_e, x_e = (_rows(t, index, places).to(total.dtype) for t, index in ((dy, dy_index), (x, x_index)))
        total[e].addmm_(dy_e.t(), x_e)
