"""Faster ways on a CPU of a computation by leaves, taken where they have been seen to give its bits.

One GEMM over all columns is faster than one a leaf, and often has the same bits: the order of a sum over K need not
depend on N.  No library promises it, and some sums do depend.  A way is therefore tried once a process for each set of
shapes, strides, dtypes and alignments, by which a library picks its kernel.  It is tried on numbers whose sums vanish
but for what rounding has left: another order leaves something else, which rounding to 16 bits then does not hide.  The
result is that of the definition on every rank, whichever way a rank takes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .op import has_numbers, launched

_ALIGNED = 64  # bytes, of a cache line and of the widest vector
_TRIED = 4096  # sets of shapes that are remembered
_DRAWS = 2
_SMALL = 2.0**-6  # of the numbers of a bias, about what rounding leaves of sums of telling numbers


class _Strided(NamedTuple):
    """What a library reads of a tensor before it chooses a kernel."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # bytes from a boundary of _ALIGNED

    @classmethod
    def of(cls, x: Tensor) -> "_Strided":
        return cls(x.shape, x.stride(), x.dtype, x.data_ptr() % _ALIGNED)

    def filled(self, numbers: Tensor) -> Tensor:
        """Returns a tensor like this, of ``numbers``."""
        extent = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.stride, strict=True))
        memory = torch.empty(max(extent, 0) + _ALIGNED, dtype=self.dtype, device="cpu")
        start = (self.offset - memory.data_ptr()) % _ALIGNED // memory.element_size()
        return memory.as_strided(self.shape, self.stride, start).copy_(numbers)


class Shortcut:
    """A call of ``definition`` that takes the way of ``quick`` where that has the definition's bits.

    Both are functions of modules, which multiply matrices, or sum the columns of one, and take hashable values beside
    them.  Where launchers run, ``kernel`` is called, which has the same bits at every split by itself.
    """

    def __init__(self, definition: Callable[..., Any], quick: Callable[..., Any], kernel: Callable[..., Any]):
        self.definition, self.quick, self.kernel = definition, quick, kernel
        self._agree = functools.lru_cache(maxsize=_TRIED)(self._try)

    def __call__(self, *args: Any) -> Any:
        """Returns definition(*args)."""
        x: Tensor = args[0]
        if launched(x):
            return self.kernel(*args)
        if not has_numbers(x):  # nothing can be tried
            return self.definition(*args)
        agree = self._agree(tuple(map(_layout, args)), torch.get_num_threads())
        return (self.quick if agree else self.definition)(*args)

    def _try(self, layouts: tuple[Any, ...], threads: int) -> bool:
        with _disable_current_modes(), torch.no_grad():
            return all(self._agree_on(layouts, seed) for seed in range(_DRAWS))

    def _agree_on(self, layouts: tuple[Any, ...], seed: int) -> bool:
        args = _telling(layouts, torch.Generator().manual_seed(seed))
        return all(map(_equal, _results(self.definition(*args)), _results(self.quick(*args))))


def _layout(arg: Any) -> Any:
    return _Strided.of(arg) if isinstance(arg, Tensor) else arg


def _telling(layouts: tuple[Any, ...], generator: torch.Generator) -> list[Any]:
    """Returns arguments of a product, or of a sum of columns, that show the order in which it was added."""
    matrices = [i for i, layout in enumerate(layouts) if isinstance(layout, _Strided) and len(layout.shape) > 1]
    args = []
    for i, layout in enumerate(layouts):
        if isinstance(layout, _Strided):
            dtype = torch.promote_types(layout.dtype, torch.float32)
            if i in matrices:
                numbers = telling(layout.shape, negated=i == matrices[-1], generator=generator, dtype=dtype)
            else:  # beside what rounding leaves
                numbers = torch.randn(layout.shape, generator=generator, dtype=dtype, device="cpu") * _SMALL
            args.append(layout.filled(numbers))
        else:
            args.append(layout)
    return args


def telling(shape: tuple[int, ...], *, negated: bool, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Returns random numbers of many sizes, of which each index of a dimension shares its own with another one, negated
    or not.  They have all bits of ``dtype``, fp32 or fp64: products of shorter ones would be exact.

    Of two factors one of which is negated a sum over any dimension is 0, and what is left of it is its roundings.  The
    partners are the same for all dimensions of one size.  The odd one of an odd size has none, and is 0.
    """
    numbers = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    exponents = torch.rand(shape, generator=generator, dtype=dtype, device="cpu") * 16 - 8
    numbers *= torch.exp2(exponents)  # so that sums are rounded
    for dim, n in enumerate(shape):
        if n == 1:
            continue
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n), device="cpu")
        left, right = order[: n // 2], order[n // 2 : n - n % 2]
        numbers.index_copy_(dim, right, numbers.index_select(dim, left) * (-1 if negated else 1))
        numbers.index_fill_(dim, order[n - n % 2 :], 0)
    return numbers


def _results(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))  # as bits: -0 is not 0
