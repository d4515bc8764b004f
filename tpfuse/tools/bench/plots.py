"""Two pictures of rows: the roofline, and each op's share of it over size.  Needs matplotlib.

A hollow marker is a call whose inputs may have come from the cache, of which the roofline says nothing.
"""

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from .roofline import Card
from .run import Row


def check(path: pathlib.Path) -> None:
    """Raises ValueError where nothing can be drawn there: without matplotlib, or in a format that it does not write."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError('--plot needs matplotlib: pip install "tpfuse[bench]"') from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if is_picture(path) and path.suffix[1:].lower() not in formats:
        raise ValueError(
            f"--plot {path}: a picture ends in one of {', '.join('.' + name for name in formats)}, and a folder that"
            " does not exist yet in no suffix"
        )


def is_picture(path: pathlib.Path) -> bool:
    """Returns True for the path of one picture, False for a folder of pictures."""
    return bool(path.suffix) and not path.is_dir()


def draw(rows: Sequence[Row], card: Card, path: pathlib.Path) -> list[pathlib.Path]:
    """Draws both pictures as one file, or as roofline.png and speed.png in a folder; returns what was written.

    Rows without rates are left out, and nothing is drawn where all are.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["bytes"]]
    if not rows:
        return []
    high = 3.0 * _grid(rows)[0]
    if is_picture(path):
        figure = Figure(figsize=(16, 6 + high), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(6, high))
        _roofline(parts[0], rows, card)
        _speed(parts[1], rows)
        return [_save(figure, path)]
    paths = []
    pictures: dict[str, tuple[tuple[float, float], Callable[[Any], None]]] = {
        "roofline.png": ((9, 6), lambda figure: _roofline(figure, rows, card)),
        "speed.png": ((4 * _grid(rows)[1], high), lambda figure: _speed(figure, rows)),
    }
    for name, (size, onto) in pictures.items():
        figure = Figure(figsize=size, layout="constrained")
        onto(figure)
        paths.append(_save(figure, path / name))
    return paths


def _save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    return {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row["provider"] for row in rows))}


def _filled(rows: Sequence[Row], colour: str) -> list[str]:
    return ["none" if row["bound"] == "cache" else colour for row in rows]


def _roofline(figure: Any, rows: Sequence[Row], card: Card) -> None:
    """Draws bandwidth over intensity: flat up to the ridge, falling beyond it.

    Ops without matrix products stand at 0 on the left.
    """
    axes = figure.subplots()
    most = max([10.0, *(row["flops"] / row["bytes"] for row in rows)]) * 4
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        ridge = card.matrix_tflops[dtype] * 1e3 / card.copy_gbs
        xs = [0, *(ridge * 1.1**i for i in range(1 + max(0, math.ceil(math.log(max(most / ridge, 1), 1.1)))))]
        roof = [card.copy_gbs * min(1, ridge / max(x, ridge)) for x in xs]
        axes.plot(xs, roof, label=f"roof, {dtype}", c="0.4", lw=1)
    for name, colour in _colours(rows).items():
        mine = [row for row in rows if row["provider"] == name]
        intensities, speeds = [row["flops"] / row["bytes"] for row in mine], [row["gbs"] for row in mine]
        axes.scatter(
            intensities, speeds, s=18, edgecolors=colour, facecolors=_filled(mine, colour), label=name, alpha=0.7
        )
    axes.set(
        xscale="symlog", yscale="log", xlim=(-0.2, most), xlabel="intensity, FLOP a counted byte", ylabel="counted GB/s"
    )
    hollow = any(row["bound"] == "cache" for row in rows)
    axes.set_title(card.name + "; hollow: the inputs may have come from the cache" * hollow)
    axes.legend()


def _case(row: Row) -> tuple[str, str, str]:
    return row["op"], row["mode"], row["dtype"]


def _cases(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    return list(dict.fromkeys(map(_case, rows)))


def _grid(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns how many panels lie above each other, and side by side."""
    cases = len(_cases(rows))
    columns = min(4, cases)
    return -(-cases // columns), columns


def _speed(figure: Any, rows: Sequence[Row]) -> None:
    """Draws a panel for every op, mode and dtype: the share of the roofline over the bytes moved."""
    cases = _cases(rows)
    grid = figure.subplots(*_grid(rows), squeeze=False)
    for axes in grid.flat[len(cases) :]:
        axes.set_axis_off()
    for case, axes in zip(cases, grid.flat, strict=False):
        for name, colour in _colours(rows).items():
            mine = [row for row in rows if _case(row) == case and row["provider"] == name]
            mine.sort(key=lambda row: row["bytes"])
            sizes, shares = [row["bytes"] / 2**20 for row in mine], [100 * row["roofline"] for row in mine]
            axes.plot(sizes, shares, c=colour, label=name)
            axes.scatter(sizes, shares, s=9, edgecolors=colour, facecolors=_filled(mine, colour), zorder=3)
        axes.set(xscale="log", xlabel="MiB moved", ylabel="% of the roofline")
        axes.set_ylim(0, 110 * max(row["roofline"] for row in rows if _case(row) == case))
        axes.set_title(" ".join(case), fontsize=8)
    grid[0, 0].legend(fontsize=7)
