"""The MLP with its width split, sharded and whole."""

import pytest
import torch
from transformers.activations import ACT2FN

from tests.common import assert_close, fake_tp
from tests.layers.sharded import Case, build, data, sharded_is_whole, step
from tpfuse.layers import ParallelMLP

CASE = Case(ParallelMLP, (10, 24), (8, 10), (8, 10))
CASES = {
    "gelu": CASE,
    "tanh": CASE(activation="gelu_tanh"),
    "relu, no bias": CASE(activation="relu", bias=False),
    "relu2": CASE(activation="relu2"),
}


test_sharded_is_whole = sharded_is_whole(CASES)


@pytest.mark.parametrize(
    "name, activation",
    [
        ("gelu", torch.nn.GELU()),
        ("tanh", torch.nn.GELU("tanh")),
        ("relu, no bias", torch.nn.ReLU()),
        ("relu2", ACT2FN["relu2"]),
    ],
)
def test_equal_to_torch(name, activation):
    case = CASES[name]
    ours, bias = build(case, None, torch.float64), case.options.get("bias", True)
    linear = lambda *size: torch.nn.Linear(*size, bias=bias, dtype=torch.float64)
    theirs = torch.nn.Sequential(linear(10, 24), activation, linear(24, 10))
    theirs.load_state_dict({k.replace("fc1", "0").replace("fc2", "2"): v for k, v in ours.state_dict().items()})
    x, dy = data(case, torch.float64)
    leaf = x.clone().requires_grad_()
    y = theirs(leaf)
    y.backward(dy)
    grads = {k.replace("0.", "fc1.").replace("2.", "fc2."): p.grad for k, p in theirs.named_parameters()}
    assert_close(step(ours, case, x, dy), dict(y=y.detach(), x=leaf.grad, **grads), torch.float64)


def test_a_width_that_cannot_be_split():
    with pytest.raises(
        ValueError,
        match="ParallelMLP: ffn_size=20 is not divisible by tensor-parallel size 8; use 1, 2, 4, 5, 10 or 20",
    ):
        ParallelMLP(8, 20, tp=fake_tp(8))


def test_an_activation_that_is_not_there_is_named_when_built():
    with pytest.raises(ValueError, match="activation must be one of .*, got 'mish'"):
        ParallelMLP(8, 16, activation="mish")
