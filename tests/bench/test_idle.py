"""The driver that starts nothing shows what a GPU would read, and refuses what CUDA refuses."""

import struct

import pytest

pytest.importorskip("triton")

from tests.bench.idle_kernels import launched

EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@pytest.mark.slow
def test_a_kernel_is_seen_with_its_parameters(idle):
    (kernel,), address = idle(launched, dict(grid=(3, 2), n=1 << 40, scale=0.5, num_warps=2))
    assert kernel.name == "scaled_kernel" and kernel.launch[:4] == (3, 2, 1, 64) and kernel.launch[5] == 7
    assert kernel.launch[6] == 0 and idle(launched, dict(grid=(1,), launch_pdl=True))[0][0].launch[6] == 1 << EARLY
    x, n, scale, *scratch = kernel.params
    assert (x, n, struct.unpack("f", struct.pack("I", scale))) == (address, 1 << 40, (0.5,)) and scratch == [0, 0]


@pytest.mark.parametrize(
    "call, rule",
    [
        (dict(grid=(1, 65536)), "y <= 65535"),
        (dict(grid=(1, 1, 65536)), "z <= 65535"),
        (dict(grid=(1,), stride=1 << 39), r"strides\[i\] < 1ull << 40"),
    ],
    ids=str,
)
def test_what_cuda_refuses(idle, call, rule):
    with pytest.raises(RuntimeError, match=rule):
        idle(launched, call)
    assert idle(launched, dict(grid=(1,), stride=40))[0]
