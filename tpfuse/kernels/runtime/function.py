"""``torch.autograd.Function`` with a shorter way in and out, for Functions that are called once an op.

torch looks at every argument for wrappers that a functorch transform left behind, and runs every backward inside two
contexts of Python; with the argument lists of fused ops each costs more host time than the op's own checks.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _C


class Function(torch.autograd.Function):
    """torch's Function with another ``apply``, and under functorch transforms (``torch.func``) is torch's."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if _C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]  # of C, which has no stub


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses to run ``backward`` where a graph of it is recorded, which ``create_graph`` asks for: RuntimeError.

    torch's own refuses only to differentiate a result that depends on the incoming gradient, and gives it detached
    where it depends on saved tensors alone: a penalty on gradients would have lost its own gradient without a word.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"tpfuse: {backward.__module__}.{backward.__qualname__} has no second derivative, and create_graph=True"
                " asks for one; take gradients of gradients through plain torch layers, or leave create_graph off"
            )
        return backward(ctx, *gradients)

    return run
