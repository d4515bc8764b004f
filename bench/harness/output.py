"""Rows as an aligned table, CSV, JSON, and two plots a file can show: the roofline, and speed over size."""

import csv
import json
import math
import pathlib
import sys
from dataclasses import asdict

import torch

from bench.harness.roofline import Card
from bench.harness.run import COLUMNS

HEADS = dict(
    p20_us="p20 us",
    p50_us="p50 us",
    p80_us="p80 us",
    tflops="TFLOP/s",
    gbs="GB/s",
    roofline="roof %",
    error_ratio="/ torch's",
)
HEADS |= dict(registers="regs", spills="spill B", peak_mib="peak MiB")
LEFT = "op", "shape", "dtype", "mode", "provider", "timed", "path"


def cell(row: dict, key: str) -> str:
    value = row[key]
    if value is None:
        return ""
    if key == "roofline":
        return f"{100 * value:.1f}"
    if key == "error":
        return f"{value:.1e}"
    if isinstance(value, float):
        return f"{value:.2g}" if abs(value) < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return str(value)


def table(rows: list[dict]) -> str:
    """Aligned for a terminal."""
    lines = [[HEADS.get(key, key) for key in COLUMNS], *([cell(row, key) for key in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = lambda key, text, width: text.ljust(width) if key in LEFT else text.rjust(width)
    return "\n".join("  ".join(map(align, COLUMNS, line, widths)).rstrip() for line in lines)


def ceilings(card: Card) -> str:
    rates = ", ".join(f"{dtype} {rate:.4g} TFLOP/s" for dtype, rate in card.matrix_tflops.items())
    copy = f"copy {card.copy_gbs:.4g} GB/s"
    return f"{card.name}: {copy}, matrix product {rates} (measured now; the roofline of what follows)"


def result(rows: list[dict], notes: list[str], card: Card) -> dict:
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = None
    return dict(card=asdict(card), torch=torch.__version__, triton=triton, rows=rows, notes=notes)


def write_csv(rows: list[dict], path: pathlib.Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "bytes", "flops"])
        writer.writeheader()
        writer.writerows(rows)


def write_json(result: dict, path: pathlib.Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def plot(rows: list[dict], card: Card, folder: pathlib.Path) -> list[pathlib.Path]:
    """roofline.png and speed.png in ``folder``; nothing, and a line that says so, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: pip install matplotlib", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    counted = [row for row in rows if row["bytes"]]
    return [_roofline(counted, card, folder / "roofline.png"), _speed(counted, folder / "speed.png")]


def _colours(rows: list[dict]) -> dict[str, str]:
    return {name: f"C{i}" for i, name in enumerate(dict.fromkeys(row["provider"] for row in rows))}


def _roofline(rows: list[dict], card: Card, path: pathlib.Path) -> pathlib.Path:
    """Draws bandwidth over intensity: flat up to the ridge, falling beyond it.

    Ops without matrix products stand at 0 on the left.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    most = max([10.0, *(row["flops"] / row["bytes"] for row in rows)]) * 4
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        ridge = card.matrix_tflops[dtype] * 1e3 / card.copy_gbs
        xs = [0, *(ridge * 1.1**i for i in range(1 + max(0, math.ceil(math.log(max(most / ridge, 1), 1.1)))))]
        roof = [card.copy_gbs * min(1, ridge / max(x, ridge)) for x in xs]
        axes.plot(xs, roof, label=f"roof, {dtype}", c="0.4", lw=1)
    for name, colour in _colours(rows).items():
        mine = [row for row in rows if row["provider"] == name]
        axes.scatter(
            [row["flops"] / row["bytes"] for row in mine],
            [row["gbs"] for row in mine],
            s=18,
            c=colour,
            label=name,
            alpha=0.7,
        )
    axes.set(
        xscale="symlog", yscale="log", xlim=(-0.2, most), xlabel="intensity, FLOP a counted byte", ylabel="counted GB/s"
    )
    axes.set_title(card.name)
    axes.legend()
    return _save(figure, path)


def _speed(rows: list[dict], path: pathlib.Path) -> pathlib.Path:
    """A panel for every op, mode and dtype: share of the roofline over the bytes moved."""
    from matplotlib import pyplot as plt

    cases = list(dict.fromkeys((row["op"], row["mode"], row["dtype"]) for row in rows)) or [("nothing", "counted", "")]
    wide = min(4, len(cases))
    figure, grid = plt.subplots(
        -(-len(cases) // wide), wide, figsize=(4 * wide, 3 * -(-len(cases) // wide)), squeeze=False
    )
    for axes in grid.flat[len(cases) :]:
        axes.set_axis_off()
    for case, axes in zip(cases, grid.flat, strict=False):
        for name, colour in _colours(rows).items():
            mine = [row for row in rows if (row["op"], row["mode"], row["dtype"]) == case and row["provider"] == name]
            mine.sort(key=lambda row: row["bytes"])
            axes.plot(
                [row["bytes"] / 2**20 for row in mine],
                [100 * row["roofline"] for row in mine],
                "o-",
                c=colour,
                ms=3,
                label=name,
            )
        axes.set(xscale="log", ylim=(0, None), xlabel="MiB moved", ylabel="% of the roofline")
        axes.set_title(" ".join(case), fontsize=8)
    grid[0, 0].legend(fontsize=7)
    return _save(figure, path)


def _save(figure, path: pathlib.Path) -> pathlib.Path:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
