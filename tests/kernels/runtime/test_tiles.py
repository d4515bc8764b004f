"""A processor on which a row's bits hang on its place is refused.

Spans: tpfuse/kernels/runtime/tiles.py.
"""

import pytest
import torch

from tpfuse.kernels.runtime.tiles import check_alike, row_tiles


def test_the_last_tile_is_filled_up():
    x = torch.ones(5, 2)
    assert [t.tolist() for t in row_tiles(x, 3)] == [[[1, 1]] * 3, [[1, 1], [1, 1], [0, 0]]]


def test_a_place_that_shows_is_refused():
    def multiply(x, w):
        y = x @ w.t()
        y[-2:] *= 1 + 2**-22  # as kernels do that take six rows at a time
        return y

    with pytest.raises(RuntimeError, match=r"planted: batch_invariant=8 does not hold .* \(3, 4\) in float32"):
        check_alike("planted", multiply, 8, torch.empty(3, 4))
