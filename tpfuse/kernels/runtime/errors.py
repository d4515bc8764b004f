"""The checks by which a public function refuses an argument."""

import torch
from torch import Tensor

_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64


def check(condition: bool, message: str) -> None:
    """Raises ``ValueError(message)`` unless ``condition`` holds; it names the argument, the rule and what came."""
    if not condition:
        raise ValueError(message)


def check_floating(name: str, label: str, x: Tensor) -> None:
    """Raises ValueError unless x has a dtype that kernels compute in: torch's functions take fewer or more of others,
    by device."""
    if x.dtype not in _DTYPES:  # a message made in advance would cost more than the check
        raise ValueError(f"{name}: {label} must be float32, bfloat16, float16 or float64, got {x.dtype}")


def check_rows(name: str, x: Tensor, label: str = "x") -> None:
    """Raises ValueError unless x is [..., D] of a dtype that kernels compute in."""
    if x.dim() == 0:
        raise ValueError(f"{name}: {label} must be [..., D], got a tensor without dimensions")
    check_floating(name, label, x)
