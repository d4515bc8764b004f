"""Products with a sparse matrix of integers, after Magicube (Li, Osawa, Hoefler 2022, arXiv:2209.06979).

    sparse_matmul    y = w x             w [M, K] sparse, of 4, 8 or 16 bits; x [K, N] int8; y [M, N] int32
    sampled_matmul   y = (q k')[places]  q [M, E], k [N, E] int8; y int32 [n, V], where a sparse matrix has vectors

Both are exact.  There is no gradient.
"""

import torch
from torch import Tensor

from ..runtime.errors import check
from ..runtime.op import GEMM, op
from ..runtime.rules import MAX_SIZE, described
from .cost import sampled_matmul_cost, sparse_matmul_cost
from .format import BYTE, SparseInt
from .reference import sampled_matmul_ref, sparse_matmul_cpu, sparse_matmul_ref
from .triton import sampled_matmul_launch, sparse_matmul_launch

WIDEST = MAX_SIZE // BYTE**2  # of q and k

sparse_matmul_op = op(
    sparse_matmul_ref,
    kind=GEMM,
    cpu=sparse_matmul_cpu,
    launch=sparse_matmul_launch,
    fake=lambda w, x: x.new_empty(w.rows, x.shape[1], dtype=torch.int32),
    cost=sparse_matmul_cost,
)
sampled_matmul_op = op(
    sampled_matmul_ref,
    kind=GEMM,
    launch=sampled_matmul_launch,
    fake=lambda q, k, column_index, offsets, block: q.new_empty(len(column_index), block, dtype=torch.int32),
    cost=sampled_matmul_cost,
)


def _check_operand(name: str, x: Tensor, rows: int, device: torch.device) -> None:
    good = x.dim() == 2 and x.dtype == torch.int8 and len(x) == rows and x.device == device
    check(good, f"{name} must be int8 [{rows}, .] on {device}, where the sparse matrix is, got {described(x)}")


def sparse_matmul(w: SparseInt, x: Tensor) -> Tensor:
    """Returns w x, int32 [M, N], exactly; w's scale is not applied.

    w [M, K], x int8 [K, N], read in place where its last stride is 1.  No sum overflows, which was checked when w was
    made.  Raises ValueError for another shape, dtype or device.
    """
    _check_operand("sparse_matmul: x", x, w.columns, w.vectors.values.device)
    return sparse_matmul_op(w.vectors, x)


def sampled_matmul(q: Tensor, k: Tensor, pattern: SparseInt) -> Tensor:
    """Returns the elements of q k' where ``pattern`` has vectors, int32 [n, V], exactly.

    q int8 [M, E], k int8 [N, E] for a pattern [M, N], whose integers do not matter.  Rows of its last strip beyond M
    are 0.  Raises ValueError for other shapes, dtypes or devices, and for E above 131071: a sum may overflow.
    """
    vectors, E = pattern.vectors, q.shape[-1]
    for name, x, n in (("q", q, vectors.rows), ("k", k, pattern.columns)):
        _check_operand(f"sampled_matmul: {name}", x, n, vectors.values.device)
    check(k.shape[1] == E, f"sampled_matmul: q and k must be equally wide, got {E} and {k.shape[1]}")
    check(E <= WIDEST, f"sampled_matmul: q must have at most {WIDEST} columns, or a sum may overflow, got {E}")
    return sampled_matmul_op(q, k, *vectors[1:3], pattern.block)
