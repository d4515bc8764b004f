"""``torch.autograd.Function`` with a shorter way in and out, for Functions that are called once an op.

torch looks at every argument for wrappers that a functorch transform left behind, and runs every backward inside two
contexts of Python; with the argument lists of fused ops each costs more host time than the op's own checks.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _C

Observer = Callable[[type, tuple[Any, ...], Any], None]  # a Function, its arguments, its outputs
_observers: list[Observer] = []


class Function(torch.autograd.Function):
    """torch's Function with another ``apply``, and under functorch transforms (``torch.func``) is torch's."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if _C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]  # of C, which has no stub


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """In it, ``observer`` sees each call of a Function as it returns, and a block runs its ops one by one."""
    usual = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any) -> Any:
        outputs = usual.__func__(cls, *args)
        observer(cls, args, outputs)
        return outputs

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()
        Function.apply = usual  # type: ignore[method-assign]


def is_observed() -> bool:
    """True inside :func:`observed`."""
    return bool(_observers)


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
