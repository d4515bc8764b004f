"""What the products of sparse integers declare is what they move; the density at which they pay."""

import pytest
import torch

from tests.kernels.kernel_rules import DEVICE
from tests.kernels.samples import int8
from tpfuse.kernels import SparseInt
from tpfuse.kernels.runtime.op import OPS
from tpfuse.kernels.sparse.cost import DeviceRates, break_even

H100 = DeviceRates(memory=3350, gathered=5500, matrix=989)


@pytest.mark.skipif(DEVICE == "cuda", reason="counted by the interpreter")
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_declared_bytes(bits):
    """Every column has a vector; of an odd number of 4-bit vectors half a byte is read for each."""
    from tests.kernels.interpreter_bytes import assert_declared

    w = SparseInt.from_dense(torch.randint(1, 8, (21, 36)), bits=bits)
    assert_declared(OPS["sparse_matmul"], (w.vectors, int8(36, 150)))
    assert_declared(OPS["sampled_matmul"], (int8(21, 70), int8(36, 70), *w.vectors[1:3], 8))


def seconds(shape, density, rates, block):
    """Of the dense product, and of a sparse one of this density: each the longest of its parts."""
    M, N, K = shape
    memory, gathered, matrix = rates.memory * 1e9, rates.gathered * 1e9, rates.matrix * 1e12
    dense = max(2 * M * N * K / matrix, 2 * (M * K + K * N + M * N) / memory)
    bytes_of = density * M * K * (1 + 4 / block) + K * N + 4 * M * N
    return dense, max(bytes_of / memory, density * M * K * N / block / gathered, density * 2 * M * N * K / matrix)


@pytest.mark.parametrize("shape", [(4096, 4096, 1024), (4096, 1, 4096), (64, 64, 4096), (1024, 100_000, 1024)])
@pytest.mark.parametrize("block", [8, 64])
def test_at_the_break_even_both_take_as_long(shape, block):
    density = break_even(shape, H100, block=block)
    dense, below = seconds(shape, 0.99 * density, H100, block)
    assert 0 < density <= 1 and below <= dense
    if density < 1:
        _, above = seconds(shape, 1.01 * density, H100, block)
        assert above > dense


def test_longer_vectors_pay_sooner():
    at = lambda block: break_even((4096, 4096, 1024), H100, block=block)
    assert at(8) == pytest.approx(8 * 2 * 5500 / 989e3) and at(16) == pytest.approx(2 * at(8)) and at(64) > 0.7
