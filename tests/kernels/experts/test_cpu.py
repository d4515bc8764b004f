"""Experts' GEMMs on a CPU have the bits of the reference, whose products are one expert's each in memory of its own."""

import pytest
import torch
from torch import Tensor

from tests.kernels.experts.test_grouped import choices
from tests.planted import planted
from tpfuse.kernels.experts import cpu
from tpfuse.kernels.experts.grouped import experts_dact, experts_down, experts_dx, experts_up, experts_wgrad
from tpfuse.kernels.experts.records import ExpertOrder, ExpertRows, Sides
from tpfuse.kernels.experts.reference import experts_up_in_halves

E, K = 4, 2


def calls(kind: str, dtype: torch.dtype, D: int, F: int, M: int = 29):
    """Each op with rows by index, and with rows that are sorted."""
    random = torch.Generator().manual_seed(1)
    rand = lambda *shape: torch.randn(*shape, generator=random).to(dtype)
    order = ExpertOrder.of(choices(kind, M, E, K), E)
    rows, places, n = order.rows(K), order.places(K, M), M * K
    there = ExpertRows(None, order.offsets)
    x, y, z, a, g = rand(M, D), rand(n, D), rand(n, 2 * F), rand(n, F), torch.rand(n, generator=random)
    w1, w2, g = rand(E, 2 * F, D), rand(E, D, F), g.double() if dtype == torch.float64 else g
    return [
        (experts_up, (x, rows, w1, "swiglu")),
        (experts_up, (y, there, w1, "geglu")),
        (experts_down, (a, places, w2, g, n)),
        (experts_down, (a, ExpertRows(places.row_index + 3, order.offsets), w2, g, n + 5, 0, 7)),
        (experts_down, (a, there, w2, g, n, 0, 7)),
        (experts_dact, (x, rows, w2, z, g, "swiglu")),
        (experts_dact, (y, there, w2, z, g, "geglu_tanh")),
        (experts_down, (y, there, w1, None, n)),
        (experts_dx, (z, places, w1, n, 7)),
        (experts_dx, (z, there, w1, n, 0)),
        (experts_dx, (z, there, w1, n, 7)),
        (experts_wgrad, (Sides(z, x, order.offsets, x_index=rows.row_index), dtype)),
        (experts_wgrad, (Sides(y, a, order.offsets), dtype)),
    ]


def tensors(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def differing(kind: str, dtype: torch.dtype, D: int, F: int) -> list[str]:
    definition = lambda op: experts_up_in_halves if op is experts_up else op.reference
    every = [(op.name, tensors(op.cpu(*args)), tensors(definition(op)(*args))) for op, args in calls(kind, dtype, D, F)]
    return [name for name, ours, exact in every if not all(map(torch.equal, ours, exact))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("D, F", [(64, 96), (1024, 32), (37, 11)])
@pytest.mark.parametrize("kind", ["even", "one has all", "starved"])
def test_bits_of_the_reference(kind, D, F, dtype):
    assert differing(kind, dtype, D, F) == []


@pytest.mark.parametrize("kind", ["even", "starved"])
def test_halves_are_those_of_the_reference(kind):
    """z [n, 2, F] for z [n, 2F] of gate and up in turns, and gradients of either."""
    for op, args in calls(kind, torch.float64, 37, 11):
        if op is experts_up:
            for ours, exact in zip(op.cpu(*args), op.reference(*args), strict=True):
                torch.testing.assert_close(ours.mT.flatten(1) if ours.dim() == 3 else ours, exact)
        if op is experts_dact:
            dy, rows, w2, z, *others = args
            halves = z.unflatten(1, (-1, 2)).mT.contiguous()
            for run in op.cpu, op.reference:
                assert all(map(torch.equal, run(dy, rows, w2, halves, *others), run(*args)))


def all_rows_at_once(right, product, x, weights, *, offsets, y):
    """One product with the first expert's weight."""
    product(x, weights[0], y)


def test_a_mistake_is_seen():
    """And rows that fill no cache lines are left to the reference."""
    with planted(f"{cpu.__name__}._multiply", all_rows_at_once):
        names = differing("even", torch.float32, 64, 96)
        assert set(names) == {"experts_up", "experts_down", "experts_dact", "experts_dx"}
        assert differing("even", torch.float32, 37, 11) == []


def test_weights_that_begin_within_a_line():
    """Experts of a slice of memory: the reference takes copies of them."""
    op, (x, rows, w1, activation) = calls("even", torch.float32, 64, 96)[0]
    odd = torch.empty(w1.numel() + 3)[3:].view(w1.shape).copy_(w1)
    assert all(map(torch.equal, op.cpu(x, rows, odd, activation), op.cpu(x, rows, w1, activation)))
