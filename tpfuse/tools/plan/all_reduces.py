"""The fastest all-reduce by size and number of ranks: a table, JSON and a picture."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..ledger.plots import figure
from ..ledger.text import duration, quantity, table
from .collectives import ALL_REDUCE, OWN, Link, cheapest, seconds, sparse

_COLOURS = "#4c72b0", "#dd8452", "#55a868", "#c44e52"  # of OWN


class AllReduceTimes(NamedTuple):
    """Seconds of each algorithm for each size in bytes and number of ranks."""

    link: Link
    ranks: Sequence[int]
    sizes: Sequence[int]
    times: dict[str, list[list[float]]]  # by algorithm, then by size, then by ranks
    density: float | None = None
    sparse: dict[str, list[list[float]]] = {}  # alike, where a density is given

    def text(self) -> str:
        header = ("bytes a rank", *(f"{n} ranks" for n in self.ranks))
        rows = [(quantity(size, "B"), *(_cell(n, size, self.link) for n in self.ranks)) for size in self.sizes]
        rate, latency, overhead = quantity(self.link.bandwidth, "B/s"), self.link.latency, self.link.overhead
        note = f"the fastest of {', '.join(OWN)}, at {rate}, {duration(latency)} and {duration(overhead)} a message"
        text = f"{table(header, rows)}\n{note}; --json has all algorithms"
        return text if self.density is None else f"{text}\n\n{self._sparse_text()}"

    def _sparse_text(self) -> str:
        header = ("bytes a rank", "algorithm", *(f"{n} ranks" for n in self.ranks))
        shown = {name: self.times[name] for name in ("ring", "in-network")} | self.sparse
        rows = [
            (quantity(size, "B"), name, *map(duration, times[i]))
            for i, size in enumerate(self.sizes)
            for name, times in shown.items()
        ]
        note = (
            f"a rank sends a share of {self.density:.3g}, the ring and in-network all; Ok-Topk keeps the largest sums"
        )
        return f"{table(header, rows)}\n{note}"

    def json(self) -> dict[str, object]:
        values = dict[str, object](link=self.link._asdict(), ranks=[*self.ranks], sizes=[*self.sizes])
        values |= dict(seconds=self.times)
        return values if self.density is None else values | dict(density=self.density, sparse=self.sparse)


def compare(args: Namespace) -> AllReduceTimes:
    """Costs each algorithm of ALL_REDUCE, and the sparse ones of a density."""
    link = Link(args.latency, args.bandwidth * 1e9, args.overhead)
    times = lambda algorithms: {
        name: [[seconds(algorithm, n, size, link) for n in args.ranks] for size in args.sizes]
        for name, algorithm in algorithms.items()
    }
    sums = {} if args.density is None else sparse(args.density)
    return AllReduceTimes(link, args.ranks, args.sizes, times(ALL_REDUCE), density=args.density, sparse=times(sums))


def _cell(ranks: int, size: int, link: Link) -> str:
    name, fastest = cheapest(ranks, size, link)
    return f"{name} {duration(fastest)}"


def draw(compared: AllReduceTimes, path: Path) -> None:
    """Draws a map of the fastest algorithm by size and ranks, and all algorithms' times at the most ranks."""
    names = list(OWN)

    def drawing(fig: Any, axes: Any) -> None:
        winners, lines = axes
        winner = [[names.index(cheapest(n, size, compared.link)[0]) for n in compared.ranks] for size in compared.sizes]
        map_ = winners.imshow(winner, aspect="auto", origin="lower", cmap=_map(), vmin=-0.5, vmax=len(names) - 0.5)
        winners.set(xticks=range(len(compared.ranks)), xticklabels=compared.ranks, xlabel="ranks")
        winners.set(yticks=range(len(compared.sizes)), yticklabels=[quantity(s, "B") for s in compared.sizes])
        winners.set_title("the fastest all-reduce", loc="left", size=10)
        fig.colorbar(map_, ax=winners, ticks=range(len(names))).ax.set_yticklabels(names)
        for name, rows in compared.times.items():
            lines.loglog(compared.sizes, [row[-1] for row in rows], label=name)
        lines.set(xlabel="bytes a rank", ylabel="seconds")
        lines.set_title(f"all of them at {compared.ranks[-1]} ranks", loc="left", size=10)
        lines.legend(fontsize=8)

    link = f"{quantity(compared.link.bandwidth, 'B/s')}, {duration(compared.link.latency)} a message"
    figure(path, (12, 4.8), drawing, title=f"all-reduce by size and ranks, over links of {link}", columns=2)


def _map() -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap(_COLOURS)
