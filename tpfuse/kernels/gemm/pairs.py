"""Gate and up of a gated activation on a CPU: columns (gate, up, gate, up, ..) taken apart, and put together.

torch copies every second element one by one.  A pair is one word of twice the width, on which its loops are vectorised:
a bf16 number is the upper half of the fp32 number that it widens to, and a pair of fp32 numbers is a complex one.
"""

import sys

import torch
from torch import Tensor

from ..runtime.op import acc_dtype

_LITTLE = sys.byteorder == "little"  # a pair's first number is its word's lower half


def apart(z: Tensor) -> tuple[Tensor, Tensor]:
    """z [M, 2N] -> gate, up [M, N], new, contiguous and widened to fp32 (fp64 of fp64)."""
    words = _LITTLE and z.is_contiguous() and z.storage_offset() % 2 == 0
    if words and z.dtype == torch.bfloat16:
        pairs = z.view(torch.int32)
        return (pairs << 16).view(torch.float32), (pairs & -(1 << 16)).view(torch.float32)
    if words and z.dtype == torch.float32:
        pairs = z.view(torch.int64)
        return pairs.to(torch.int32).view(torch.float32), (pairs >> 32).to(torch.int32).view(torch.float32)
    gate, up = z.to(acc_dtype(z)).unflatten(1, (-1, 2)).unbind(2)
    return gate.contiguous(), up.contiguous()


def together(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [M, N] of fp32 or fp64 -> [M, 2N], new and contiguous."""
    return torch.view_as_real(torch.complex(gate, up)).flatten(1)
