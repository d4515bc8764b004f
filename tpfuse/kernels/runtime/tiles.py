"""Tiles of rows (``TensorParallel(batch_invariant=T)``): a row has the same bits whatever is computed beside it.

A GEMM of another number of rows may add in another order.  So every one has exactly T rows, the last tile filled up
with zeros; a row's bits then depend on its place in the tile at most, and :func:`check_alike` tries that out.
"""

import functools
from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .errors import check
from .shortcut import telling

_ALIKE: set[Hashable] = set()  # the products that have been tried out


def row_tiles(x: Tensor, tile: int) -> list[Tensor]:
    """Returns x [M, K] in tiles of exactly so many rows, the last one filled up with zeros."""
    tiles = list(x.split(tile))
    tiles[-1] = F.pad(tiles[-1], (0, 0, 0, tile - len(tiles[-1])))
    return tiles


def in_tiles(f: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, tile: int) -> tuple[Tensor, ...]:
    """Returns f(x), whose results have rows as x [M, K] has or none, made of tiles of so many; of x at once for 0."""
    if tile == 0:
        return f(x)
    results = zip(*map(f, row_tiles(x, tile)), strict=True)
    return tuple((ys[0] if len(ys) == 1 else torch.cat(ys))[: len(x)] for ys in results)


_SUMS = torch.float32, torch.float64
_FUNCTIONS = {  # that forward passes take of tensors of any number of rows, and the dtypes in which they do
    torch.exp: _SUMS,
    torch.log: _SUMS,
    torch.rsqrt: _SUMS,
    torch.cos: _SUMS,
    torch.sin: _SUMS,
    torch.tanh: (*_SUMS, torch.bfloat16),
}


@functools.cache
def _check_functions() -> None:
    """Raises RuntimeError where a function of torch's gives an element other bits at another place."""
    x = torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    for f, dtypes in _FUNCTIONS.items():
        for numbers in map(x.to, dtypes):
            right = f(numbers)
            if not all(torch.equal(f(numbers[i:j]), right[i:j]) for i in (0, 5) for j in range(i + 1, i + 33)):
                raise RuntimeError(
                    f"batch_invariant does not hold on this processor: torch.{f.__name__} gives a number in"
                    f" {str(numbers.dtype)[6:]} other bits at another place of a tensor"
                )


def check_alike(name: str, multiply: Callable[[Tensor, Tensor], Tensor], tile: int, weight: Tensor) -> None:
    """Raises RuntimeError, in the name of an op, where ``multiply`` gives equal rows of a tile unequal bits.

    ``multiply`` takes x [tile, K] and w [N, K], of the shape and dtype of ``weight``.  Each op, shape and number of
    threads is tried once, with rows that show an order of summation; nothing is tried while torch traces or counts.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return
    key = name, tile, weight.shape, weight.dtype, torch.get_num_threads()
    if key in _ALIKE:
        return
    _check_functions()
    generator = torch.Generator().manual_seed(0)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    factors = (telling((weight.shape[1],), negated=s, generator=generator, dtype=dtype) for s in (False, True))
    x, w = (t.to(weight.dtype) for t in factors)
    rows, w = x.repeat(2 * tile, 1), w.repeat(len(weight), 1)  # two tiles, which begin at other addresses
    y = torch.cat([multiply(rows_of_one, w) for rows_of_one in rows.split(tile)])
    if not torch.equal(y, y[:1].expand_as(y)):
        raise RuntimeError(
            f"{name}: batch_invariant={tile} does not hold on this processor: a product with {tuple(weight.shape)} in"
            f" {str(weight.dtype)[6:]} gives equal rows of a tile unequal bits; use another tile"
        )
    _ALIKE.add(key)


def check_tiles_device(name: str, x: Tensor) -> None:
    """Raises the ValueError of an op whose kernels have no such tiles."""
    check(not x.is_cuda, f"{name}: batch_invariant is not built for GPUs yet, got a tensor on {x.device}")
