"""Two pictures of rows: the roofline, and time and speed-up by shape, along a sweep as curves.  Needs matplotlib.

A hollow marker of the roofline is a call whose inputs may have come from the cache, of which it says nothing; a cross
is a call whose error is beyond its limit.
"""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from ..command import check_file, check_picture, picture_formats
from .roofline import Card
from .run import Row

PICTURES = "roofline.png", "speed.png"  # in a folder
SIDE_BY_SIDE = 4  # panels
CURVES = {"us a call": ("p50_us", "p20_us", "p80_us"), "speed-up over": ("speedup", "speedup_p20", "speedup_p80")}


def check(path: pathlib.Path) -> None:
    """Raises ValueError where nothing can be drawn there: without matplotlib, in a format that it does not write, or
    in a file that cannot be written."""
    if is_picture(path):
        check_picture(path, "; a folder that does not exist yet has no suffix")
    else:
        for name in PICTURES:
            check_file(path / name)
    picture_formats()


def is_picture(path: pathlib.Path) -> bool:
    """Returns True for the path of one picture, False for a folder of pictures."""
    return bool(path.suffix) and not path.is_dir()


def draw(rows: Sequence[Row], card: Card, path: pathlib.Path, axis: str | None = None) -> list[pathlib.Path]:
    """Draws one picture to a file, or roofline.png and speed.png into a folder; returns what was written.

    Along the ``axis`` of a sweep these are curves alone.  The roofline has no rows without rates.
    """
    from matplotlib.figure import Figure

    if not rows:
        return []
    panels = len({_panel(row, axis) for row in rows})
    across = min(SIDE_BY_SIDE, panels)
    sizes = dict(zip(PICTURES, ((9.0, 6.0), (max(4.0 * across, 6.0), 5.0 * -(-panels // across))), strict=True))
    if axis or not any(row["bytes"] for row in rows):
        del sizes["roofline.png"]
    if is_picture(path):
        width, high = max(w for w, _ in sizes.values()), [h for _, h in sizes.values()]
        figure = Figure(figsize=(width, sum(high)), layout="constrained")
        parts = figure.subfigures(len(high), 1, height_ratios=high, squeeze=False)[:, 0]
        figures, files = dict(zip(sizes, parts, strict=True)), {path: figure}
    else:
        figures = {name: Figure(figsize=size, layout="constrained") for name, size in sizes.items()}
        files = {path / name: figure for name, figure in figures.items()}
    for name, figure in figures.items():
        _curves(figure, rows, axis) if name == "speed.png" else _roofline(figure, rows, card)
    for file, figure in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=110)
    return list(files)


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    return {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row["provider"] for row in rows))}


def _crosses(axes: Any, rows: Sequence[Row], xs: Sequence[float], ys: Sequence[float]) -> None:
    wrong = [(x, y) for row, x, y in zip(rows, xs, ys, strict=True) if row["wrong"]]
    axes.plot(*zip(*wrong) if wrong else ([], []), marker="x", c="k", ms=9, ls="none")


def _legend(figure: Any, rows: Sequence[Row], *more: Any) -> None:
    """Draws the legend above the panels, off the data."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], c=colour, marker="o", ms=5, label=name) for name, colour in _colours(rows).items()]
    if any(row["wrong"] for row in rows):
        lines.append(Line2D([], [], c="k", ls="none", marker="x", ms=9, label="WRONG"))
    figure.legend(handles=[*lines, *more], loc="outside upper center", ncols=4, fontsize=8)


def _roofline(figure: Any, rows: Sequence[Row], card: Card) -> None:
    """Draws bandwidth over intensity: flat up to the ridge, falling beyond it.

    Ops without matrix products stand at 0 on the left.
    """
    axes, rows = figure.subplots(), [row for row in rows if row["bytes"]]
    most = max([10.0, *(row["flops"] / row["bytes"] for row in rows)]) * 4
    roofs = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        ridge = card.matrix_tflops[dtype] * 1e3 / card.copy_gbs
        xs = [0, *(ridge * 1.1**i for i in range(1 + max(0, math.ceil(math.log(max(most / ridge, 1), 1.1)))))]
        roof = [card.copy_gbs * min(1, ridge / max(x, ridge)) for x in xs]
        roofs += axes.plot(xs, roof, label=f"roof, {dtype}", c="0.4", lw=1)
    for name, colour in _colours(rows).items():
        mine = [row for row in rows if row["provider"] == name]
        xs, ys = [row["flops"] / row["bytes"] for row in mine], [row["gbs"] for row in mine]
        filled = ["none" if row["bound"] == "cache" else colour for row in mine]
        axes.scatter(xs, ys, s=18, edgecolors=colour, facecolors=filled, alpha=0.7)
        _crosses(axes, mine, xs, ys)
    axes.set(xscale="symlog", yscale="log", xlim=(-0.2, most))
    axes.set(xlabel="intensity, FLOP a counted byte", ylabel="counted GB/s")
    hollow = any(row["bound"] == "cache" for row in rows)
    axes.set_title(card.name + "; hollow: the inputs may have come from the cache" * hollow, fontsize=8)
    _legend(figure, rows, *roofs)


def _place(row: Row, axis: str | None) -> tuple[int, str, str]:
    """Returns a row's place along the swept axis, its label, and its other sizes; without an axis all shapes are in
    one order, their own."""
    if axis is None:
        return 0, row["shape"], ""
    sizes = dict(zip(row["axes"].split("x"), row["shape"].split("x"), strict=True))
    mine = sizes.pop(axis)
    return int(mine), mine, "".join(f", {name} = {size}" for name, size in sizes.items())


def _panel(row: Row, axis: str | None) -> str:
    return f"{row['op']} {row['mode']} {row['dtype']}{_place(row, axis)[2]}"


def _curves(figure: Any, rows: Sequence[Row], axis: str | None) -> None:
    """Draws a pair of panels for every op, mode and dtype, time by size and under it the speed-up; bars reach from the
    20 % to the 80 % quantile."""
    titles = list(dict.fromkeys(_panel(row, axis) for row in rows))
    across = min(SIDE_BY_SIDE, len(titles))
    grid = figure.subplots(2 * -(-len(titles) // across), across, squeeze=False)
    for empty in grid[-2:, (len(titles) - 1) % across + 1 :].flat:
        empty.set_axis_off()
    for i, title in enumerate(titles):
        here = sorted((row for row in rows if _panel(row, axis) == title), key=lambda row: _place(row, axis)[0])
        labels = list(dict.fromkeys(_place(row, axis)[1] for row in here))
        for pair, (text, keys) in enumerate(CURVES.items()):
            axes = grid[2 * (i // across) + pair, i % across]
            for name, colour in _colours(rows).items():
                mine = [row for row in here if row["provider"] == name and row[keys[0]] is not None]
                xs = [labels.index(_place(row, axis)[1]) for row in mine]
                middle, low, high = ([row[key] for row in mine] for key in keys)
                bars = [[b - a for a, b in zip(low, middle)], [b - a for a, b in zip(middle, high)]]
                line = "-" if axis else "none"
                axes.errorbar(xs, middle, yerr=bars, c=colour, ls=line, lw=1.2, marker="o", ms=4, capsize=2)
                _crosses(axes, mine, xs, middle)
            axes.set_xticks(range(len(labels)), labels, rotation=30 if len("".join(labels)) > 24 else 0, fontsize=8)
            axes.set_xlabel(f"{axis}, elements" if axis else f"{here[0]['axes']}, elements", fontsize=8)
            axes.set_ylabel(f"{text} {here[0]['baseline']}, times" if pair else f"{text}, 20 % to 80 %", fontsize=8)
            axes.grid(alpha=0.3)
            axes.set(ylim=(0, None)) if pair else axes.set(yscale="log")
            if not pair:
                axes.set_title(title, fontsize=8)
    _legend(figure, rows)
