"""Products of sparse integers in plain torch.

Sums are taken in floating point, where integers are exact: every partial sum, in whatever order, is below 2^31 in
magnitude, and fp64 holds integers up to 2^53.  On a CPU fp32, which holds them up to 2^24, is taken where no row can
add up to more; of 4 or 8 bits alone, which are exact as bf16 too, should torch be told to multiply fp32 in it.  (A
product of int8 that torch has on CPUs saturates between on those without VNNI.)  Few vectors are multiplied as CSR, by
MKL, where a dense product would take longer: up to a sixth.
"""

import warnings

import torch
from torch import Tensor

from .format import BYTE, Vectors, dense_of, row_sums, strips_of, unpack

EXACT = 1 << 24  # integers up to here are fp32
DENSE = 6  # a matrix with one element in so many, or more, is multiplied as a dense one


def sparse_matmul_ref(w: Vectors, x: Tensor) -> Tensor:
    """x int8 [K, N] -> w x, int32 [M, N]"""
    return (dense_of(w, len(x), torch.float64) @ x.double()).to(torch.int32)


def sparse_matmul_cpu(w: Vectors, x: Tensor) -> Tensor:
    sums, n = row_sums(w), len(w.column_index)
    exact = w.bits < 16 and int(sums.max() if sums.numel() else 0) * BYTE <= EXACT
    dtype = torch.float32 if exact else torch.float64
    if DENSE * n >= len(sums) * len(x) or not torch.backends.mkl.is_available():
        return (dense_of(w, len(x), dtype) @ x.to(dtype)).to(torch.int32)
    return (_csr(w, len(x), dtype) @ x.to(dtype)).to(torch.int32)[: w.rows]


def _csr(w: Vectors, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns the matrix, whole strips of it: row v of a strip has the elements v of its vectors."""
    numbers, strips, begins = unpack(w.values, w.bits), strips_of(w.offsets, len(w.column_index)), w.offsets.long()
    V, counts = numbers.shape[1], begins.diff()
    begin = begins[strips] * (V - 1) + torch.arange(len(strips))
    places = begin[:, None] + torch.arange(V) * counts[strips][:, None]
    values, index = torch.empty(numbers.numel(), dtype=dtype), torch.empty(numbers.numel(), dtype=torch.int64)
    values[places], index[places] = numbers.to(dtype), w.column_index.long()[:, None].expand_as(places)
    ends = torch.nn.functional.pad(counts.repeat_interleave(V).cumsum(0), (1, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is called a beta
        return torch.sparse_csr_tensor(ends, index, values, (len(counts) * V, columns), check_invariants=False)


def sampled_matmul_ref(q: Tensor, k: Tensor, column_index: Tensor, offsets: Tensor, block: int) -> Tensor:
    """q int8 [M, E], k int8 [N, E] -> rows of q k' in vectors, int32 [n, block]

    All of the product is made: the rows of k that vectors need would be n E numbers.
    """
    strips = len(offsets) - 1
    q = torch.nn.functional.pad(q.double(), (0, 0, 0, strips * block - len(q)))
    product = (q @ k.double().t()).to(torch.int32).view(strips, block, len(k))
    return product[strips_of(offsets, len(column_index)), :, column_index.long()].contiguous()
