"""The reference is exact because fp64 is: it says no more and no less than integers do."""

import torch

from tpfuse.kernels import SparseInt
from tpfuse.kernels.runtime.op import OPS


def test_sums_beyond_fp32_are_exact():
    """2^31 - 2^14 and one less, which fp32 does not tell apart."""
    a = torch.full((1, 131071), -128)
    x = torch.full((131071, 2), -128, dtype=torch.int8)
    w = SparseInt.from_dense(a)
    x[0, 1] = -127
    for name in ("reference", "cpu"):
        y = getattr(OPS["sparse_matmul"], name)(w.vectors, x)
        assert y.tolist() == [[131071 << 14, (131071 << 14) - 128]]
