"""Inputs of linear layers and gradients of their outputs, for :class:`tpfuse.KFAC`.

An op that multiplies by a weight looks the weight up here in forward.  If the two matrices of its gradient are
captured, the op's backward hands them over right before it multiplies them.  A weight that is a view of a parameter, or
its copy under autocast, stands for the parameter.  Compiled graphs find nothing.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Receive = Callable[[Tensor, Tensor], None]  # of dy [M, N] and x [M, K]

_CAPTURE, _CAST_OF = "_tpfuse_capture", "_tpfuse_cast_of"  # attributes: of a parameter; of its copy, the parameter
_receivers: "weakref.WeakSet[Any]" = weakref.WeakSet()  # the objects of the bound methods


class _Capture:
    """A parameter's attribute, which a file and a copy of the parameter leave behind."""

    def __init__(self, receive: Receive):
        self.receive = weakref.WeakMethod(receive)

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()  # of an unpickled parameter; torch.load(weights_only=True) takes a set


def capture(p: Tensor, receive: Receive) -> None:
    """Hands the matrices of the parameter's gradients to ``receive``, a bound method, as long as its object lives.

    The object has the methods ``forget``, of :func:`forget_captured`, and ``keep``, ``restore`` and ``release``, of
    :func:`all_or_nothing`.
    """
    _receivers.add(receive.__self__)  # type: ignore[attr-defined]
    setattr(p, _CAPTURE, _Capture(receive))


def capturing() -> bool:
    return len(_receivers) > 0


def captured_by(p: Tensor) -> Receive | None:
    """Returns what receives the matrices of a parameter's gradients; None for none."""
    attribute: _Capture | None = getattr(p, _CAPTURE, None) or None
    return None if attribute is None else attribute.receive()


def forget_captured(parameters: Iterable[Tensor]) -> None:
    """Drops what has been captured of gradients that are not to be stepped on."""
    for receiver in _receivers_of(parameters):
        receiver.forget()


@contextlib.contextmanager
def all_or_nothing(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Makes what has been captured, and done with it, as it was before where an error is raised in here."""
    receivers = _receivers_of(parameters)
    for receiver in receivers:
        receiver.keep()
    try:
        yield
    except BaseException:
        for receiver in receivers:
            receiver.restore()
        raise
    finally:
        for receiver in receivers:
            receiver.release()


def _receivers_of(parameters: Iterable[Tensor]) -> list[Any]:
    """Returns the objects whose bound methods receive the matrices of these parameters' gradients."""
    if not _receivers:
        return []
    methods: list[Any] = [captured_by(p) for p in parameters]
    return [method.__self__ for method in methods if method is not None]


def captures(*weights: Tensor | None) -> tuple[Receive | None, ...] | None:
    """Returns what receives the matrices of each weight's gradient; None in all if nothing is captured."""
    if torch.compiler.is_compiling() or not _receivers:
        return None
    receivers = tuple(None if w is None else captured_by(_parameter(w)) for w in weights)
    return None if receivers.count(None) == len(receivers) else receivers


def mark_cast(result: Tensor, w: Tensor) -> None:
    """Makes ``result``, a copy of a weight in another dtype, stand for the weight's parameter."""
    if _receivers and captured_by(p := _parameter(w)) is not None:
        setattr(result, _CAST_OF, p)


def _parameter(w: Tensor) -> Tensor:
    """Returns the tensor that w has all elements of, in its order; w itself if it is no whole view and no copy."""
    base = w if w._base is None or w._base.numel() != w.numel() else w._base
    return getattr(base, _CAST_OF, base)
