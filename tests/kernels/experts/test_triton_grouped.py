"""The kernels of experts' GEMMs equal the reference, under the interpreter where there is no GPU."""

import pytest
import torch

from tests.kernels.experts.test_grouped import choices
from tests.kernels.interpreter_bytes import assert_declared
from tests.kernels.kernel_rules import DEVICE, assert_accurate_launch, assert_same
from tpfuse.kernels.experts.grouped import (
    experts_dact,
    experts_down,
    experts_dx,
    experts_up,
    experts_wgrad,
    experts_wgrad_add,
)
from tpfuse.kernels.experts.records import ExpertOrder, ExpertRows, Sides

pytestmark = pytest.mark.usefixtures("poisoned")
FP32 = torch.float32
# M, D, F, E, k, and how rows are spread: tiles of 16 rows, 32 columns and 16 deep are ragged in each
CASES = {
    "ragged": (21, 24, 19, 5, 3, "even"),
    "one has all": (24, 17, 33, 4, 2, "one has all"),
    "starved": (9, 16, 16, 4, 2, "starved"),
    "one of everything": (1, 1, 1, 1, 1, "even"),
    "no rows": (0, 8, 8, 4, 2, "even"),
}
CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def random(*shape, dtype=FP32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def calls(M, D, F, E, k, kind, dtype=FP32, activation="swiglu"):
    """(op, arguments) of all: rows by index, and sorted as they arrive from other ranks; rows that get none."""
    chosen = choices(kind, M, E, k).to(DEVICE)
    order, n = ExpertOrder.of(chosen, E), M * k
    rows, places, in_order = order.rows(k), order.places(k, M), ExpertRows(None, order.offsets)
    x, w1, w2 = random(M, D, dtype=dtype), random(E, 2 * F, D, dtype=dtype), random(E, D, F, dtype=dtype)
    z, a, arrived = random(n, 2 * F, dtype=dtype), random(n, F, dtype=dtype), random(n, D, dtype=dtype)
    g = torch.rand(n, device=DEVICE)
    farther = ExpertRows(places.row_index + 2, order.offsets)
    yield from ((experts_up, (x, rows, w1, activation)), (experts_up, (arrived, in_order, w1, activation)))
    yield from ((experts_down, (a, places, w2, g, n)), (experts_down, (a, farther, w2, g, n + 3, 0, 2)))
    yield from ((experts_dact, (t, r, w2, z, g, activation)) for t, r in ((x, rows), (arrived, in_order)))
    yield from ((experts_dx, (z, places, w1, n, 0)), (experts_dx, (z, farther, w1, n + 3, 0)))
    thin = random(E, 3, D, dtype=dtype)  # an adapter's
    yield from ((experts_down, (arrived, in_order, thin, None, n)), (experts_dx, (z, in_order, w1, n, 0)))
    yield experts_wgrad, (Sides(z, x, order.offsets, x_index=rows.row_index), dtype)
    yield experts_wgrad, (Sides(x, a, order.offsets, rows.row_index), FP32)


@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh"])
@CASE
def test_launchers(case, activation):
    for op, arguments in calls(*case, activation=activation):
        assert_same(op.launch(*arguments), op.reference(*arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    for op, arguments in calls(*CASES["ragged"], dtype=dtype):
        assert_accurate_launch(op, arguments)


@CASE
def test_added_gradients(case):
    """An expert without rows keeps its total."""
    for op, arguments in calls(*case):
        if op is experts_wgrad:
            sides, _ = arguments
            totals = random(len(sides.offsets) - 1, sides.dy.shape[1], sides.x.shape[1])
            truth = totals.clone()
            experts_wgrad_add.launch(sides, totals)
            experts_wgrad_add.reference(sides, truth)
            assert_same(totals, truth)


def test_room_is_left():
    """Rows behind those that are counted are 0."""
    for op, arguments in calls(*CASES["ragged"]):
        if op is experts_dx:
            dx = op.launch(*arguments[:4], 4)
            assert dx[-4:].eq(0).all() and torch.equal(dx[:-4], op.launch(*arguments))


def test_bits_of_an_expert_alone():
    """What an expert gives is a function of its own rows: the third of five, by itself."""
    M, D, F, E, k, kind = CASES["ragged"]
    for op, arguments in calls(M, D, F, E, k, kind):
        if op is experts_up and arguments[1].row_index is not None:
            x, rows, w1, activation = arguments
            begin, end = rows.offsets[2:4].tolist()
            alone = ExpertRows(rows.row_index[begin:end], rows.offsets[2:4] - begin)
            for whole, part in zip(op.launch(*arguments), op.launch(x, alone, w1[2:3], activation)):
                assert torch.equal(whole[begin:end], part)


@pytest.mark.skipif(DEVICE == "cuda", reason="counted by the interpreter")
def test_declared_bytes():
    filled = CASES["ragged"][0] * 3 + 3  # rows of which some get none: torch fills them with 0, which is not counted
    for op, arguments in calls(*CASES["ragged"], dtype=torch.bfloat16):
        if op is experts_wgrad or filled not in [a for a in arguments if isinstance(a, int)]:
            assert_declared(op, arguments)
    sides = Sides(random(8, 6), random(8, 4), torch.tensor([0, 3, 8]))
    assert_declared(experts_wgrad_add, (sides, random(2, 6, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
def test_on_a_gpu(dtype):
    for op, arguments in calls(1000, 1024, 384, 16, 4, "even", dtype=dtype):
        scaled = [a / 16 if isinstance(a, torch.Tensor) and a.dim() == 3 else a for a in arguments]
        first, second = op.launch(*scaled), op.launch(*scaled)
        rounding = dict(rtol=2e-2, atol=2e-1) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(first, op.reference(*scaled), **rounding)
        for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (first, second))):
            assert torch.equal(a, b)
