"""``torch.autograd.Function`` with a shorter way in and out, for Functions that are called once an op.

torch looks at every argument for wrappers that a functorch transform left behind, and runs every backward inside two
contexts of Python; with the argument lists of fused ops each costs more host time than the op's own checks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch.autograd.function import once_differentiable as _once_differentiable


class Function(torch.autograd.Function):
    """As torch's; only ``apply`` differs, and under functorch transforms (``torch.func``) is torch's."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if _C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]  # of C, which has no stub


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's: a second derivative raises RuntimeError.  Where no graph of the backward is recorded, which is
    wherever ``create_graph`` was not asked for, nothing needs to be guarded."""
    guarded = _once_differentiable(backward)

    def run(ctx: Any, *gradients: Any) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run
