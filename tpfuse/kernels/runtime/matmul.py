"""Matrix products on a CPU, in 16 bits on any processor.

torch multiplies 16-bit matrices fast where oneDNN has kernels for them.  Elsewhere (bf16 on AVX2 alone, fp16 on most)
it adds element by element, tens of times slower than fp32 (``python -m bench.kernels.cpu``).  There operands are
widened to fp32, a block at a time, and the result is rounded once: products of 16-bit numbers are exact in fp32, so
that this differs from oneDNN's in the order of a sum alone.
"""

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .op import has_numbers
from .processor import SUPPORTED, multiplies, multiplies_tiles

BLOCK = 1 << 22  # elements of an operand that are widened at a time, 16 MiB in fp32
FEW = 4  # rows below which a product with w' is dot products, which torch adds fast in any dtype


def mm(a: Tensor, b: Tensor, bias: Tensor | None = None, place: Tensor | None = None) -> Tensor:
    """Returns a [M, K] times b [K, N], plus ``bias`` [N], in their dtype; written to ``place`` where that is given."""
    if not _widened(a, b) or (len(a) < FEW and b.stride(0) == 1):
        return torch.mm(a, b, out=place) if bias is None else torch.addmm(bias, a, b, out=place)
    (M, K), N = a.shape, b.shape[1]
    if place is None:
        place = a.new_empty(M, N)
    addend = None if bias is None else bias.float()
    for rows in _blocks(M, K):
        a_rows = a[rows].float()
        for columns in _blocks(N, K):
            b_columns = b[:, columns].float()
            if addend is None:
                place[rows, columns] = a_rows @ b_columns
            else:
                place[rows, columns] = torch.addmm(addend[columns], a_rows, b_columns)
    return place


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Returns x [M, K] times w' of w [N, K], plus b [N], in their dtype."""
    return mm(x, w.t(), b) if _widened(x, w) else F.linear(x, w, b)


def row(x: Tensor, w: Tensor, b: Tensor | None = None, place: Tensor | None = None) -> Tensor:
    """Returns one row x [1, K] times w' of w [N, K], plus b [N], in their dtype; written to ``place`` [1, N] where that
    is given.

    With AMX oneDNN multiplies a bf16 matrix by a vector faster than by a matrix of one row; with its other instructions
    it takes as long or longer.
    """
    if not (x.dtype == torch.bfloat16 and w.is_contiguous() and multiplies(x.dtype) and multiplies_tiles()):
        return mm(x, w.t(), b, place)
    y = torch.mv(w, x[0], out=None if place is None else place[0]) if b is None else torch.addmv(b, w, x[0])
    return y[None] if place is None else place


def bmm(a: Tensor, b: Tensor, place: Tensor | None = None) -> Tensor:
    """Returns a [G, M, K] times b [G, K, N] in their dtype; written to ``place`` where that is given.

    Operands are widened whole: attention, which multiplies so, hands over blocks.
    """
    if not _widened(a, b):
        return torch.bmm(a, b, out=place)
    product = torch.bmm(a.float(), b.float())
    return product.to(a.dtype) if place is None else place.copy_(product)


def operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the operands of products that autograd records: in fp32 where torch would add them element by element."""
    return tuple(x.float() for x in tensors) if _widened(*tensors) else tensors


def _widened(x: Tensor, *factors: Tensor) -> bool:
    """Returns whether products of these are made in fp32: never of several dtypes, which torch refuses, of tensors that
    hold no numbers, whose memory is counted as that of any processor, nor in a graph that is compiled."""
    if x.dtype not in SUPPORTED or not x.is_cpu or not has_numbers(x):
        return False
    return all(factor.dtype == x.dtype for factor in factors) and not multiplies(x.dtype)


def _blocks(count: int, width: int) -> Iterator[slice]:
    """Yields slices of ``count`` rows of so many elements, each of at most BLOCK elements or of one row."""
    step = max(1, BLOCK // max(width, 1))
    step -= step % 64 if step > 64 else 0
    for start, stop in itertools.pairwise([*range(0, count, step), count]):
        yield slice(start, stop)
