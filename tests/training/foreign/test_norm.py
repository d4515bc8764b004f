"""Norms of leaves are added exactly: the same bits in any order, and at any number of ranks and stages."""

import math

import pytest
import torch

from tpfuse.training.foreign.norm import GradPart, total_norm

LARGE = 2.0**53  # beside which a 1 is lost in fp64, and two are not


@pytest.mark.parametrize("order", [1.0, math.inf])
def test_the_order_of_leaves_does_not_matter(order):
    part = lambda *values: GradPart(torch.tensor(values, dtype=torch.float32), leaf=(0, 1))
    whole = lambda *values: GradPart(torch.tensor(values, dtype=torch.float32))
    right = LARGE + 2 if order == 1 else LARGE
    assert (LARGE + 1) + 1 != LARGE + 2
    for parts in (
        [part(LARGE, 1, 1)],
        [part(1, 1, LARGE)],
        [part(1), part(LARGE), part(1)],
        [whole(LARGE), part(1, 1)],
        [part(LARGE), whole(1.0), whole(1.0)],
    ):
        assert total_norm(parts, order).item() == right
    halves = [GradPart(torch.tensor([x]), copies=2, leaf=(0, 1)) for x in (LARGE, LARGE, 1.0, 1.0, 1.0, 1.0)]
    assert total_norm(halves, order).item() == right  # each on two ranks of one group
    assert total_norm([], 2.0, in_leaves=True).item() == 0
