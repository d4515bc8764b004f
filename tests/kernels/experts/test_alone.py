"""A layer of experts without gradients has the bits of its ops in fewer calls, and leaves to them what it cannot."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.kernels.experts.test_router import ROUTINGS
from tests.planted import planted
from tpfuse.kernels.experts import alone
from tpfuse.kernels.experts.grouped import experts_down, experts_up
from tpfuse.kernels.experts.records import ExpertOrder, Routing
from tpfuse.kernels.experts.router import router_fwd
from tpfuse.kernels.norm import reduce_bias_dropout_add_norm
from tpfuse.kernels.runtime import matmul
from tpfuse.tools.ledger import Ledger

E, D, F = 8, 64, 96
DTYPES = torch.float32, torch.bfloat16, torch.float64


def problem(m: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(m)
    rand = lambda *shape: torch.randn(*shape, generator=random)
    acc = torch.promote_types(dtype, torch.float32)
    fc1, fc2 = (0.1 * rand(*shape) for shape in ((E, F, 2, D), (E, D, F)))
    return rand(m, D).to(dtype), rand(E, D).to(acc), rand(E), fc1.to(dtype), fc2.to(dtype)


def by_ops(x, router, bias, fc1, fc2, routing: Routing, activation: str) -> torch.Tensor:
    """The layer's own ops, one by one."""
    weights, chosen, _ = router_fwd(x, router, bias, routing)
    order, (m, k) = ExpertOrder.of(chosen, E), chosen.shape
    _, a = experts_up(x, order.rows(k), fc1.flatten(1, 2), activation)
    scales = weights.flatten().index_select(0, order.numbers)
    y = experts_down(a, order.places(k, m), fc2, weights=scales, count=k * m)
    return reduce_bias_dropout_add_norm(y.view(k, m, D))[0]


def differing(activation: str = "swiglu") -> list[str]:
    wrong = []
    for m in (0, 1, 2, 7, 200):
        for dtype in DTYPES:
            for name, routing in ROUTINGS.items():
                x, router, bias, fc1, fc2 = problem(m, dtype)
                args = x, router, bias if m % 2 else None
                with torch.no_grad():
                    assert alone.applies(x, fc1, fc2)
                    ours = alone.expert_outputs(*args, fc1=fc1, fc2=fc2, routing=routing, activation=activation)
                    if not torch.equal(ours, by_ops(*args, fc1, fc2, routing, activation)):
                        wrong.append(f"{name}, {m} rows, {dtype}")
    return wrong


@pytest.mark.parametrize("tiles", [False, True], ids=["as it is", "as with AMX"])
def test_bits_of_the_ops(monkeypatch, tiles):
    if tiles:
        monkeypatch.setattr(matmul, "multiplies_tiles", lambda: True)
        monkeypatch.setattr(matmul, "multiplies", lambda dtype: True)
    assert differing() == [] and differing("geglu_tanh") == []


def in_order_of_experts(right, parts, *addends):
    return right(parts.flip(0), *addends)


def test_a_mistake_is_seen():
    """Parts added from the last to the first."""
    with planted(f"{alone.__name__}.sum_parts", in_order_of_experts):
        assert any(name.startswith("all, 200 rows, torch.float32") for name in differing())


def test_a_row_that_begins_within_a_line():
    x, *router, fc1, fc2 = problem(1, torch.float32)
    odd = torch.empty(D + 3)[3:].copy_(x[0])[None]
    named = dict(fc1=fc1, fc2=fc2, routing=Routing(2), activation="swiglu")
    with torch.no_grad():
        ours, exact = (alone.expert_outputs(t, *router, **named) for t in (odd, x))
    assert torch.equal(ours, exact)


def test_what_is_left_to_the_ops():
    """Gradients, onlookers, weights that fill no cache lines, and other dtypes and devices."""
    x, _, _, fc1, fc2 = problem(2, torch.float32)
    assert not alone.applies(x, fc1, fc2)
    with torch.no_grad():
        assert alone.applies(x, fc1, fc2)
        narrow, odd = (fc1[..., :37].contiguous(), fc2), (torch.empty(fc1.numel() + 3)[3:].view_as(fc1), fc2)
        for w1, w2 in (narrow, odd, (fc1.bfloat16(), fc2), (fc1.mT.contiguous().mT, fc2), (fc1.to("meta"), fc2)):
            assert not alone.applies(x, w1, w2)
        with torch.autocast("cpu"):
            assert not alone.applies(x, fc1, fc2)
        with profile(activities=[ProfilerActivity.CPU]):
            assert not alone.applies(x, fc1, fc2)
        with Ledger():
            assert not alone.applies(x, fc1, fc2)
