"""Sparse matrices of integers: strips of V rows, of which some columns stand as vectors of V integers.

As in a CSR matrix whose elements are V x 1 blocks, ``column_index`` [n] has the column of each vector, and ``offsets``
[S + 1] where those of each of S = ceil(M / V) strips begin.  Bytes of values, int8 [planes, vectors in bytes, V]:

    bits   values            one byte or two hold
    4      [1, n / 2, V]     two vectors of a strip, 2j in the low half and 2j + 1 in the high one: n is even
    8      [1, n, V]         an integer
    16     [2, n, V]         low and high plane, both signed: high 256 + low

16 bits reach from -32640 to 32639, since both planes are signed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..runtime.errors import check
from ..runtime.rules import MAX_SIZE, check_number, described, number

BLOCKS = 8, 16, 32, 64  # V
RANGES = {4: (-8, 7), 8: (-128, 127), 16: (-32640, 32639)}  # by bits
BYTE = 128  # the largest magnitude of an int8
LARGEST_SUM = MAX_SIZE // BYTE  # of the magnitudes of a row, so that its product with any int8 fits an int32
_LEAST_SCALE = torch.finfo(torch.float32).tiny


class Vectors(NamedTuple):
    """The matrix [rows, .] that kernels read."""

    values: Tensor  # int8, as above
    column_index: Tensor  # int32 [n]
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
    low = ((numbers + BYTE) & 255) - BYTE
    return torch.stack([low, (numbers - low) >> 8][: 1 + (bits == 16)]).to(torch.int8)


def dense_of(w: Vectors, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns the integers as a matrix [rows, columns] of ``dtype``; vectors with the same place are added."""
    numbers, strips = unpack(w.values, w.bits), strips_of(w.offsets, len(w.column_index))
    V = numbers.shape[1]
    dense = torch.zeros(len(w.offsets) - 1, V, columns, dtype=dtype, device=numbers.device)
    places = strips[:, None], torch.arange(V, device=numbers.device)[None], w.column_index.long()[:, None]
    return dense.index_put_(places, numbers.to(dtype), accumulate=True).flatten(0, 1)[: w.rows]


def row_sums(w: Vectors) -> Tensor:
    """Returns the sum of the magnitudes of each row, int64 [S, V]; of 16 bits, of either plane at most."""
    numbers = unpack(w.values, w.bits).long()
    magnitudes = numbers.abs() + (BYTE * numbers.ne(0) if w.bits == 16 else 0)
    sums = magnitudes.new_zeros(len(w.offsets) - 1, numbers.shape[1])
    return sums.index_add_(0, strips_of(w.offsets, len(numbers)), magnitudes)


@dataclass(frozen=True, eq=False)
class SparseInt:
    """A matrix of integers; ``scale`` fp32 [rows] is what rows were divided by, None for integers.

    The products of a row's integers with any int8 are added up in an int32, which wraps on some tensor cores and
    saturates on others.  So the magnitudes of a row may sum up to 16777215 at most (of 8 bits that is any 131071
    integers); with 16 bits each that is not 0 counts 128 more, which bounds the sums of either plane.

    All is checked when a matrix is made, for which a GPU is waited for.  ValueError where a rule is broken.
    """

    vectors: Vectors
    columns: int
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        values, index, offsets, rows, bits = self.vectors
        _check_kind(self.block, bits)
        n, strips = len(index), -(-rows // self.block)
        shape = 1 + (bits == 16), n // 2 if bits == 4 else n, self.block
        forms = dict(values=(values, torch.int8, shape), column_index=(index, torch.int32, (n,)))
        forms |= dict(offsets=(offsets, torch.int32, (strips + 1,)))
        if self.scale is not None:
            forms |= dict(scale=(self.scale, torch.float32, (rows,)))
        for name, (t, dtype, size) in forms.items():
            alike = t.dtype == dtype and t.shape == size and t.is_contiguous() and t.device == values.device
            check(
                alike,
                f"SparseInt: {name} must be contiguous {str(dtype)[6:]} {size} on {values.device}, got {described(t)}",
            )
        ends = offsets.tolist()
        check(
            ends[0] == 0 and ends[-1] == n and ends == sorted(ends),
            f"SparseInt: offsets must rise from 0 to the {n} vectors of column_index",
        )
        check(bits != 4 or not any(end % 2 for end in ends), "SparseInt: of 4 bits a strip must have an even number")
        inside = not n or (int(index.min()) >= 0 and int(index.max()) < self.columns)
        check(inside, f"SparseInt: column_index must lie in 0 to {self.columns - 1}")
        sums = row_sums(self.vectors).flatten()
        largest, row = (int(sums.max()), int(sums.argmax())) if len(sums) else (0, 0)
        check(
            largest <= LARGEST_SUM,
            f"SparseInt: the magnitudes of row {row} must sum up to {LARGEST_SUM} at most, got {largest}: an int32 sum"
            " of its products with int8 may overflow; use fewer bits or a lower density",
        )

    @staticmethod
    def from_dense(weight: Tensor, density: float = 1.0, block: int = 8, bits: int = 8) -> "SparseInt":
        """Prunes and quantises a matrix [rows, columns].

        Of its vectors of ``block`` rows (8, 16, 32, 64) those with the largest sums of squares stay, a share of
        ``density``, but none that is 0.  Each row is then divided by its scale, which gives its largest magnitude 7,
        127 or 32639, and rounded to nearest, ties to even; integers are taken as they are.  ValueError for numbers that
        are not finite, and for integers beyond the range of ``bits``.
        """
        check(
            weight.dim() == 2 and weight.dtype != torch.bool and not weight.is_complex(),
            f"SparseInt: weight must be [rows, columns] of numbers, got {described(weight)}",
        )
        _check_kind(block, bits)
        check_number("SparseInt: density", density, number(0, 1))
        (rows, columns), strips = weight.shape, -(-len(weight) // block)
        w = weight.detach().to(torch.float32 if weight.dtype == torch.float32 else torch.float64)
        check(bool(w.isfinite().all()), "SparseInt: weight must be finite")
        w = pad(w, (0, 0, 0, strips * block - rows)).view(strips, block, columns)
        norms = w.double().square().sum(1).flatten()  # in fp32 a small weight's would be 0
        places = norms.sort(descending=True, stable=True).indices[: round(density * len(norms))]
        places = places[norms[places] > 0].sort().values
        strip, column = places // max(columns, 1), places % max(columns, 1)
        vectors, scale = w[strip, :, column], None
        if weight.is_floating_point():
            largest = w.new_zeros(strips, block)
            largest.scatter_reduce_(0, strip[:, None].expand_as(vectors), vectors.abs(), "amax")
            scale = torch.where(largest > 0, largest / RANGES[bits][1], 1.0).float().clamp(min=_LEAST_SCALE)
            vectors = (vectors / scale[strip]).round().clamp(*RANGES[bits])
            scale = scale.flatten()[:rows].contiguous()
        return _packed(strip, column, vectors.long(), shape=(rows, columns), bits=bits, scale=scale)

    @property
    def block(self) -> int:
        """The rows of a vector."""
        return self.vectors.values.shape[-1]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)"""
        return self.vectors.rows, self.columns

    @property
    def density(self) -> float:
        """The share of the matrix that the vectors cover."""
        return len(self.vectors.column_index) / max((len(self.vectors.offsets) - 1) * self.columns, 1)

    def dense(self) -> Tensor:
        """Returns the integers as a matrix, int32 [rows, columns]."""
        return dense_of(self.vectors, self.columns, torch.int32)

    def to(self, device: torch.device | str) -> "SparseInt":
        values, index, offsets, *kind = self.vectors
        vectors = Vectors._make([values.to(device), index.to(device), offsets.to(device), *kind])
        return SparseInt(vectors, self.columns, None if self.scale is None else self.scale.to(device))


def _check_kind(block: int, bits: int) -> None:
    check(block in BLOCKS, f"SparseInt: block must be 8, 16, 32 or 64 rows, got {block!r}")
    check(bits in RANGES, f"SparseInt: bits must be 4, 8 or 16, got {bits!r}")


def _packed(
    strips: Tensor, columns: Tensor, numbers: Tensor, *, shape: tuple[int, int], bits: int, scale: Tensor | None
) -> SparseInt:
    """Makes a matrix of vectors [n, V] in the order of their strips; of 4 bits a strip with an odd number of them gets
    zeros."""
    low, high = RANGES[bits]
    check(bool(((numbers >= low) & (numbers <= high)).all()), f"SparseInt: {bits} bits must lie in {low} to {high}")
    count = -(-shape[0] // numbers.shape[1])
    if bits == 4:
        odd = (torch.bincount(strips, minlength=count) & 1).nonzero()[:, 0]
        strips, order = torch.cat([strips, odd]).sort(stable=True)
        columns, numbers = pad(columns, (0, len(odd)))[order], pad(numbers, (0, 0, 0, len(odd)))[order]
    ends = pad(torch.bincount(strips, minlength=count).cumsum(0), (1, 0))
    vectors = Vectors(pack(numbers, bits), columns.int(), ends.int(), rows=shape[0], bits=bits)
    return SparseInt(vectors, shape[1], scale)
