"""The router against plain torch in fp64: who is chosen, with which weights, and the gradients."""

import functools

import pytest
import torch

from tests.kernels import common
from tests.kernels.common import gradcheck, leaf
from tpfuse.kernels import route
from tpfuse.kernels.experts.records import Routed, Routing
from tpfuse.kernels.experts.router import router_bwd, router_fwd

ROUTINGS = {
    "softmax": Routing(2),
    "one": Routing(1, renormalize=False),
    "all": Routing(8),
    "softmax unnormalized": Routing(3, renormalize=False, scale=1.5),
    "sigmoid": Routing(3, "sigmoid", renormalize=False),
    "groups": Routing(3, "sigmoid", True, 2.5, groups=4, best_groups=2),
    "groups of one": Routing(3, "softmax", True, 1.0, groups=8, best_groups=4),
    "chosen": Routing(2, "chosen"),
}
ROUTING = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
E = 8
X, W, BIAS = torch.randn(5, 6), torch.randn(E, 6), torch.randn(E)
WEIGHTS, CHOSEN, LOGITS = router_fwd.reference(X, W, None, Routing(2))
ROUTED = Routed(LOGITS, WEIGHTS, CHOSEN)
SAMPLES = [
    *((router_fwd, (X, W, BIAS, routing)) for routing in ROUTINGS.values()),
    (router_bwd, (torch.randn(5, 2), torch.randn(5, E), ROUTED, W, Routing(2), torch.empty(5, 6))),
    (router_bwd, (None, torch.randn(5, E), ROUTED, W, Routing(2), torch.empty(5, 6).bfloat16())),
]
test_opcheck = common.opcheck(SAMPLES)


def plain(x, w, bias, routing):
    """The definition row by row, expert by expert."""
    logits = x @ w.t()
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "chosen": logits}[routing.score]
    all_weights, all_chosen = [], []
    for row in range(len(x)):
        preference = [(scores[row, e] + (0 if bias is None else bias[e])).item() for e in range(len(w))]
        size = len(w) // routing.groups
        groups = [preference[g * size : (g + 1) * size] for g in range(routing.groups)]
        totals = [sum(sorted(group)[-2:]) for group in groups]
        best = sorted(range(routing.groups), key=lambda g: -totals[g])[: routing.best_groups]
        chosen = sorted((e for e in range(len(w)) if e // size in best), key=lambda e: -preference[e])[: routing.k]
        weights = logits[row, chosen].softmax(-1) if routing.score == "chosen" else scores[row, chosen]
        if routing.renormalize and routing.score != "chosen":
            weights = weights / weights.sum()
        all_weights.append(weights * routing.scale)
        all_chosen.append(chosen)
    return torch.stack(all_weights), torch.tensor(all_chosen, dtype=torch.int32), logits


@pytest.mark.parametrize("with_bias", [False, True])
@ROUTING
def test_against_a_loop(routing, with_bias):
    x, w, bias = leaf(70, 6), leaf(E, 6), torch.randn(E, dtype=torch.float64) if with_bias else None
    assert torch.equal(route(x, w, bias, routing=routing)[1], plain(x, w, bias, routing)[1])
    both = (functools.partial(f, routing=routing) for f in (route, plain))
    common.assert_same(*(lambda x, w, f=f: f(x, w, bias) for f in both), x, w)
    common.assert_same(*(lambda x, w, f=f: f(x, w, bias, routing=routing)[0] for f in (route, plain)), x, w)


@ROUTING
def test_gradients(routing):
    gradcheck(lambda x, w: route(x, w, routing=routing)[::2], leaf(4, 5), leaf(E, 5))


def test_a_bias_decides_and_has_no_weight():
    """It lifts the expert with the least score to the first place, whose weight stays the least."""
    w, x = leaf(E, 6), leaf(3, 6)
    least = route(x, w, routing=Routing(E))[1][0, -1]
    bias = torch.zeros(E).index_fill_(0, least.long(), 2.0)
    weights, chosen, _ = route(x[:1], w, bias, routing=Routing(E, renormalize=False))
    assert chosen[0, 0] == least and weights[0, 0] == weights.min()


def logits_of(*rows):
    """Arguments of router_fwd whose logits are these rows."""
    x = torch.tensor(rows, dtype=torch.float32)
    return x, torch.eye(x.shape[1])


IMPLEMENTATIONS = pytest.mark.parametrize("run", [router_fwd.cpu, router_fwd.launch], ids=["cpu", "launcher"])


@pytest.mark.filterwarnings("ignore:invalid value")
@IMPLEMENTATIONS
def test_ties_go_to_the_lower_index(run):
    """0.0 and -0.0 are a tie, all alike are, and a row of NaN, whose weights are NaN, leaves the others alone."""
    rows = [(0.0, -1.0, -0.0, 0.0), (-0.0, 0.0, -1.0, -0.0), (1.0, 1.0, 1.0, 1.0), (2.0, 3.0, 3.0, 2.0)]
    weights, chosen, _ = run(*logits_of(*rows), None, Routing(3, "chosen"))
    assert chosen.tolist() == [[0, 2, 3], [0, 1, 3], [0, 1, 2], [1, 2, 0]]
    x, w = logits_of(*rows, (float("nan"), 1.0, 2.0, 3.0))
    with_nan = run(x, w, None, Routing(3, "chosen"))
    assert with_nan[1][-1].tolist() == [0, 1, 2] and with_nan[0][-1].isnan().all()
    assert torch.equal(with_nan[0][:-1], weights) and torch.equal(with_nan[1][:-1], chosen)


def one_by_one(run, x, w, routing):
    return tuple(map(torch.cat, zip(*(run(row, w, None, routing) for row in x.split(1)))))


@pytest.mark.parametrize("D, experts", [(1024, 64), (37, 8), (255, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_is_routed_alike_whatever_is_beside_it(dtype, D, experts):
    """One row alone, at a width where a GEMM of another number of rows adds in another order, and at odd ones, where it
    takes rows at some places of a tile otherwise than at others."""
    x, w = torch.randn(70, D).to(dtype), torch.randn(experts, D).to(dtype) / 32
    routing = Routing(4, "sigmoid")
    together = router_fwd(x, w, None, routing)
    assert all(map(torch.equal, together, one_by_one(router_fwd.cpu, x, w, routing)))
    d = [torch.randn_like(together[0]), torch.randn_like(together[2])]
    rows = lambda i: (*(t[i] for t in d), Routed(*(together[j][i] for j in (2, 0, 1))))
    everything, single = torch.empty(2, 70, D).to(dtype)
    router_bwd(*rows(slice(None)), w, routing, everything)
    for i in range(70):
        router_bwd(*rows(slice(i, i + 1)), w, routing, single[i : i + 1])
    assert torch.equal(everything, single)


def test_one_product_of_all_rows_is_seen():
    """The router whose GEMM takes the rows as they come, which the test above is to find wrong."""
    x, w = torch.randn(70, 1024), torch.randn(64, 1024) / 32
    together = router_fwd.reference(x, w, None, Routing(4))
    assert not all(map(torch.equal, together, one_by_one(router_fwd.reference, x, w, Routing(4))))


def test_no_rows():
    weights, chosen, logits = route(leaf(0, 6), leaf(E, 6), routing=Routing(2))
    assert weights.shape == chosen.shape == (0, 2) and logits.shape == (0, E)
    (weights.sum() + logits.sum()).backward()


@pytest.mark.parametrize("routing", [Routing(2), ROUTINGS["groups"]], ids=["softmax", "groups"])
def test_compile(routing):
    common.assert_compiles(lambda x, w: route(x, w, routing=routing)[::2], leaf(5, 6), leaf(E, 6))


def test_autocast():
    """Rows are rounded, logits are not."""
    with torch.autocast("cpu", torch.bfloat16):
        weights, _, logits = route(X, W, routing=Routing(2))
    assert {weights.dtype, logits.dtype} == {torch.float32}
    torch.testing.assert_close(logits, X.bfloat16().float() @ W.t())


def test_not_twice_differentiable():
    common.assert_once_differentiable(lambda x, w: route(x, w, routing=Routing(2))[0], leaf(3, 6), leaf(E, 6))


@pytest.mark.parametrize(
    "routing, message",
    [
        (Routing(9), "k must be 1 to num_experts=8, got 9"),
        (Routing(0), "k must be a positive integer, got 0"),
        (Routing(2, "tanh"), "score must be one of softmax, sigmoid, chosen, got 'tanh'"),
        (Routing(2, scale=0.0), "scale must be positive and finite, got 0.0"),
        (Routing(2, groups=3), "num_experts=8 is not divisible by groups=3"),
        (Routing(2, groups=4, best_groups=5), "best_groups must be 1 to groups=4, got 5"),
        (Routing(3, groups=4), "k must be at most 2, the experts of best_groups=1 groups, got 3"),
    ],
)
def test_routings_that_are_refused(routing, message):
    with pytest.raises(ValueError, match=f"route: {message}"):
        route(X, W, routing=routing)


@pytest.mark.parametrize("w, bias, message", [
    (W[:, :5], None, r"weight must be \[E, 6\], got torch.float32 \(8, 5\)"),
    (W, BIAS[:7], r"bias must be \[8\], got torch.float32 \(7,\)"),
])  # fmt: skip
def test_shapes_that_are_refused(w, bias, message):
    with pytest.raises(ValueError, match=f"route: {message}"):
        route(X, w, bias, routing=Routing(2))
