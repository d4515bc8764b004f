"""The large entries of a vector: a bucket of 25 MiB and one in a hundred of it, odd sizes, bf16, beyond 2^31."""

import torch

from bench.compile._compile import Call, meta
from tpfuse.kernels.selection import launch_select

ELEMENTS = dict(_mark_kernel=lambda c: c["BLOCK"], _place_kernel=lambda c: c["BLOCK"])
SHAPES = [
    (6553600, 81920, torch.float32),
    (6553601, 81921, torch.float32),
    (6553600, 81920, torch.bfloat16),
    (3 << 30, 40 << 20, torch.float32),
]


def select(n: int, most: int, dtype: torch.dtype):
    return lambda: launch_select(meta(n, dtype=dtype), 0.5, most)


CALLS = {f"n={n} most={most} {str(dtype)[6:]}": Call(select(n, most, dtype), ELEMENTS) for n, most, dtype in SHAPES}
