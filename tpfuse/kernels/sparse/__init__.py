"""Sparse matrices of integers in column vectors, after Magicube (Li, Osawa, Hoefler 2022, arXiv:2209.06979).

cost       what its kernels move and compute; the density at which they pay over a dense product
format     Pattern, SparseInt: where vectors stand, and their integers
op         the products of a sparse and a dense matrix, and of two dense ones where a pattern has vectors
reference  both in plain torch, and on a CPU
triton     Triton: both
"""

from .format import Pattern, SparseInt
from .op import sampled_matmul, sparse_matmul

__all__ = ["Pattern", "SparseInt", "sampled_matmul", "sparse_matmul"]
