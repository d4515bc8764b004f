"""Products of sparse integers in plain torch.

Sums are taken in floating point, where integers are exact: every partial sum, in whatever order, is below 2^31 in
magnitude, and fp64 holds integers up to 2^53.  On a CPU fp32, which holds them up to 2^24, is taken where no row can
add up to more; of 4 or 8 bits alone, which are exact as bf16 too, should torch be told to multiply fp32 in it.  A
matrix of few vectors is multiplied as CSR, by MKL, which takes longer than a dense product from a sixth on.
"""

import warnings

import torch
from torch import Tensor

from .format import BYTE, Vectors, dense_of, strips_of, unpack

EXACT = 1 << 24  # integers up to here are fp32
DENSE = 6  # a matrix with one element in so many, or more, is multiplied as a dense one
Positions = tuple[Tensor, Tensor, int]  # index, offsets, block of a pattern


def sparse_matmul_ref(w: Vectors, x: Tensor) -> Tensor:
    """x int8 [K, N] -> w x, int32 [M, N]"""
    return (dense_of(w, len(x), torch.float64) @ x.double()).to(torch.int32)


def sampled_matmul_ref(q: Tensor, k: Tensor, index: Tensor, offsets: Tensor, block: int) -> Tensor:
    """q int8 [M, E], k int8 [N, E] -> rows of q k' in vectors, int32 [n, block]"""
    return _sampled(q.double(), k.double(), (index, offsets, block))


def sparse_matmul_cpu(w: Vectors, x: Tensor) -> Tensor:
    numbers, strips = unpack(w.values, w.bits), strips_of(w.offsets, len(w.index))
    V, columns = numbers.shape[1], len(x)
    sums = torch.zeros(len(w.offsets) - 1, V, dtype=torch.int64).index_add_(0, strips, numbers.abs().long())
    exact = w.bits < 16 and int(sums.max() if sums.numel() else 0) * BYTE <= EXACT
    dtype = torch.float32 if exact else torch.float64
    if DENSE * len(w.index) >= len(sums) * columns or not torch.backends.mkl.is_available():
        return (dense_of(w, columns, dtype) @ x.to(dtype)).to(torch.int32)
    counts = w.offsets.diff().long()
    within = torch.arange(len(w.index)) - w.offsets.long()[strips]
    places = (w.offsets.long()[strips] * V + within)[:, None] + torch.arange(V) * counts[strips][:, None]
    values, index = torch.empty(numbers.numel(), dtype=dtype), torch.empty(numbers.numel(), dtype=torch.int64)
    values[places], index[places] = numbers.to(dtype), w.index.long()[:, None].expand_as(places)
    ends = torch.cat([counts.new_zeros(1), counts.repeat_interleave(V).cumsum(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is called a beta
        matrix = torch.sparse_csr_tensor(ends, index, values, (len(sums) * V, columns), check_invariants=False)
    return (matrix @ x.to(dtype)).to(torch.int32)[: w.rows]


def sampled_matmul_cpu(q: Tensor, k: Tensor, index: Tensor, offsets: Tensor, block: int) -> Tensor:
    dtype = torch.float32 if q.shape[1] * BYTE**2 <= EXACT else torch.float64
    return _sampled(q.to(dtype), k.to(dtype), (index, offsets, block))


def _sampled(q: Tensor, k: Tensor, positions: Positions) -> Tensor:
    """All of the product, and then its vectors: gathered rows of k would be n E numbers."""
    index, offsets, block = positions
    strips = len(offsets) - 1
    q = torch.nn.functional.pad(q, (0, 0, 0, strips * block - len(q)))
    product = (q @ k.t()).to(torch.int32).view(strips, block, len(k))
    return product[strips_of(offsets, len(index)), :, index.long()].contiguous()
