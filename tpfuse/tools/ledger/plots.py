"""Pictures: the map of a layer with edges as wide as their bytes, and how costs grow.  Needs matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import aten
from .dryrun import Point
from .layer import Comparison
from .recorder import FORWARD, Entry, Ledger
from .text import quantity, scale

COLOURS = {
    aten.GEMM: "#4c72b0",
    aten.ATTENTION: "#8172b3",
    aten.NORM: "#55a868",
    aten.ELEMENTWISE: "#c44e52",
    aten.COMMUNICATION: "#dd8452",
}
_MAX_WIDTH = 14.0  # points, of the widest edge


Draw = Callable[[Any, Any], None]  # of a figure and its axes


def figure(
    path: Path, size: tuple[float, float], draw: Draw, *, title: str = "", columns: int = 1, rows: int = 1
) -> None:
    """Writes a picture of ``size`` in inches under a title, of several drawings beside or below each other.

    ValueError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    fig = Figure(figsize=size, layout="constrained")
    draw(fig, fig.subplots(rows, columns, squeeze=False).ravel())
    fig.suptitle(title, x=0.01, ha="left", size=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)


def legend(ax: Any, *, corner: str = "lower left", columns: int = 8, handles: Any = None) -> None:
    """Draws a legend above the axes, at their "lower left" or "lower right", so that it hides no data."""
    handles = ax.get_legend_handles_labels()[0] if handles is None else handles
    anchor = (0 if corner == "lower left" else 1, 1)
    ax.legend(
        handles=handles, loc=corner, bbox_to_anchor=anchor, ncols=columns,
        fontsize=7, frameon=False, columnspacing=1.0, borderaxespad=0.2,
    )  # fmt: skip


# ---- the map of a layer ----


def edges(entries: Sequence[Entry]) -> list[tuple[int | None, int | None, int]]:
    """Returns (from, to, bytes) of each entry's output that another reads.

    None: from outside (weights, inputs), or to outside (gradients, outputs).
    """
    writer: dict[int, int] = {}  # storage -> the entry that wrote it last
    read: set[int] = set()
    inside: list[tuple[int | None, int | None, int]] = []
    for i, e in enumerate(entries):
        for storage, size in e.inputs:
            inside.append((writer.get(storage), i, size))
            read.add(storage)
        for storage, _ in e.outputs:
            writer[storage] = i
    leaving: list[tuple[int | None, int | None, int]] = [
        (i, None, size)
        for i, e in enumerate(entries)
        for storage, size in e.outputs
        if writer[storage] == i and storage not in read
    ]
    return inside + leaving


def layer_map(comparison: Comparison, path: Path) -> None:
    """Draws every traced column: forward down on the left, backward up on the right.

    An edge is as wide as its bytes, on one scale.
    """
    entries_of = {title: _without_crumbs(ledger) for title, ledger in comparison.traces.items()}
    widest = max(size for entries in entries_of.values() for *_, size in edges(entries))
    tallest = max(
        sum(e.phase == phase for e in entries) for entries in entries_of.values() for phase in ("forward", "backward")
    )

    def draw(fig: Any, axes: Any) -> None:
        for ax, (title, entries) in zip(axes, entries_of.items()):
            moved = comparison.traces[title].total().moved
            ax.set_title(f"{title}: {quantity(moved, 'B')}")
            _draw_map(ax, entries, widest)
        handles = [axes[0].plot([], [], "s", color=c, label=kind)[0] for kind, c in COLOURS.items()]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)

    title = "one layer, forward and backward: an edge is as wide as its bytes"
    figure(path, (7 * len(entries_of), max(6, 0.42 * tallest)), draw, title=title, columns=len(entries_of))


def _without_crumbs(ledger: Ledger) -> list[Entry]:
    """Returns the entries that move at least a thousandth of all bytes."""
    least = ledger.total().moved / 1000
    return [e for e in ledger.entries if e.moved >= least]


def _draw_map(ax: Any, entries: list[Entry], widest: int) -> None:
    forward = [i for i, e in enumerate(entries) if e.phase == FORWARD]
    backward = [i for i, e in enumerate(entries) if e.phase != FORWARD]
    rows = max(len(forward), len(backward))
    points = {i: (0.0, -k * rows / len(forward)) for k, i in enumerate(forward)}
    points |= {i: (2.0, (k + 1) * rows / len(backward) - rows - 1) for k, i in enumerate(backward)}
    for start, end, size in edges(entries):
        bend = 0.0
        if start is not None and end is not None:
            a, b = points[start], points[end]
            bend = 0.25 if a[0] == b[0] else 0.0
        elif end is not None:
            b = points[end]
            a = _margin(b, end in forward)
        elif start is not None:
            a = points[start]
            b = _margin(a, start in forward)
        else:
            continue
        style = dict(arrowstyle="-", connectionstyle=f"arc3,rad={bend}", color="#7f7f7f", alpha=0.45)
        width = max(0.3, _MAX_WIDTH * size / widest)
        ax.annotate("", b, a, arrowprops=style | dict(lw=width, shrinkA=0, shrinkB=0))
    for i, e in enumerate(entries):
        name = e.op.replace("reduce_bias_dropout_add_norm", "reduce bias dropout\nadd norm")
        box = dict(boxstyle="round,pad=0.25", fc=COLOURS[e.kind], ec="none")
        ax.text(
            *points[i],
            f"{name}  {quantity(e.moved, 'B')}",
            ha="center",
            va="center",
            fontsize=7,
            color="white",
            bbox=box,
        )
    ax.text(0, 1.2, "forward, down", ha="center", fontsize=9)
    ax.text(2, 1.2, "backward, up", ha="center", fontsize=9)
    ax.set(xlim=(-1, 3), ylim=(-rows - 0.8, 1.8))
    ax.axis("off")


def _margin(point: tuple[float, float], forward: bool) -> tuple[float, float]:
    """Returns the point where an edge from or to outside ends."""
    return point[0] + (-0.85 if forward else 0.85), point[1]


# ---- how costs grow ----


def growth(points: Sequence[Point], path: Path) -> None:
    """Draws a sweep of at least one size that was run: a rank's costs over tp at the most ranks, and over ranks at the
    largest tp that was run."""
    counted: list[Any] = [p for p in points if p.held is not None]
    most = max(p.plan.ranks for p in counted)
    tp = max(p.plan.tp for p in counted)
    costs: dict[str, Callable[[Any], float]] = {
        "DDP state, B": lambda p: p.held.state.total,
        "FSDP state, B": lambda p: p.held.sharded.total if p.held.sharded else 0,
        "saved activations, B": lambda p: p.work.saved,
        "sent over tp, B": lambda p: p.work.wire,
        "sent over dp, B": lambda p: p.held.reduced[1],
        "flops": lambda p: p.work.flops,
    }

    def side(ax: Any, chosen: list[Any], x: Callable[[Any], int], *, title: str, xlabel: str) -> None:
        for name, cost in costs.items():
            values = [(x(p), cost(p)) for p in sorted(chosen, key=x) if cost(p)]
            if values:
                ax.plot(*zip(*values), marker="o", label=name)
        ax.set(xscale="log", yscale="log", ylabel="of one rank", title=title, xlabel=xlabel)
        ax.set_xscale("log", base=2)

    def draw(fig: Any, axes: Any) -> None:
        over_tp, over_ranks = [p for p in counted if p.plan.ranks == most], [p for p in counted if p.plan.tp == tp]
        side(axes[0], over_tp, lambda p: p.plan.tp, title=f"{most} ranks", xlabel="tensor-parallel size")
        side(axes[1], over_ranks, lambda p: p.plan.ranks, title=f"tp = {tp}", xlabel="ranks")
        axes[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)

    figure(path, (13, 5), draw, title="costs of one rank as the split grows", columns=2)


def bars(rows: dict[str, dict[str, float]], path: Path, *, title: str, axis: str, unit: str = "") -> None:
    """Draws stacked bars: name -> part -> number of ``unit``; the axis is named by a multiple of it, and ``axis``."""

    def draw(fig: Any, axes: Any) -> None:
        ax = axes[0]
        factor, multiple = scale(max(sum(values.values()) for values in rows.values()), unit)
        left = dict.fromkeys(rows, 0.0)
        parts = dict.fromkeys(part for values in rows.values() for part in values)
        for part in parts:
            numbers = [values.get(part, 0.0) / factor for values in rows.values()]
            ax.barh(list(rows), numbers, left=list(left.values()), label=part)
            left = {name: left[name] + n for name, n in zip(rows, numbers)}
        ax.invert_yaxis()
        ax.set_xlabel(f"{multiple} {axis}".strip())
        if len(parts) > 1:
            legend(ax)

    figure(path, (9, 1.4 + 0.45 * len(rows)), draw, title=title)
