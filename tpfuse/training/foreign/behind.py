"""Standing behind a function of torch's, so that everybody who has imported it already calls what stands there.

A method is replaced on its class.  A function that torch decorates keeps the function it decorates in a cell, and
that is replaced: the decorated object stays, with its signature, its docstring and its pickles.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

Around = Callable[..., Any]  # (the original, *args, **kwargs) -> what a call returns
_CELL = "func"  # the name that torch's decorators give to what they decorate


class Behind:
    """``around`` in the place of a function.  Equal to that function: torch files a module's states under it."""

    def __init__(self, original: Callable[..., Any], around: Around):
        functools.update_wrapper(self, original)
        self.original, self.around = original, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.original, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original

    def __hash__(self) -> int:
        return hash(self.original)


def stand_behind_method(owner: type, name: str, around: Around) -> None:
    """Replaces a method by one that calls ``around(original, self, ...)``; a warning where torch has none."""
    found = owner.__dict__.get(name)
    original = found.__func__ if isinstance(found, classmethod) else found
    if not callable(original):
        return _absent(f"{owner.__qualname__}.{name}")

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, classmethod(method) if isinstance(found, classmethod) else method)


def stand_behind_function(decorated: Any, around: Around) -> None:
    """Replaces what ``decorated`` decorates by a call of ``around(original, *args, **kwargs)``; else a warning."""
    names: tuple[str, ...] = getattr(getattr(decorated, "__code__", None), "co_freevars", ())
    if _CELL not in names:
        return _absent(getattr(decorated, "__qualname__", repr(decorated)))
    cell = decorated.__closure__[names.index(_CELL)]
    cell.cell_contents = Behind(cell.cell_contents, around)


def _absent(what: str) -> None:
    warnings.warn(
        f"tpfuse: {what} of torch {torch.__version__} is not what tpfuse knows; given parameters that are split over"
        " tensor-parallel ranks, it may compute something else in silence",
        stacklevel=2,
    )
