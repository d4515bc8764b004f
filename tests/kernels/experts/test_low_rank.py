"""Adapters beside experts' weights: the sums and gradients of W + s B A of each expert; without one, the ops' own."""

import pytest
import torch

from tests.common import error
from tests.kernels.experts.test_grouped import choices
from tpfuse.kernels.experts.grouped import experts_dact, experts_down, experts_dx, experts_up, experts_wgrad
from tpfuse.kernels.experts.low_rank import LowRank, adapted_dact, adapted_down, adapted_dx, adapted_up
from tpfuse.kernels.experts.records import ExpertOrder, Sides
from tpfuse.kernels.gemm.op import in_pairs

M, D, F, E, K, RANK = 13, 24, 11, 4, 2, 3


def pair(w: torch.Tensor) -> LowRank:
    return LowRank(torch.randn(E, RANK, w.shape[2]).to(w), torch.randn(E, w.shape[1], RANK).to(w), 0.7)


def merged(w: torch.Tensor, pair: LowRank | None) -> torch.Tensor:
    return w if pair is None else w + pair.scale * pair.b @ pair.a


@pytest.mark.parametrize("kind", ["even", "starved"])
@pytest.mark.parametrize("both", [True, False])
def test_sums_and_gradients_are_those_of_the_merged_weight(kind, both):
    torch.manual_seed(0)
    order, n = ExpertOrder.of(choices(kind, M, E, K), E), M * K
    rows, places = order.rows(K), order.places(K, M)
    x, dy, g = torch.randn(M, D).double(), torch.randn(M, D).double(), torch.rand(n).double()
    w1, w2 = torch.randn(E, 2 * F, D).double(), torch.randn(E, D, F).double()
    pairs = (pair(w1), pair(w2)) if both else (None, None)
    (p1, p2), (m1, m2) = pairs, map(merged, (w1, w2), pairs)
    act = "swiglu"
    z, a = experts_up(x, rows, m1, act)
    dz, ga, dg = experts_dact(dy, rows, m2, z, weights=g, activation=act)
    ours = (
        *adapted_up(x, rows, w1, p1, activation=act, tile=0),
        adapted_down(a, places, w2, p2, weights=g, count=n + 1, tile=0, room=0),
    )
    ours += adapted_dact(dy, rows, w2, p2, z=z, weights=g, activation=act)
    ours += (adapted_dx(dz, places, w1, p1, count=n, room=2),)
    exact = z, a, experts_down(a, places, m2, g, count=n + 1), dz, ga, dg, experts_dx(dz, places, m1, n, room=2)
    assert max(error(in_pairs(a), in_pairs(b)) for a, b in zip(ours, exact, strict=True)) < 1e-13
    for work, p in zip((Sides(dz, x, order.offsets, x_index=rows.row_index),) * both, pairs, strict=False):
        dw = experts_wgrad(work, torch.float64)
        da, db = (experts_wgrad(sides, torch.float64) for sides in p.sides(work))
        assert error(da, p.scale * p.b.mT @ dw) < 1e-13 and error(db, p.scale * dw @ p.a.mT) < 1e-13
    if not both:
        assert all(map(torch.equal, ours, exact))
