"""The fastest all-reduce by size and number of ranks: a table, JSON and a picture."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..ledger.plots import figure
from ..ledger.text import duration, quantity, table
from .collectives import ALL_REDUCE, OWN, Link, cheapest, seconds

_COLOURS = "#4c72b0", "#dd8452", "#55a868", "#c44e52"  # of OWN


class AllReduceTimes(NamedTuple):
    """Seconds of each algorithm for each size in bytes and number of ranks."""

    link: Link
    ranks: Sequence[int]
    sizes: Sequence[int]
    times: dict[str, list[list[float]]]  # by algorithm, then by size, then by ranks

    def text(self) -> str:
        header = ("bytes a rank", *(f"{n} ranks" for n in self.ranks))
        rows = [(quantity(size, "B"), *(_cell(n, size, self.link) for n in self.ranks)) for size in self.sizes]
        rate, latency, overhead = quantity(self.link.bandwidth, "B/s"), self.link.latency, self.link.overhead
        note = f"the fastest of {', '.join(OWN)}, at {rate}, {duration(latency)} and {duration(overhead)} a message"
        return f"{table(header, rows)}\n{note}; --json has all algorithms"

    def json(self) -> dict[str, object]:
        return dict(link=self.link._asdict(), ranks=list(self.ranks), sizes=list(self.sizes), seconds=self.times)


def compare(args: Namespace) -> AllReduceTimes:
    """Costs each algorithm of ALL_REDUCE."""
    link = Link(args.latency, args.bandwidth * 1e9, args.overhead)
    times = {
        name: [[seconds(algorithm, n, size, link) for n in args.ranks] for size in args.sizes]
        for name, algorithm in ALL_REDUCE.items()
    }
    return AllReduceTimes(link, args.ranks, args.sizes, times)


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
