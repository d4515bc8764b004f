"""A processor on which a row's bits hang on its place is refused.

Spans: tpfuse/kernels/runtime/tiles.py.
"""

import pytest
import torch

from tpfuse.kernels.runtime.tiles import check_alike, row_tiles


def test_the_last_tile_is_filled_up():
    x = torch.ones(5, 2)
    assert [t.tolist() for t in row_tiles(x, 3)] == [[[1, 1]] * 3, [[1, 1], [1, 1], [0, 0]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_place_that_shows_is_refused(dtype):
    """The last two rows are added in another order, as by kernels that take six rows at a time."""

    def multiply(x, w):
        total = torch.zeros(len(x), len(w))
        for k in range(x.shape[1]):
            columns = torch.full((len(x), 1), k)
            columns[-2:] = x.shape[1] - 1 - k
            total += x.float().gather(1, columns) * w.float()[0, columns]
        return total.to(x.dtype)

    with pytest.raises(RuntimeError, match=r"planted: batch_invariant=8 does not hold .* \(3, 64\) in"):
        check_alike("planted", multiply, 8, torch.empty(3, 64, dtype=dtype))
