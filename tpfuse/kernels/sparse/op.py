"""Products with a sparse matrix of integers, after Magicube (Li, Osawa, Hoefler 2022, arXiv:2209.06979).

    sparse_matmul    y = w x             w [M, K] sparse, of 4, 8 or 16 bits; x [K, N] int8; y [M, N] int32
    sampled_matmul   y = (q k')[places]  q [M, E], k [N, E] int8; y int32 [n, V], at the vectors of a pattern

Both are exact.  There is no gradient.
"""

import torch
from torch import Tensor

from ..runtime.errors import check
from ..runtime.op import GEMM, op
from ..runtime.rules import MAX_SIZE, described
from .cost import sampled_matmul_cost, sparse_matmul_cost
from .format import BYTE, Pattern, SparseInt
from .reference import sampled_matmul_cpu, sampled_matmul_ref, sparse_matmul_cpu, sparse_matmul_ref
from .triton import sampled_matmul_launch, sparse_matmul_launch

MOST_COLUMNS = MAX_SIZE // BYTE**2  # of q and k

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
    cpu=sampled_matmul_cpu,
    launch=sampled_matmul_launch,
    fake=lambda q, k, index, offsets, block: q.new_empty(index.shape[0], block, dtype=torch.int32),
    cost=sampled_matmul_cost,
)


def _check_operand(name: str, x: Tensor, form: str, at: Tensor) -> None:
    check(x.dim() == 2 and x.dtype == torch.int8, f"{name} must be int8 {form}, got {described(x)}")
    check(x.device == at.device, f"{name} is on {x.device}, and the sparse matrix on {at.device}")


def sparse_matmul(w: SparseInt, x: Tensor) -> Tensor:
    """Returns w x, int32 [M, N], exactly; w's scale is not applied.

    w [M, K], x int8 [K, N], read in place where its last stride is 1.  No sum overflows, which was checked when w was
    made.  Raises ValueError for another shape, dtype or device.
    """
    columns = w.shape[1]
    _check_operand("sparse_matmul: x", x, f"[{columns}, N]", w.values)
    check(len(x) == columns, f"sparse_matmul: x must have the {columns} rows that w has columns, got {len(x)}")
    return sparse_matmul_op(w.vectors, x)


def sampled_matmul(q: Tensor, k: Tensor, pattern: Pattern) -> Tensor:
    """Returns the elements of q k' at the vectors of a pattern, int32 [n, V], exactly.

    q int8 [M, E], k int8 [N, E] for a pattern of shape (M, N).  Rows of its last strip beyond M are 0.  Raises
    ValueError for other shapes, dtypes or devices, and for E above 131071, from where an int32 sum may overflow.
    """
    rows, columns = pattern.shape
    for name, x, n in (("q", q, rows), ("k", k, columns)):
        _check_operand(f"sampled_matmul: {name}", x, f"[{n}, E]", pattern.index)
        check(len(x) == n, f"sampled_matmul: {name} must have {n} rows as the pattern {pattern.shape}, got {len(x)}")
    E = q.shape[1]
    check(k.shape[1] == E, f"sampled_matmul: q and k must be equally wide, got {E} and {k.shape[1]}")
    check(
        E <= MOST_COLUMNS, f"sampled_matmul: q must have at most {MOST_COLUMNS} columns, or a sum may overflow, got {E}"
    )
    return sampled_matmul_op(q, k, pattern.index, pattern.offsets, pattern.block)
