"""The counter of loads and stores counts what there is to count."""

import torch

from tests.kernels.interpreter_bytes import count_bytes
from tpfuse.kernels.runtime.launch import launch
from tpfuse.kernels.runtime.triton import tl, triton


@triton.jit
def _twice_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < N) + tl.load(x_ptr + at, mask=at < N), mask=at < N)


def test_an_element_counts_once_a_launch():
    x, y = torch.randn(100), torch.empty(100)
    with count_bytes() as moved:
        launch(_twice_kernel, (4,), x.device, x, y, 100, BLOCK=32)
        assert (moved.read, moved.written, moved.loads, moved.stores) == (400, 400, 800, 400)
        launch(_twice_kernel, (1,), x.device, x, y, 10, BLOCK=32)
    assert (moved.read, moved.written, moved.loads, moved.stores) == (440, 440, 880, 440)
    torch.testing.assert_close(y, 2 * x)
