"""A vision transformer of one's own: transformers' logits and gradients at every split, rows padded or not."""

import re

import pytest
import torch
from torch import nn

from tests.examples.launch import example, ok

pytest.importorskip("transformers")


def largest(said: str) -> float:
    logits, gradients = re.search(r"logits (\S+), gradients (\S+)$", said.strip()).groups()
    return max(float(logits), float(gradients))


@pytest.mark.slow
@pytest.mark.parametrize("procs, flags", [(0, []), (2, []), (2, ["--no-sequence-parallel"])])
def test_the_numbers_are_those_of_transformers(procs, flags):
    assert largest(ok("vit.py", *flags, procs=procs)) <= 1e-10


def compared(world, factor: float) -> str:
    ours, theirs = (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double() for _ in range(2))
    x, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    calls = dict(logits=lambda: ours(x), expected=lambda: theirs(factor * x))
    return example("_against").differences(ours, theirs, {"0": "0", "1": "1"}, **calls, labels=labels)


def test_the_comparison_can_fail(ranks):
    """It finds nothing between equal models, and what is planted in one."""
    assert largest(ranks(1, compared, 1.0)[0]) == 0.0
    assert largest(ranks(1, compared, 1.001)[0]) > 1e-4
