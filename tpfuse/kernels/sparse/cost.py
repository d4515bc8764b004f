"""Bytes and flops of the products of sparse integers, and the density at which they pay.

Which columns have vectors is not known from shapes: as many as can be.  A kernel reads a row of the dense matrix again
for each vector, from a cache where one holds it: :func:`break_even` counts these reads, a cost, as bytes of memory,
does not.
"""

from typing import Any, NamedTuple

from ..runtime.op import Cost, moved


class DeviceRates(NamedTuple):
    """DeviceRates of a device: GB/s of memory, GB/s at which rows that were read before are read again, TFLOP/s."""

    memory: float
    gathered: float
    matrix: float


def sparse_matmul_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    (values, index, offsets, *_), x = args
    n, V = len(index), values.shape[2]
    return Cost(moved(values, index, offsets, x[:n]), moved(*outputs), flops=2 * n * V * x.shape[1])


def sampled_matmul_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    q, k, index, offsets, block = args
    n = len(index)
    return Cost(moved(q[: n * block], k[:n], index, offsets), moved(*outputs), flops=2 * n * block * q.shape[1])


def break_even(
    shape: tuple[int, int, int], rates: DeviceRates, *, block: int, bits: int = 8, element: int = 2
) -> float:
    """Returns the density up to which a sparse product is faster than a dense one, both as fast as ``rates`` allow; 0
    to 1.

    ``shape``: rows of the sparse matrix, columns of the dense one, and the columns of the first.  The dense product is
    of ``element`` bytes an element.  Time is that of whichever takes longest: bytes, gathered bytes (one int8 for each
    vector and column), flops (of 16 bits twice; the rate for int8 is taken to be the dense one's).
    """
    M, N, K = shape
    memory, gathered, matrix = rates.memory * 1e9, rates.gathered * 1e9, rates.matrix * 1e12
    dense = max(2 * M * N * K / matrix, element * (M * K + K * N + M * N) / memory)
    fixed = (K * N + 4 * M * N) / memory  # of any density
    at_one = M * K * (bits / 8 + 4 / block) / memory  # more, at density 1
    limits = (dense - fixed) / at_one, dense * gathered * block / (M * K * N)
    return max(0.0, min(1.0, *limits, dense * matrix / (2 * M * N * K * (2 if bits == 16 else 1))))
