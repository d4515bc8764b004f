"""Numbers of a ledger as functions of its sizes: fitted at some, and refused where another is not exact.

    POLYNOMIAL  a + b B + c S + d B S + e B S^2         of B sequences of S positions, exact fractions
    ROWS        a number for each B S                   partial sums, which stop growing where a device is full
    SEQUENCE    B times a number for each S             scores behind a window

A function that fits every size that was counted stands for those in between; nothing is rounded.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from ...kernels.runtime.errors import check

POLYNOMIAL, ROWS, SEQUENCE = KINDS = "polynomial", "rows", "sequence"
EXACT = 1 << 53  # integers below it are exact in a float of 64 bits, which is what JavaScript has

# The least and the most of an axis, unless a size beyond is asked for.
BATCH, SEQ = (2, 64), (128, 8192)

Size = tuple[int, int]  # B sequences, S positions
Counts = Mapping[Size, int]


class Axes(NamedTuple):
    """The values of B and of S, each twice the one before it."""

    batch: tuple[int, ...]
    seq: tuple[int, ...]

    @classmethod
    def around(cls, batch: int, seq: int, *, positions: int) -> "Axes":
        """Returns axes through a size, of a model with so many ``positions``.

        One sequence is an axis alone: plain torch makes other copies of it, so its counts are functions of their own.
        """
        return cls((1,) if batch == 1 else _doubling(batch, *BATCH), _doubling(seq, SEQ[0], min(SEQ[1], positions)))

    @property
    def fitted(self) -> list[Size]:
        """Sizes that give every function: a staircase over all B, all S and all B S, and a corner off it."""
        few, most = self.seq[0], self.batch[-1]
        sizes = [(B, few) for B in self.batch] + [(most, S) for S in self.seq]
        return list(dict.fromkeys([*sizes, (self.batch[0], self.seq[-1])]))

    @property
    def further(self) -> list[Size]:
        """Sizes beside the staircase, where a function is tried that was fitted on it."""
        middle = self.batch[len(self.batch) // 2], self.seq[len(self.seq) // 2]
        inner = [(self.batch[0], middle[1]), middle, (middle[0], self.seq[-1])]
        return [size for size in dict.fromkeys(inner) if size not in self.fitted]

    @property
    def sizes(self) -> list[Size]:
        return self.fitted + self.further


def _doubling(through: int, least: int, most: int) -> tuple[int, ...]:
    """Returns values through one of them, which may lie outside of the bounds."""
    first = through
    while first % 2 == 0 and first // 2 >= least:
        first //= 2
    values = [first]
    while values[-1] * 2 <= max(most, through):
        values.append(values[-1] * 2)
    return tuple(values)


class SizeFunction(NamedTuple):
    """A function of (B, S): the numerators of POLYNOMIAL over ``denominator``, or the values of a table by ``keys``."""

    kind: str
    values: tuple[int, ...]
    denominator: int = 1
    keys: tuple[int, ...] = ()

    def evaluate(self, size: Size) -> Fraction:
        """Returns the value; KeyError where a table has none."""
        B, S = size
        if self.kind == POLYNOMIAL:
            return Fraction(sum(n * x for n, x in zip(self.values, _powers(size), strict=True)), self.denominator)
        table = dict(zip(self.keys, self.values, strict=True))
        return Fraction(table[B * S] if self.kind == ROWS else B * table[S])


def _powers(size: Size) -> tuple[int, ...]:
    B, S = size
    return 1, B, S, B * S, B * S * S


def fit(name: str, counts: Counts, axes: Axes) -> SizeFunction:
    """Returns the function of a number that was counted at ``axes.fitted`` and ``axes.further``.

    ValueError of ``name`` where none is exact at every size, or where it is beyond EXACT.
    """
    largest = max(counts.values())
    check(largest < EXACT, f"ledger: {name} is {largest}, and a page counts to {EXACT} at most; ask for smaller sizes")
    staircase = {size: counts[size] for size in axes.fitted}
    functions = [_polynomial(staircase), _by_rows(staircase), _by_sequence(staircase)]
    differing = [[size for size in counts if function.evaluate(size) != counts[size]] for function in functions]
    for function, sizes in zip(functions, differing, strict=True):
        if not sizes:
            return function
    size = differing[0][0]
    raise ValueError(
        f"ledger: {name} is no exact function of the sizes ({', '.join(KINDS)}), so there is no page of it: at batch"
        f" {size[0]}, seq {size[1]} it is {counts[size]}, got {functions[0].evaluate(size)} from a fit at other sizes"
    )


def _polynomial(counts: Counts) -> SizeFunction:
    """Solves for the coefficients at as many sizes as are independent, by elimination in fractions."""
    width = len(_powers((1, 1)))
    pivots: dict[int, list[Fraction]] = {}  # by the column in which a reduced row has its 1
    for size, count in counts.items():
        row = [Fraction(n) for n in (*_powers(size), count)]
        for column, pivot in pivots.items():
            row = [x - row[column] * y for x, y in zip(row, pivot, strict=True)]
        leading = next((i for i in range(width) if row[i]), None)
        if leading is None:
            continue
        row = [x / row[leading] for x in row]
        for column, pivot in pivots.items():
            pivots[column] = [x - pivot[leading] * y for x, y in zip(pivot, row, strict=True)]
        pivots[leading] = row
    solved = [pivots[i][width] if i in pivots else Fraction(0) for i in range(width)]
    denominator = lcm(*(x.denominator for x in solved))
    return SizeFunction(POLYNOMIAL, tuple(int(x * denominator) for x in solved), denominator)


def _by_rows(counts: Counts) -> SizeFunction:
    table = {B * S: count for (B, S), count in counts.items()}
    return SizeFunction(ROWS, tuple(table.values()), keys=tuple(table))


def _by_sequence(counts: Counts) -> SizeFunction:
    table = {S: count // B for (B, S), count in counts.items()}
    return SizeFunction(SEQUENCE, tuple(table.values()), keys=tuple(table))


class Pool:
    """Functions by number, each once."""

    def __init__(self) -> None:
        self.functions: dict[SizeFunction, int] = {}
        self._fitted: dict[tuple[Axes, tuple[int, ...]], int] = {}

    def number(self, name: str, counts: Sequence[int], axes: Axes) -> int:
        """Returns the number of the function with these counts at the axes' sizes, in their order."""
        key = axes, tuple(counts)
        if key not in self._fitted:
            function = fit(name, dict(zip(axes.sizes, counts, strict=True)), axes)
            self._fitted[key] = self.functions.setdefault(function, len(self.functions))
        return self._fitted[key]
