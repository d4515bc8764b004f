"""Faster ways on a CPU of a computation by leaves, taken where they have been seen to give its bits.

One GEMM over all columns is faster than one a leaf, and in most libraries has the same bits: the order of a sum over K
does not depend on N.  None promises it.  A way is therefore tried once a process for each set of shapes, strides and
dtypes, on random numbers: a library picks its kernel by these, so that an order of summation that differs shows in a
large part of the elements.  The result is that of the definition on every rank, whichever way a rank takes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .op import tensors

VECTOR = 64  # elements: no loop of torch takes more at a time (two registers of 512 bits in 16-bit numbers)
_TRIED = 4096  # sets of shapes that are remembered


class _Strided(NamedTuple):
    """What a library reads of a tensor before it chooses a kernel."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Shortcut:
    """A call of ``definition`` that takes the way of ``quick`` where that has the definition's bits.

    Both are functions of modules.  They take tensors, records of such, and hashable values.  On other devices than a
    CPU ``kernel`` is called, which has the same bits at every split by itself.
    """

    def __init__(self, definition: Callable[..., Any], quick: Callable[..., Any], kernel: Callable[..., Any]):
        self.definition, self.quick, self.kernel = definition, quick, kernel
        self._agree = functools.lru_cache(maxsize=_TRIED)(self._try)

    def __call__(self, *args: Any, stand_in: tuple[Any, ...] | None = None) -> Any:
        """Returns definition(*args).  ``stand_in``: the arguments to try both on, if numbers in ``args`` that choose no
        kernel would make for many trials."""
        if not next(tensors(args)).is_cpu:
            return self.kernel(*args)
        agree = self._agree(_layout(args if stand_in is None else stand_in), torch.get_num_threads())
        return (self.quick if agree else self.definition)(*args)

    def _try(self, layouts: tuple[Any, ...], threads: int) -> bool:
        generator = torch.Generator().manual_seed(0)
        args = _random(layouts, generator)
        with torch.no_grad():
            return all(map(_equal, _results(self.definition(*args)), _results(self.quick(*args))))


def vectors(columns: int) -> bool:
    """Tells whether torch's elementwise loops over rows of so many columns, or over several such side by side, treat
    every element alike; the last few of a tensor, or of a thread's share, they round in another way."""
    return columns % VECTOR == 0 and torch.get_num_threads() == 1


def _layout(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return _Strided(arg.shape, arg.stride(), arg.dtype)
    if isinstance(arg, tuple):
        return type(arg)(*map(_layout, arg)) if hasattr(arg, "_fields") else tuple(map(_layout, arg))
    return arg


def _random(layout: Any, generator: torch.Generator) -> Any:
    """Returns random numbers of a floating dtype; True and 0, which every mask and index may be, of others."""
    if isinstance(layout, _Strided):
        x = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
        if layout.dtype.is_floating_point:
            return x.normal_(generator=generator)
        return x.fill_(layout.dtype == torch.bool)
    if isinstance(layout, tuple):
        parts = [_random(part, generator) for part in layout]
        return type(layout)(*parts) if hasattr(layout, "_fields") else tuple(parts)
    return layout


def _results(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))  # as bits: -0 is not 0
