"""Gradients that are applied one step late, and who holds those of a model.

    w_(t+1) = w_t - update(g_(t-1))        g_t = grad f_t(w_t)

``f_t`` is the loss of batch t, and w_1 = w_0.  The pipeline schedule 2bw makes them, and one process with
tpfuse.DelayedGradients; a checkpoint hands the gradient that waits from one to the other.
"""

import weakref
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from ..kernels.runtime.errors import check


class Pending(NamedTuple):
    """The loss of a batch, and its complete gradients by parameter, which no optimizer has seen."""

    loss: Tensor
    gradients: Mapping[nn.Parameter, Tensor]

    def add_to_grad(self) -> Tensor:
        """Adds the gradients to ``.grad``; returns the loss."""
        for p, gradient in self.gradients.items():
            p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        return self.loss


class Delay(Protocol):
    """What delays the gradients of a model by one step."""

    @property
    def waits(self) -> bool:
        """Whether there are gradients that no optimizer has seen."""

    def finish(self) -> Pending | None:
        """Completes the gradients that wait, and keeps them waiting; None where there are none."""

    def resume(self, pending: Pending | None) -> None:
        """Waits with these gradients in place of its own."""


_delays: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Delay]]" = weakref.WeakKeyDictionary()


def register(name: str, model: nn.Module, delay: Delay) -> None:
    """Makes ``delay``, of the public class or call ``name``, that of a model, for as long as it lives.

    ValueError where gradients wait in the one before.
    """
    earlier = delay_of(model)
    waits = earlier is not None and earlier.waits
    check(not waits, f"{name}: gradients of this model wait in a {type(earlier).__name__}; call its drain() before")
    _delays[model] = weakref.ref(delay)


def delay_of(model: nn.Module) -> Delay | None:
    delay = _delays.get(model)
    return None if delay is None else delay()
