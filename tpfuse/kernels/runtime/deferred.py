"""Gradients of weights handed over as work, to be made later: what a split backward pass of a pipeline needs.

Inside ``store.deferring()`` an op whose input needs a gradient takes its weights detached.  Its backward makes the
gradient of the input, and leaves the GEMM of each weight's gradient in the store; run, it goes to what the op was given
as its weight, through casts, views and hooks, as autograd would have sent it.  A weight whose gradient is added in fp32
(:class:`tpfuse.MainGrad`) is added to at that time.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .captures import Receive, captures
from .main_grad import Main, mains


class WeightGradients:
    """Work that backward has left, in its order."""

    def __init__(self) -> None:
        self._work: list[tuple[Callable[[], None], Any]] = []

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """In it, forward passes of this thread hand their weights' gradients over to this store."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def add(self, work: Callable[[], None], tensors: Any) -> None:
        """``tensors``: the tensors that the work keeps until it is run, in any nesting of tuples."""
        self._work.append((work, tensors))

    def held(self) -> list[Tensor]:
        """Returns the tensors that are kept for the work handed over since the last :meth:`take`."""
        return [x for _, tensors in self._work for x in tree_leaves(tensors) if isinstance(x, Tensor)]

    def take(self) -> Callable[[], None]:
        """Returns what makes the gradients handed over since the last call, once."""
        work, self._work = [work for work, _ in self._work[::-1]], []

        def run() -> None:
            with torch.no_grad():
                while work:
                    work.pop()()

        return run

    def __len__(self) -> int:
        return len(self._work)


_current: contextvars.ContextVar[WeightGradients | None] = contextvars.ContextVar("weight gradients", default=None)


class Later(NamedTuple):
    """The work that one op hands over: its store, and the tensors that its gradients go to."""

    store: WeightGradients
    weight: Tensor | None
    bias: Tensor | None
    out_weight: Tensor | None

    @property
    def mains(self) -> tuple[Main | None, ...] | None:
        """The places in fp32 of the weight and of the out_weight."""
        return mains(self.weight, self.out_weight)

    @property
    def captures(self) -> tuple[Receive | None, ...] | None:
        """The functions that receive the matrices of the gradients of the weight and of the out_weight."""
        return captures(self.weight, self.out_weight)

    def needs_gradient(self, name: str) -> bool:
        """Returns whether the tensor ``name`` is to get a gradient."""
        x = getattr(self, name)
        return x is not None and x.requires_grad

    def give(self, name: str, gradient: Tensor | None) -> None:
        """Sends a gradient on, now."""
        if gradient is not None and self.needs_gradient(name):
            torch.autograd.backward([getattr(self, name)], [gradient])

    def keep(self, name: str, gradient: Tensor | None) -> None:
        """Hands over a gradient that has been made already."""
        if gradient is not None and self.needs_gradient(name):
            self.store.add(lambda: self.give(name, gradient), gradient)


def deferring() -> bool:
    """Returns whether forward passes hand their weights' gradients over."""
    return not torch.compiler.is_compiling() and _current.get() is not None


def deferred(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, out_weight: Tensor | None = None
) -> tuple[Later | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns what an op is to hand over, and its weight, bias and out_weight, detached where it does.

    It is None where the op makes its gradients at once: also where nothing before it waits for a gradient of ``x``, and
    its backward may never be called.
    """
    store = None if torch.compiler.is_compiling() else _current.get()
    if store is None or not x.requires_grad or not torch.is_grad_enabled():
        return None, weight, bias, out_weight
    deferral = Later(store, weight, bias, out_weight)
    if not any(map(deferral.needs_gradient, ("weight", "bias", "out_weight"))):
        return None, weight, bias, out_weight
    weight, bias, out_weight = (None if w is None else w.detach() for w in (weight, bias, out_weight))
    return deferral, weight, bias, out_weight
