"""Sparse matrices of integers: strips of V rows, of which some columns stand as vectors of V integers.

    Pattern     index [n] the column of each vector, offsets [S + 1] where the vectors of each of S = ceil(M / V) strips
                begin, as in a CSR matrix whose elements are V x 1 blocks
    SparseInt   a pattern, and the integers [n, V] of 4, 8 or 16 bits in bytes, with a scale for each row

Bytes of values, int8 [planes, vectors in bytes, V]:

    bits   values            one byte or two hold
    4      [1, n / 2, V]     two vectors of a strip, 2j in the low half and 2j + 1 in the high one: n is even
    8      [1, n, V]         an integer
    16     [2, n, V]         low and high plane, both signed: high 256 + low

16 bits reach from -32640 to 32639, since both planes are signed.  Vectors that are zero are left out, but one in each
strip with an odd number of 4-bit vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.errors import check
from ..runtime.rules import MAX_SIZE, check_number, described, number

BLOCKS = 8, 16, 32, 64  # V
RANGES = {4: (-8, 7), 8: (-128, 127), 16: (-32640, 32639)}  # by bits
BYTE = 128  # the largest magnitude of an int8
_LEAST_SCALE = torch.finfo(torch.float32).tiny
LARGEST_SUM = MAX_SIZE // BYTE  # of the magnitudes of a row, so that its product with any int8 fits an int32


class Vectors(NamedTuple):
    """The matrix [rows, .] that kernels read."""

    values: Tensor  # int8, as above
    index: Tensor  # int32 [n]
    offsets: Tensor  # int32 [S + 1]
    rows: int
    bits: int


def strips_of(offsets: Tensor, n: int) -> Tensor:
    """Returns the strip of each of n vectors, int64 [n]."""
    strips = torch.arange(len(offsets) - 1, device=offsets.device)
    return strips.repeat_interleave(offsets.diff().long(), output_size=n)


def unpack(values: Tensor, bits: int) -> Tensor:
    """Bytes -> the integers int32 [n, V]."""
    if bits == 4:
        halves = values[0].to(torch.int32)
        return torch.stack([((halves & 15) ^ 8) - 8, halves >> 4], 1).flatten(0, 1)
    low, *high = values.to(torch.int32).unbind(0)
    return high[0] * 256 + low if high else low


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Integers [n, V] in the range of ``bits`` -> bytes."""
    if bits == 4:
        low, high = numbers.unflatten(0, (-1, 2)).unbind(1)
        return (high * 16 + (low & 15)).to(torch.int8)[None]
    if bits == 8:
        return numbers.to(torch.int8)[None]
    low = ((numbers + BYTE) & 255) - BYTE
    return torch.stack([low, (numbers - low) >> 8]).to(torch.int8)


@dataclass(frozen=True, eq=False)
class Pattern:
    """The places of vectors of ``block`` rows in a matrix of ``shape``.

    ``index`` int32 [n], the columns; ``offsets`` int32 [ceil(rows / block) + 1].  Both are checked when a pattern is
    made, for which a GPU is waited for.  Raises ValueError where they are no such places.
    """

    index: Tensor
    offsets: Tensor
    shape: tuple[int, int]
    block: int

    def __post_init__(self) -> None:
        (rows, columns), index, offsets = self.shape, self.index, self.offsets
        check(self.block in BLOCKS, f"Pattern: block must be 8, 16, 32 or 64 rows, got {self.block!r}")
        check(
            index.dim() == 1 and index.dtype == torch.int32 and index.is_contiguous(),
            f"Pattern: index must be contiguous int32 [n], got {described(index)}",
        )
        strips = -(-rows // self.block)
        check(
            offsets.shape == (strips + 1,) and offsets.dtype == torch.int32 and offsets.is_contiguous(),
            f"Pattern: offsets must be contiguous int32 [{strips + 1}] for {rows} rows in strips of {self.block}, got"
            f" {described(offsets)}",
        )
        check(index.device == offsets.device, f"Pattern: index is on {index.device}, offsets on {offsets.device}")
        if index.is_meta:
            return
        check(
            bool(offsets[0] == 0) and bool(offsets[-1] == len(index)) and bool((offsets.diff() >= 0).all()),
            f"Pattern: offsets must rise from 0 to the {len(index)} vectors of index",
        )
        check(
            bool(((index >= 0) & (index < columns)).all()),
            f"Pattern: index must lie in 0 to {columns - 1}, the columns of {tuple(self.shape)}",
        )

    @staticmethod
    def from_mask(mask: Tensor, rows: int, block: int = 8) -> "Pattern":
        """mask bool [ceil(rows / block), columns] -> a vector wherever it is true."""
        check(
            mask.dim() == 2 and mask.dtype == torch.bool and len(mask) == -(-rows // block),
            f"Pattern: mask must be bool [{-(-rows // block)}, columns], got {described(mask)}",
        )
        strips, index = mask.nonzero(as_tuple=True)
        offsets = _offsets(strips, len(mask))
        return Pattern(index.to(torch.int32).contiguous(), offsets, (rows, mask.shape[1]), block)

    @property
    def strips(self) -> Tensor:
        """The strip of each vector, int64 [n]."""
        return strips_of(self.offsets, len(self.index))

    @property
    def density(self) -> float:
        """The share of the matrix that the vectors cover."""
        return len(self.index) / max((len(self.offsets) - 1) * self.shape[1], 1)

    def to(self, device: torch.device | str) -> "Pattern":
        return replace(self, index=self.index.to(device), offsets=self.offsets.to(device))


def _offsets(strips: Tensor, count: int) -> Tensor:
    """The strips of vectors, ascending -> where each strip's begin."""
    ends = torch.bincount(strips, minlength=count).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


@dataclass(frozen=True, eq=False)
class SparseInt:
    """A matrix of integers of 4, 8 or 16 bits; ``scale`` fp32 [rows] is what they were divided by, None for integers.

    The products of a row's integers with any int8 are added up in an int32, which wraps on some tensor cores and
    saturates on others.  So the magnitudes of a row may sum up to 16777215 at most (of 8 bits that is any 131071
    integers); with 16 bits each counts 128 more, which bounds the sums of either plane.  Raises ValueError beyond, and
    where ``values`` are not the pattern's.
    """

    pattern: Pattern
    values: Tensor  # int8 [planes, n or n / 2, V]
    bits: int
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        pattern, values, scale = self.pattern, self.values, self.scale
        check(self.bits in RANGES, f"SparseInt: bits must be 4, 8 or 16, got {self.bits!r}")
        n, rows = len(pattern.index), pattern.shape[0]
        shape = (1 + (self.bits == 16), n // 2 if self.bits == 4 else n, pattern.block)
        check(
            values.shape == shape and values.dtype == torch.int8 and values.is_contiguous(),
            f"SparseInt: values must be contiguous int8 {shape}, got {described(values)}",
        )
        check(
            scale is None or (scale.shape == (rows,) and scale.dtype == torch.float32),
            f"SparseInt: scale must be float32 [{rows}] or None, got {described(scale)}",
        )
        if values.is_meta:
            return
        if self.bits == 4:
            odd = bool((pattern.offsets & 1).any())
            check(not odd, "SparseInt: of 4 bits a strip must have an even number of vectors")
        sums = self.row_sums()
        largest = int(sums.max()) if len(sums) else 0
        check(
            largest <= LARGEST_SUM,
            f"SparseInt: the magnitudes of row {int(sums.argmax()) if len(sums) else 0} must sum up to {LARGEST_SUM} at"
            f" most, got {largest}: an int32 sum of its products with int8 may overflow; use fewer bits or a lower"
            " density",
        )

    def row_sums(self) -> Tensor:
        """Returns the sum of each row's magnitudes, int64 [rows], by which its products are bounded."""
        magnitudes = unpack(self.values, self.bits).abs().long() + (BYTE if self.bits == 16 else 0)
        sums = magnitudes.new_zeros(len(self.pattern.offsets) - 1, self.pattern.block)
        return sums.index_add_(0, self.pattern.strips, magnitudes).flatten()[: self.shape[0]]

    @staticmethod
    def from_vectors(pattern: Pattern, numbers: Tensor, bits: int = 8, scale: Tensor | None = None) -> "SparseInt":
        """Returns the matrix with integers ``numbers`` [n, V] at the places of ``pattern``.

        ValueError for integers beyond the range of ``bits``: -8 to 7, -128 to 127, -32640 to 32639.
        """
        low, high = _range(bits)
        shape = len(pattern.index), pattern.block
        check(
            numbers.shape == shape and not numbers.is_floating_point(),
            f"SparseInt: numbers must be integers {shape}, got {described(numbers)}",
        )
        check(
            not numbers.numel() or bool((numbers.amin() >= low) & (numbers.amax() <= high)),
            f"SparseInt: numbers of {bits} bits must lie in {low} to {high}",
        )
        numbers = numbers.to(torch.int32)
        if bits == 4:
            pattern, numbers = _even(pattern, numbers)
        return SparseInt(pattern, pack(numbers, bits), bits, scale)

    @staticmethod
    def from_dense(weight: Tensor, density: float = 1.0, block: int = 8, bits: int = 8) -> "SparseInt":
        """Prunes and quantises a matrix [rows, columns].

        Of its vectors of ``block`` rows those with the largest sums of squares stay, a share of ``density``.  Each row
        is then divided by its scale, which gives its largest magnitude 7, 127 or 32639, and rounded to nearest, ties to
        even; integers are taken as they are.  ValueError for numbers that are not finite, and those of
        :meth:`from_vectors`.
        """
        check(
            weight.dim() == 2 and weight.dtype != torch.bool and not weight.is_complex(),
            f"SparseInt: weight must be [rows, columns] of numbers, got {described(weight)}",
        )
        check(block in BLOCKS, f"SparseInt: block must be 8, 16, 32 or 64 rows, got {block!r}")
        check_number("SparseInt: density", density, number(0, 1))
        rows, columns = weight.shape
        weight = weight.detach()
        wide = weight.double() if weight.dtype != torch.float32 else weight
        check(bool(wide.isfinite().all()), "SparseInt: weight must be finite")
        strips = -(-rows // block)
        wide = torch.nn.functional.pad(wide, (0, 0, 0, strips * block - rows)).view(strips, block, columns)
        norms = wide.square().sum(1).flatten()
        places = norms.sort(descending=True, stable=True).indices[: round(density * len(norms))]
        places = places[norms[places] > 0].sort().values
        strip, index = places // max(columns, 1), places % max(columns, 1)
        vectors, scale = wide[strip, :, index], None
        if weight.is_floating_point():
            largest = wide.new_zeros(strips, block)
            largest.scatter_reduce_(0, strip[:, None].expand_as(vectors), vectors.abs(), "amax")
            scale = torch.where(largest > 0, largest / _range(bits)[1], 1.0).float().clamp(min=_LEAST_SCALE)
            vectors = (vectors / scale[strip]).round().clamp(*RANGES[bits])
            scale = scale.flatten()[:rows].contiguous()
        pattern = Pattern(index.to(torch.int32), _offsets(strip, strips), (rows, columns), block)
        return SparseInt.from_vectors(pattern, vectors.to(torch.int64), bits, scale)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)"""
        return self.pattern.shape

    @property
    def vectors(self) -> Vectors:
        """What kernels read."""
        return Vectors(self.values, self.pattern.index, self.pattern.offsets, self.shape[0], self.bits)

    def to(self, device: torch.device | str) -> "SparseInt":
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, pattern=self.pattern.to(device), values=self.values.to(device), scale=scale)

    def dense(self) -> Tensor:
        """Returns the integers as a matrix, int32 [rows, columns]."""
        return dense_of(self.vectors, self.shape[1], torch.int32)

    def narrow(self, dim: int, first: int, end: int) -> "SparseInt":
        """Returns rows (dim 0) or columns (1) from ``first`` up to ``end``; ValueError for rows within a strip."""
        pattern, numbers, V = self.pattern, unpack(self.values, self.bits), self.pattern.block
        check(
            dim == 1 or (first % V == 0 and (end % V == 0 or end == self.shape[0])),
            f"SparseInt: rows {first} to {end} do not lie between strips of {V} rows",
        )
        at = pattern.index if dim == 1 else pattern.strips * V
        inside = (at >= first) & (at < end)
        shape = (end - first, self.shape[1]) if dim == 0 else (self.shape[0], end - first)
        strips, index = pattern.strips[inside], pattern.index[inside] - (first if dim == 1 else 0)
        offsets = _offsets(strips - (first // V if dim == 0 else 0), -(-shape[0] // V))
        scale = self.scale if dim == 1 or self.scale is None else self.scale[first:end]
        return SparseInt.from_vectors(Pattern(index, offsets, shape, V), numbers[inside], self.bits, scale)

    @staticmethod
    def join(parts: Sequence["SparseInt"], dim: int) -> "SparseInt":
        """Returns the matrix whose slices, by :meth:`narrow` in order, are ``parts``."""
        head, V = parts[0], parts[0].pattern.block
        ends = torch.tensor([0, *(part.shape[dim] for part in parts)]).cumsum(0).tolist()
        starts = [(0, first) if dim == 1 else (first // V, 0) for first in ends]
        strips = torch.cat([part.pattern.strips + s for part, (s, _) in zip(parts, starts)])
        index = torch.cat([part.pattern.index + c for part, (_, c) in zip(parts, starts)])
        numbers = torch.cat([unpack(part.values, part.bits) for part in parts])
        nonzero = numbers.ne(0).any(1)
        strips, order = strips[nonzero].sort(stable=True)
        shape = (ends[-1], head.shape[1]) if dim == 0 else (head.shape[0], ends[-1])
        pattern = Pattern(index[nonzero][order], _offsets(strips, -(-shape[0] // V)), shape, V)
        scales: Any = [part.scale for part in parts]
        scale = scales[0] if dim == 1 or scales[0] is None else torch.cat(scales)
        return SparseInt.from_vectors(pattern, numbers[nonzero][order], head.bits, scale)


def dense_of(w: Vectors, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns the integers as a matrix [rows, columns] of ``dtype``; vectors with the same place are added."""
    numbers, strips = unpack(w.values, w.bits), strips_of(w.offsets, len(w.index))
    V = numbers.shape[1]
    dense = torch.zeros(len(w.offsets) - 1, V, columns, dtype=dtype, device=numbers.device)
    places = strips[:, None], torch.arange(V, device=numbers.device)[None], w.index.long()[:, None]
    return dense.index_put_(places, numbers.to(dtype), accumulate=True).flatten(0, 1)[: w.rows]


def _range(bits: int) -> tuple[int, int]:
    check(bits in RANGES, f"SparseInt: bits must be 4, 8 or 16, got {bits!r}")
    return RANGES[bits]


def _even(pattern: Pattern, numbers: Tensor) -> tuple[Pattern, Tensor]:
    """Adds a vector of zeros to each strip with an odd number of them."""
    counts = pattern.offsets.diff().long()
    odd = counts & 1
    offsets = torch.cat([counts.new_zeros(1), (counts + odd).cumsum(0)]).to(torch.int32)
    moved = torch.arange(len(pattern.index), device=counts.device) + (odd.cumsum(0) - odd)[pattern.strips]
    index = pattern.index.new_zeros(len(moved) + int(odd.sum())).index_copy_(0, moved, pattern.index)
    filled = numbers.new_zeros(len(index), pattern.block).index_copy_(0, moved, numbers)
    return replace(pattern, index=index, offsets=offsets), filled
