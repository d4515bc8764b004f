"""Text of the ledger: aligned tables, quantities with units, progress of long runs."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from ..command import CLEAR, on_terminal

T = TypeVar("T")

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def quantity(n: float, unit: str = "") -> str:
    """12582912, "B" -> "12.6 MB": three digits, decimal prefixes; nothing is "-"."""
    if not n:
        return "-"
    scale, prefix = next(((s, p) for s, p in _PREFIXES if abs(n) >= 0.9995 * s), (1, ""))
    n /= scale
    digits = 0 if abs(n) >= 99.95 or (scale == 1 and n == int(n)) else 1 if abs(n) >= 9.995 else 2
    return f"{n:.{digits}f} {prefix}{unit}".strip()


def duration(seconds: float) -> str:
    """0.0125 -> "12.5 ms": three digits, in s, ms or us."""
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def scale(largest: float, unit: str) -> tuple[float, str]:
    """Returns the factor and the name of an axis's unit for numbers up to ``largest``: 0.004, "s" -> 1e-3, "ms"."""
    prefixes = ((1, ""), (1e-3, "m"), (1e-6, "u")) if unit == "s" else (*_PREFIXES, (1, ""))
    fits = ((factor, prefix + unit) for factor, prefix in prefixes if largest >= factor)
    return next(fits, (1, unit)) if unit else (1, unit)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns rows as text, columns as wide as their widest cell.

    The first column, and any of words, stands to the left, numbers to the right; None is empty.
    """
    cells = [["" if value is None else str(value) for value in row] for row in rows]
    columns: list[tuple[str, ...]] = list(zip(header, *cells)) if cells else [(h,) for h in header]
    widths = [max(map(len, column)) for column in columns]
    left = [
        i == 0 or not any(c[:1].isdigit() or c[:1] in "-+<" for c in column[1:] if c)
        for i, column in enumerate(columns)
    ]
    line = lambda row: "  ".join(c.ljust(w) if text else c.rjust(w) for c, w, text in zip(row, widths, left)).rstrip()
    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, cells)])


class Progress:
    """A line of progress on stderr.

    Silent for two seconds (unless ``long``); then to a terminal one line over and over, to anything else a line every
    ten seconds.
    """

    def __init__(self, *, long: bool = False):
        self.due = time.monotonic() + (0 if long else 2)
        self.shown = False

    def update(self, line: str) -> None:
        """Shows a line, where one is due."""
        now, terminal = time.monotonic(), on_terminal()
        if now >= self.due and sys.stderr is not None:
            self.due, self.shown = now + (0.1 if terminal else 10), terminal
            print(f"{CLEAR}{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print(CLEAR, end="", file=sys.stderr, flush=True)


def progress(items: Sequence[T], action: str, *, long: bool = False) -> Iterator[T]:
    """Yields ``items`` and shows progress, "action 3 of 8"; ``long``: each takes more than two seconds."""
    line = Progress(long=long)
    for i, item in enumerate(items):
        line.update(f"{action} {i + 1} of {len(items)}")
        yield item
    line.clear()
