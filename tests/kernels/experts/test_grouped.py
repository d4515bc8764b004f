"""Experts' GEMMs against a plain loop over rows in fp64, however many rows an expert has."""

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import common
from tests.kernels.common import gradcheck, leaf, run
from tests.planted import planted, scaled
from tpfuse import MainGrad
from tpfuse.kernels import expert_mlps
from tpfuse.kernels.experts.grouped import (
    experts_dact,
    experts_down,
    experts_dx,
    experts_up,
    experts_wgrad,
    experts_wgrad_add,
)
from tpfuse.kernels.experts.records import ExpertOrder, ExpertRows, Sides

M, D, FFN, E, K = 13, 6, 5, 4, 2
FP32, BF16 = torch.float32, torch.bfloat16


def choices(kind, M, E, K):
    """[M, K] experts, different ones in a row."""
    if kind == "even":
        return torch.rand(M, E).argsort(1)[:, :K].int()
    if kind == "one has all":  # the first slot; the others are spread over two
        return torch.cat([torch.full((M, 1), 1), 2 + torch.arange(M)[:, None] % 2], 1)[:, :K].int()
    return torch.tensor([0, 3]).int().repeat(M, 1)[:, :K]  # "starved": 1 and 2 have none


def arguments(kind="even", dtype=torch.float64, M=M, D=D, FFN=FFN, E=E, K=K):
    """x, weights, chosen, fc1, fc2"""
    tensors = leaf(M, D, dtype=dtype), leaf(M, K, dtype=FP32 if dtype == BF16 else dtype), choices(kind, M, E, K)
    return *tensors, leaf(E, FFN, 2, D, dtype=dtype), leaf(E, D, FFN, dtype=dtype)


ORDER = ExpertOrder.of(choices("even", M, E, K), E)
ROWS, PLACES = ORDER.rows(K), ORDER.places(K, M)
N = M * K
SORTED = ExpertRows(None, ORDER.offsets)
X, Z, A, G = torch.randn(M, D), torch.randn(N, 2 * FFN), torch.randn(N, FFN), torch.rand(N)
W1, W2 = torch.randn(E, 2 * FFN, D), torch.randn(E, D, FFN)
SIDES = Sides(Z, X, ORDER.offsets, x_index=ROWS.row_index)
SAMPLES = [
    (experts_up, (X, ROWS, W1, "swiglu")),
    (experts_up, (torch.randn(N, D).bfloat16(), SORTED, W1.bfloat16(), "geglu")),
    (experts_down, (A, PLACES, W2, G, N)),
    (experts_down, (A, PLACES, W2, G, N, 0, 4)),
    (experts_down, (A, ExpertRows(PLACES.row_index + 3, ORDER.offsets), W2, G, N + 5)),
    (experts_dact, (X, ROWS, W2, Z, G, "swiglu")),
    (experts_dact, (torch.randn(N, D), SORTED, W2, Z, G, "geglu_tanh")),
    (experts_dx, (Z, PLACES, W1, N, 0)),
    (experts_wgrad, (SIDES, FP32)),
    (experts_wgrad, (Sides(X.bfloat16(), A.bfloat16(), ORDER.offsets, ROWS.row_index), FP32)),
    (experts_wgrad_add, (SIDES, torch.randn(E, 2 * FFN, D))),
]
test_opcheck = common.opcheck(SAMPLES)


def by_rows(x, weights, chosen, fc1, fc2, act=F.silu):
    parts = []
    for j in range(chosen.shape[1]):
        rows = []
        for i in range(len(x)):
            e = chosen[i, j]
            gate, up = (fc1[e] @ x[i]).unbind(1)
            rows.append(weights[i, j].to(x.dtype) * (fc2[e] @ (act(gate) * up)))
        parts.append(torch.stack(rows))
    return torch.stack(parts)


@pytest.mark.parametrize("activation, act", [
    ("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", functools.partial(F.gelu, approximate="tanh")),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["even", "one has all", "starved"])
def test_against_a_loop(kind, activation, act):
    x, weights, chosen, *fc = arguments(kind)
    tensors = x, weights, *fc
    ours = lambda x, w, a, b: expert_mlps(x, w, chosen, a, b, activation=activation)
    theirs = lambda x, w, a, b: by_rows(x, w, chosen, a, b, act)
    common.assert_same(ours, theirs, *tensors, non_contiguous=True)
    common.assert_same(*(lambda *t, f=f: f(*t).sum(0) for f in (ours, theirs)), *tensors)  # one gradient for all parts


@pytest.mark.parametrize("kind", ["even", "starved"])
def test_gradients(kind):
    x, weights, chosen, *fc = arguments(kind, M=4, D=3, FFN=2)
    gradcheck(lambda x, w, a, b: expert_mlps(x, w, chosen, a, b), x, weights, *fc)


@pytest.mark.parametrize("sizes", [dict(M=1, D=1, FFN=1, E=1, K=1), dict(M=3, D=37, FFN=11, E=7, K=5)], ids=str)
def test_odd_sizes(sizes):
    x, weights, chosen, *fc = arguments(**sizes)
    both = (lambda x, w, a, b, f=f: f(x, w, chosen, a, b) for f in (expert_mlps, by_rows))
    common.assert_same(*both, x, weights, *fc)


def test_no_rows():
    x, weights, chosen, *fc = arguments(M=0)
    expert_mlps(x, weights, chosen, *fc).sum().backward()
    assert x.grad.shape == (0, D) and all(w.grad.eq(0).all() for w in fc)


def test_an_expert_without_rows_has_a_gradient_of_zero():
    x, weights, chosen, *fc = arguments("starved")
    expert_mlps(x, weights, chosen, *fc).sum().backward()
    assert [w.grad.flatten(1).any(1).tolist() for w in fc] == [[True, False, False, True]] * 2


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_low_precision(dtype):
    x, weights, chosen, *fc = arguments(M=40, D=24, FFN=16)
    both = (lambda x, w, a, b, f=f: f(x, w, chosen, a, b) for f in (expert_mlps, by_rows))
    common.assert_accurate(*both, x, weights, *fc, dtype=dtype, keep=(1,))


def test_autocast_and_compile():
    x, weights, chosen, *fc = arguments(dtype=FP32)
    call = lambda x, w, a, b: expert_mlps(x, w, chosen, a, b)
    with torch.autocast("cpu", BF16):
        outputs, grads = run(call, (x, weights, *fc))
    assert outputs[0].dtype == BF16 and {g.dtype for g in grads} == {FP32}
    common.assert_compiles(call, x, weights, *fc)
    common.assert_once_differentiable(call, x, weights, *fc)


# ---- the same bits wherever the experts are ----


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_bits_of_experts_apart(dtype):
    """Half of the experts, with their rows alone, gives the bits of all of them: parts, and every gradient."""
    _, weights, chosen, fc1, fc2 = (t.detach() for t in arguments(M=12, D=1024, FFN=37, dtype=dtype))
    x, dy, order = torch.randn(12, 1024).to(dtype), torch.randn(12, 1024).to(dtype), ExpertOrder.of(chosen, E)
    g, w1 = weights.flatten()[order.numbers].float(), fc1.flatten(1, 2)

    def passes(first, end):
        begin, stop = order.offsets[[first, end]].tolist()
        rows, places = (
            ExpertRows(r.row_index[begin:stop], order.offsets[first : end + 1] - begin)
            for r in (order.rows(K), order.places(K, 12))
        )
        a1, a2 = w1[first:end].clone(), fc2[first:end].clone()
        z, a = experts_up(x, rows, a1, "swiglu")
        y = experts_down(a, places, a2, g[begin:stop], count=12 * K)
        dz, ga, dg = experts_dact(dy, rows, a2, z, weights=g[begin:stop], activation="swiglu")
        dx = experts_dx(dz, places, a1, 12 * K, room=0)
        dw1 = experts_wgrad(Sides(dz, x, rows.offsets, x_index=rows.row_index), dtype)
        return y, dx, dw1, experts_wgrad(Sides(dy, ga, rows.offsets, rows.row_index), dtype), dg

    whole, halves = passes(0, E), (passes(0, E // 2), passes(E // 2, E))
    for i, parts in enumerate(zip(*halves)):
        assert torch.equal(sum(parts) if i < 2 else torch.cat(parts), whole[i])


def test_a_sum_in_fp32_gets_the_gradients():
    """MainGrad's totals take two micro-batches; parameters have no gradient of their own."""
    x, weights, chosen, fc1, fc2 = arguments(dtype=BF16)
    model = torch.nn.ParameterList([torch.nn.Parameter(fc1.detach()), torch.nn.Parameter(fc2.detach())])
    MainGrad(model)
    for _ in range(2):
        expert_mlps(x, weights, chosen, *model).sum().backward()
    expert_mlps(x, weights, chosen, fc1, fc2).sum().backward()
    for p, truth in zip(model, (fc1.grad, fc2.grad), strict=True):
        assert p.grad is None and p.main_grad.dtype == FP32
        torch.testing.assert_close(p.main_grad, 2 * truth.float(), rtol=2**-7, atol=2**-5)


# ---- mistakes are seen ----


def without_weights(right, a, rows, w2, weights, count):
    return right(a, rows, w2, torch.ones_like(weights), count)


def in_order_of_rows(right, x, rows, *args):
    return right(x, rows._replace(row_index=rows.row_index.sort().values), *args)


def one_row_to_its_neighbour(right, x, rows, *args):
    offsets = rows.offsets.clone()
    offsets[1] += 1
    return right(x, rows._replace(offsets=offsets), *args)


@pytest.mark.parametrize("op, mistake", [
    ("experts_down", without_weights),
    ("experts_up", in_order_of_rows),
    ("experts_up", one_row_to_its_neighbour),
    ("experts_dact", in_order_of_rows),
    ("experts_dx", one_row_to_its_neighbour),
    ("experts_wgrad", functools.partial(scaled, 1.001)),
])  # fmt: skip
def test_a_mistake_is_seen(op, mistake):
    x, weights, chosen, *fc = arguments()
    both = (lambda x, w, a, b, f=f: f(x, w, chosen, a, b) for f in (expert_mlps, by_rows))
    with planted(op, mistake), pytest.raises(AssertionError):
        common.assert_same(*both, x, weights, *fc)


# ---- what is refused ----


def test_what_is_refused():
    x, weights, chosen, fc1, fc2 = arguments()
    for message, call in {
        "activation must be one of silu, gelu, gelu_tanh, got 'relu'": dict(activation="relu"),
        r"x must be \[M, D\], got torch.float64 \(6,\)": dict(x=x[0]),
        r"fc1 must be \[E, F, 2, 6\], got torch.float64 \(4, 5, 1, 6\)": dict(fc1=fc1[:, :, :1]),
        r"fc2 must be \[4, 6, 5\], got torch.float64 \(4, 6, 4\)": dict(fc2=fc2[..., :4]),
        r"weights must be \[13, k\], got torch.float64 \(12, 2\)": dict(weights=weights[1:]),
        r"weights and chosen must be alike, got torch.float64 \(13, 1\)": dict(weights=weights[:, :1]),
        r"chosen must be int32 or int64, got torch.float64 \(13, 2\)": dict(chosen=chosen.double()),
        "x, fc1 and fc2 must have one dtype outside autocast, got torch.float32": dict(x=x.float()),
    }.items():
        with pytest.raises(ValueError, match=f"expert_mlps: {message}"):
            expert_mlps(**dict(x=x, weights=weights, chosen=chosen, fc1=fc1, fc2=fc2) | call)
