"""How the ledger prints: aligned tables, quantities with units, progress of what takes long."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence

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
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as what is in them: the first (and any of words) to the left, numbers to the right; None is empty."""
    cells = [["" if value is None else str(value) for value in row] for row in rows]
    columns = list(zip(header, *cells)) if cells else [(h,) for h in header]
    widths = [max(map(len, column)) for column in columns]
    words = [i == 0 or not any(c[:1].isdigit() or c[:1] in "-+<" for c in column[1:] if c) for i, column in enumerate(columns)]
    line = lambda row: "  ".join(c.ljust(w) if word else c.rjust(w) for c, w, word in zip(row, widths, words)).rstrip()  # noqa: E731
    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, cells)])


class Progress:
    """How far something is, on stderr: silent for two seconds (unless ``long``), then to a terminal one line over and over, to anything
    else a line every ten seconds."""

    def __init__(self, *, long: bool = False):
        self.due = time.monotonic() + (0 if long else 2)
        self.shown = False

    def say(self, line: str) -> None:
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now >= self.due:
            self.due, self.shown = now + (0.1 if terminal else 10), terminal
            print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def progress(items: Sequence, what: str, *, long: bool = False) -> Iterator:
    """Goes through ``items`` and says how far it is; ``long``: each takes more than two seconds."""
    said = Progress(long=long)
    for i, item in enumerate(items):
        said.say(f"{what} {i + 1} of {len(items)}")
        yield item
    said.done()
