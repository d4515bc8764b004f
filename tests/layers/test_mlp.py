"""The MLP with its width split, sharded and whole."""

import functools

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from tests.common import assert_close, fake_tp
from tests.layers.sharded import Case, build, data, reference, sharded_is_whole, step
from tpfuse.layers import ParallelMLP

CASE = Case(ParallelMLP, (10, 24), (8, 10), (8, 10))
CASES = {
    "gelu": CASE(activation="gelu"),
    "tanh": CASE,
    "relu, no bias": CASE(activation="relu", bias=False),
    "relu2": CASE(activation="relu2"),
}


test_sharded_is_whole = sharded_is_whole(CASES)


@pytest.mark.parametrize(
    "name, activation",
    [
        ("gelu", F.gelu),
        ("tanh", functools.partial(F.gelu, approximate="tanh")),
        ("relu, no bias", F.relu),
        ("relu2", ACT2FN["relu2"]),
    ],
)
def test_equal_to_torch(name, activation):
    case = CASES[name]
    ours = build(case, None, torch.float64)
    x, dy = data(case, torch.float64)
    fc1, fc2 = ours.fc1, ours.fc2
    plain = lambda x: F.linear(activation(F.linear(x, fc1.weight, fc1.bias)), fc2.weight, fc2.bias)
    assert_close(step(ours, case, x, dy), reference(plain, x, dy, dict(ours.named_parameters())), torch.float64)


def test_a_width_that_cannot_be_split():
    with pytest.raises(
        ValueError,
        match="ParallelMLP: ffn_size=20 is not divisible by tensor-parallel size 8; use 1, 2, 4, 5, 10 or 20",
    ):
        ParallelMLP(8, 20, tp=fake_tp(8))


def test_an_activation_that_is_not_there_is_named_when_built():
    with pytest.raises(ValueError, match="activation must be one of .*, got 'mish'"):
        ParallelMLP(8, 16, activation="mish")
