"""Low-rank adapters beside the weights of experts, as thin grouped GEMMs over the same rows.

    y = x W_e' + u B_e'        u = s x A_e'        [n, r]
    dx = dy W_e + v A_e        v = s dy B_e        [n, r]
    dA_e = v' x                dB_e = dy' u

W_e + s B_e A_e is never formed: it would be a second copy of the experts' weights, its gradient a full wgrad, and in 16
bits the sum would round a small update away.  An activation is taken of the sum of both products, so that of a weight
with an adapter the GEMM and the activation are two kernels.  x and dy are copied into the experts' order first.

Each function is that of grouped.py of the same name where ``pair`` is None.
"""

from typing import NamedTuple

from torch import Tensor

from ..gemm.op import activation_bwd, activation_fwd
from ..runtime.op import acc_dtype
from .grouped import experts_dact, experts_down, experts_dx, experts_up
from .records import ExpertRows, Sides


class LowRank(NamedTuple):
    """s B_e A_e of experts e, beside weights [E, N, K] which may have another dtype."""

    a: Tensor  # [E, r, K]
    b: Tensor  # [E, N, r]
    scale: float

    def reduced(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """x [n, K] sorted -> s x A_e' [n, r]"""
        return _product(x, rows, self.a).mul_(self.scale)

    def reduced_gradient(self, dy: Tensor, rows: ExpertRows) -> Tensor:
        """dy [n, N] sorted -> s dy B_e [n, r]"""
        return _transposed_product(dy, rows, self.b).mul_(self.scale)

    def sides(self, work: Sides) -> tuple[Sides, Sides]:
        """Takes the rows of the weight's own gradient, and returns those of the gradients of A and B."""
        x, rows = _sorted(work.x, ExpertRows(work.x_index, work.offsets))
        dy, _ = _sorted(work.dy, ExpertRows(work.dy_index, work.offsets))
        v, u = self.reduced_gradient(dy, rows), self.reduced(x, rows)
        return Sides(v, x, work.offsets), Sides(dy, u, work.offsets)


def _sorted(x: Tensor, rows: ExpertRows) -> tuple[Tensor, ExpertRows]:
    """Returns rows in their experts' order, and where they stand in that tensor."""
    return x if rows.row_index is None else x.index_select(0, rows.row_index), ExpertRows(None, rows.offsets)


def _product(x: Tensor, rows: ExpertRows, w: Tensor) -> Tensor:
    """x [n, K] sorted, w [E, N, K] -> x w_e' [n, N]"""
    return experts_down(x, rows, w.to(x.dtype), None, count=x.shape[0])


def _transposed_product(dy: Tensor, rows: ExpertRows, w: Tensor) -> Tensor:
    """dy [n, N] sorted, w [E, N, K] -> dy w_e [n, K]"""
    return experts_dx(dy, rows, w.to(dy.dtype), dy.shape[0], room=0)


def adapted_up(
    x: Tensor, rows: ExpertRows, w1: Tensor, pair: LowRank | None, *, activation: str, tile: int
) -> tuple[Tensor, Tensor]:
    if pair is None:
        z, a = experts_up(x, rows, w1, activation, tile=tile)
        return z, a
    x, rows = _sorted(x, rows)
    z = _product(x, rows, w1).add_(_product(pair.reduced(x, rows), rows, pair.b))
    return z, activation_fwd(z, activation)


def adapted_down(
    a: Tensor, rows: ExpertRows, w2: Tensor, pair: LowRank | None, *, weights: Tensor, count: int, tile: int, room: int
) -> Tensor:
    y: Tensor = experts_down(a, rows, w2, weights, count=count, tile=tile, room=room)
    if pair is None:
        return y
    u = pair.reduced(a, ExpertRows(None, rows.offsets))
    return y.add_(experts_down(u, rows, pair.b.to(u.dtype), weights, count=count, tile=0, room=room))


def adapted_dact(
    dy: Tensor, rows: ExpertRows, w2: Tensor, pair: LowRank | None, *, z: Tensor, weights: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    if pair is None:
        dz, ga, dg = experts_dact(dy, rows, w2, z, weights=weights, activation=activation)
        return dz, ga, dg
    dy, rows = _sorted(dy, rows)
    da = _transposed_product(dy, rows, w2)
    da.add_(_transposed_product(pair.reduced_gradient(dy, rows), rows, pair.a))
    acc = acc_dtype(z)
    g, da_acc = weights[:, None].to(acc), da.to(acc)
    dz, _, a = activation_bwd((da_acc * g).to(z.dtype), z, activation, rebuild=True, bias=None)
    return dz, (a.to(acc) * g).to(z.dtype), (da_acc * a).sum(-1)


def adapted_dx(dz: Tensor, rows: ExpertRows, w1: Tensor, pair: LowRank | None, *, count: int, room: int) -> Tensor:
    dx: Tensor = experts_dx(dz, rows, w1, count, room=room)
    if pair is None:
        return dx
    v = pair.reduced_gradient(dz, ExpertRows(None, rows.offsets))
    return dx.add_(experts_dx(v, rows, pair.a.to(v.dtype), count, room=room))
