"""Elements whose bits differ, and their distance, against NumPy's neighbours."""

import numpy as np
import pytest
import torch

from tpfuse.tools.bits.difference import BitsRow, differing
from tpfuse.tools.bits.trace import Key


def test_a_sign_of_zero_and_nan_are_bits():
    a = torch.tensor([0.0, 1.0, float("nan")])
    assert differing(a, a.clone()) == (0, 0)
    assert differing(a, torch.tensor([-0.0, 1.0, float("nan")])) == (1, 1)
    count, ulps = differing(a, torch.tensor([0.0, 1.0, 2.0]))
    assert count == 1 and ulps > 1 << 29  # beyond infinity


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_neighbours(dtype):
    """So many steps of nextafter, over powers of two and subnormal numbers."""
    for start in 0.0, 1.0, -1.0, np.finfo(dtype).tiny, 1024.0:
        x = y = np.array(start, dtype)
        for step in range(1, 6):
            y = np.nextafter(y, np.array(np.inf, dtype))
            assert differing(torch.from_numpy(x[None]), torch.from_numpy(y[None])) == (1, step)


def test_the_ends_of_a_dtype_are_far_apart():
    ends = torch.tensor([torch.finfo(torch.float64).max])
    assert differing(ends.double(), -ends.double())[1] > 1 << 63


def test_bf16():
    one = torch.ones(4, dtype=torch.bfloat16)
    other = one.clone()
    other[1:3] += torch.finfo(torch.bfloat16).eps
    row = BitsRow.of(Key("op", "a", 1), one, other)
    assert not row.same and str(row) == "op a (2): 2 of 4 elements differ, largest 1 ulp"
    assert BitsRow.of(Key("op", "a"), one, one).same
