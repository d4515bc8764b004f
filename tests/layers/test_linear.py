"""Column- and row-parallel linear layers, sharded and whole, and against torch.nn.Linear."""

import pytest
import torch

from tests.common import Recorder, assert_close, fake_tp
from tests.layers.sharded import Case, assert_seen, build, data, reference, sharded_is_whole, step, unsummed
from tpfuse import TensorParallel
from tpfuse.kernels import linear
from tpfuse.layers import ColumnParallelLinear, RowParallelLinear

# 12 and 24 divide by 4; the weight of a shape, as attention's, is split on its first dimension
CASES = {
    "column": Case(ColumnParallelLinear, (10, 24), (8, 10), (8, 24), y_is="columns"),
    "column, no bias, gelu": Case(
        ColumnParallelLinear, (10, 24, False), (8, 10), (8, 24), dict(activation="gelu"), y_is="columns"
    ),
    "column, a shape": Case(ColumnParallelLinear, (10, (4, 3, 2)), (8, 10), (8, 24), y_is="columns"),
    "row": Case(RowParallelLinear, (12, 10), (8, 12), (8, 10), x_is="columns"),
    "row, no bias": Case(RowParallelLinear, (12, 10, False), (8, 12), (8, 10), x_is="columns"),
}


test_sharded_is_whole = sharded_is_whole(CASES)


def test_a_bias_whose_gradient_is_not_summed_is_seen(ranks):
    assert_seen(ranks, CASES["row"], "tpfuse.layers.linear.replicated", unsummed, "bias")


@pytest.mark.parametrize("name", ["column", "row"])
def test_equal_to_torch(name):
    case = CASES[name]
    ours = build(case, None, torch.float64)
    theirs = torch.nn.Linear(*case.args, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())  # the same names and shapes
    x, dy = data(case, torch.float64)
    exact = reference(theirs, x, dy, dict(theirs.named_parameters()))
    assert_close(step(ours, case, x, dy), exact, torch.float64)


def test_rows_may_have_two_dimensions_and_any_strides():
    layer = build(CASES["column"], None, torch.float64)
    x = torch.randn(10, 4, 2, dtype=torch.float64).permute(1, 2, 0)
    assert torch.equal(layer(x), layer(x.reshape(8, 10).contiguous()))


def _frozen_input(world, form):
    """The messages of backward where x has no gradient, and where it has one; whether the weight's are the same."""
    layer = ColumnParallelLinear(10, 24, tp=TensorParallel(world.group, **form))
    results = []
    for needs_grad in False, True:
        y = layer(torch.ones(4, 10).requires_grad_(needs_grad))
        with Recorder() as backward:
            y.square().sum().backward()
        results.append((backward.messages(), layer.weight.grad.clone()))
        layer.zero_grad()
    (fewer, frozen), (more, trained) = results
    return len(more) - len(fewer), torch.equal(frozen, trained)


@pytest.mark.parametrize("form", [dict(sequence_parallel=True), {}, dict(sequence_parallel=True, bitwise=2)], ids=str)
def test_a_gradient_of_x_that_nobody_wants_is_neither_computed_nor_sent(ranks, form):
    assert ranks(2, _frozen_input, form) == [(1, True)] * 2


def test_a_gradient_of_x_that_nobody_wants_takes_no_product():
    x, w = torch.ones(3, 4), torch.ones(5, 4, requires_grad=True)
    y = linear(x, w)
    with Recorder() as backward:
        y.sum().backward()
    assert {c.name for c in backward.calls if c.ours} == {"linear_wgrad"}


@pytest.mark.parametrize("width, rule", [(-3, "at least 0"), (20.0, "an integer"), ("8", "an integer")])
@pytest.mark.parametrize("layer, what", [(ColumnParallelLinear, "out_features"), (RowParallelLinear, "in_features")])
def test_a_width_that_is_none(layer, what, width, rule):
    with pytest.raises(ValueError, match=f"{layer.__name__}: {what} must be {rule}, got {width!r}"):
        layer(*(width, 5) if layer is RowParallelLinear else (5, width), tp=fake_tp(2))
    with pytest.raises(ValueError, match=f"{layer.__name__}: a size of weight must be {rule}, got {width!r}"):
        layer(*(4, width) if layer is RowParallelLinear else (width, 4), tp=fake_tp(2))


@pytest.mark.parametrize("layer, what", [(ColumnParallelLinear, "out_features"), (RowParallelLinear, "in_features")])
def test_a_width_that_cannot_be_split(layer, what):
    size = (12, 5) if layer is RowParallelLinear else (5, 12)
    match = f"{layer.__name__}: {what}=12 is not divisible by tensor-parallel size 8; use 1, 2, 3, 4, 6 or 12"
    with pytest.raises(ValueError, match=match):
        layer(*size, tp=fake_tp(8))
