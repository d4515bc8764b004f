"""The router's kernels equal the reference: odd sizes, more experts than a tile's least, groups that fill no power of
two."""

import pytest
import torch

from tests.kernels.interpreter_bytes import assert_declared
from tests.kernels.kernel_rules import DEVICE, assert_same
from tpfuse.kernels.experts.records import Routed, Routing
from tpfuse.kernels.experts.router import router_bwd, router_fwd
from tpfuse.kernels.experts.triton_router import Tile

pytestmark = pytest.mark.usefixtures("poisoned")
CASES = {  # m, D, E
    "ragged": (19, 37, 11, Routing(3)),
    "one of everything": (1, 1, 1, Routing(1, renormalize=False)),
    "no rows": (0, 8, 4, Routing(2)),
    "a tile": (16, 32, 16, Routing(16, "sigmoid", True, 2.5)),
    "odd groups": (21, 16, 15, Routing(4, "sigmoid", True, 1.0, groups=3, best_groups=2)),
    "many experts": (5, 20, 65, Routing(6, "softmax", False, 0.5, groups=13, best_groups=4)),
    "groups of one": (9, 8, 6, Routing(2, groups=6, best_groups=3)),
    "chosen": (18, 8, 32, Routing(4, "chosen")),
    "sigmoid": (18, 8, 20, Routing(5, "sigmoid", False)),
}
CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@CASE
def test_kernels(case, dtype):
    m, D, E, routing = case
    for bias in (None, random(E)):
        x, w = random(m, D, dtype=dtype), random(E, D)
        results = router_fwd.launch(x, w, bias, routing)
        assert_same(results, router_fwd.reference(x, w, bias, routing))
        weights, chosen, logits = results
        for dweights, dlogits in (
            (random(m, routing.k), None),
            (random(m, routing.k), random(m, E)),
            (None, random(m, E)),
        ):
            d, dx, truth = (dweights, dlogits, Routed(logits, weights, chosen), w), *random(2, m, D, dtype=dtype)
            assert_same(router_bwd.launch(*d, routing, dx), router_bwd.reference(*d, routing, truth))
            rounding = dict(rtol=2**-7, atol=1e-5) if dtype == torch.bfloat16 else dict(rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(dx, truth, **rounding)


def last_of(count, row):
    """-> the row behind random ones"""
    return torch.cat([random(count - 1, len(row)), row[None]])


def test_a_row_is_routed_alike_whatever_is_beside_it():
    """In the interpreter a row keeps its place: numpy's GEMM adds some places' rows in another order, by processor."""
    x, w, routing = random(37, 40), random(12, 40), Routing(3)
    weights, chosen, logits = together = router_fwd.launch(x, w, None, routing)
    dweights, dx = random(37, 3), torch.empty_like(x)
    router_bwd.launch(dweights, None, Routed(logits, weights, chosen), w, routing, dx)
    for i in range(0, 37, 5):
        place = 0 if DEVICE == "cuda" else i
        found = router_fwd.launch(last_of(place + 1, x[i]), w, None, routing)
        assert all(torch.equal(a[place], b[i]) for a, b in zip(found, together))
        weights, chosen, logits = found
        dx_found = torch.empty(place + 1, 40, device=DEVICE)
        router_bwd.launch(last_of(place + 1, dweights[i]), None, Routed(logits, weights, chosen), w, routing, dx_found)
        assert torch.equal(dx_found[place], dx[i])


@pytest.mark.skipif(DEVICE == "cuda", reason="counted by the interpreter")
@pytest.mark.parametrize("name", ["ragged", "odd groups", "sigmoid"])
def test_declared_bytes(name):
    m, D, E, routing = CASES[name]
    x, w, bias = random(m, D, dtype=torch.bfloat16), random(E, D), random(E)
    assert_declared(router_fwd, (x, w, bias, routing))
    weights, chosen, logits = router_fwd.reference(x, w, bias, routing)
    for dweights, dlogits in ((random(m, routing.k), None), (random(m, routing.k), random(m, E)), (None, random(m, E))):
        assert_declared(
            router_bwd, (dweights, dlogits, Routed(logits, weights, chosen), w, routing, torch.empty_like(x))
        )


def test_tiles():
    assert [Tile.of(*sizes) for sizes in ((1, 1), (128, 1), (15, 3), (256, 8), (6, 6))] == [
        Tile(1, 16),
        Tile(1, 128),
        Tile(4, 32),
        Tile(8, 256),
        Tile(8, 16),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("routing", [Routing(8), Routing(8, "sigmoid", True, 2.5, 8, 4)], ids=["softmax", "groups"])
def test_on_a_gpu(routing):
    x, w = random(8192, 2048, dtype=torch.bfloat16), random(256, 2048) / 45
    results, truth = router_fwd.launch(x, w, None, routing), router_fwd.reference(x, w, None, routing)
    assert (results[1] == truth[1]).float().mean() > 0.999  # a last bit decides now and then
    torch.testing.assert_close(results[2], truth[2], rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, results, router_fwd.launch(x, w, None, routing)))
