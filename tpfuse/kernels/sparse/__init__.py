"""Sparse matrices of integers in column vectors, after Magicube (Li, Osawa, Hoefler 2022, arXiv:2209.06979).

cost       what its kernels move and compute; the density at which they pay over a dense product
format     SparseInt: where vectors stand, and their integers
op         a sparse matrix times a dense one, and two dense ones where a sparse one has vectors
reference  both in plain torch, and on a CPU
triton     Triton: both
"""

from .format import SparseInt
from .op import sampled_matmul, sparse_matmul

__all__ = ["SparseInt", "sampled_matmul", "sparse_matmul"]
