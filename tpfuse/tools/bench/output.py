"""Rows as an aligned table, CSV and JSON."""

import csv
import json
import pathlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from ...kernels.runtime.triton import AVAILABLE, triton
from .roofline import Card
from .run import COLUMNS, Results, Row

HEADS = dict(
    p20_us="p20 us",
    p50_us="p50 us",
    p80_us="p80 us",
    tflops="TFLOP/s",
    gbs="GB/s",
    roofline="roof %",
    bound="of",
    error_ratio="/ torch's",
)
HEADS |= dict(registers="regs", spills="spill B", peak_mib="peak MiB")
LEFT = "op", "shape", "dtype", "mode", "provider", "bound", "timed", "path"


def cell(row: Row, key: str) -> str:
    """Returns the text of a figure; a share of memory's roofline is left out where the cache was read instead."""
    value = row[key]
    if value is None or (key == "roofline" and row["bound"] == "cache"):
        return ""
    if key == "roofline":
        return f"{100 * value:.1f}"
    if key == "error":
        return f"{value:.1e}"
    if isinstance(value, float):
        return f"{value:.2g}" if abs(value) < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return str(value)


def table(rows: Sequence[Row]) -> str:
    """Returns the rows aligned for a terminal."""
    lines = [[HEADS.get(key, key) for key in COLUMNS], *([cell(row, key) for key in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = lambda key, text, width: text.ljust(width) if key in LEFT else text.rjust(width)
    return "\n".join("  ".join(map(align, COLUMNS, line, widths)).rstrip() for line in lines)


def cached(rows: Sequence[Row], cache: int) -> list[str]:
    """Returns the line that explains the mark of rows that may have read the cache instead of memory, if there are
    any."""
    marked = dict.fromkeys(f"{row['op']} {row['shape']} {row['dtype']}" for row in rows if row["bound"] == "cache")
    why = f"the last-level cache ({cache / 2**20:.4g} MiB) may hold the inputs, of which memory's roofline says nothing"
    return [f"{', '.join(marked)}: {why}"] if marked else []


def ceilings(card: Card) -> str:
    """Returns the line above the table: what the device can do."""
    rates = ", ".join(f"{dtype} {rate:.4g} TFLOP/s" for dtype, rate in card.matrix_tflops.items())
    copy = f"copy {card.copy_gbs:.4g} GB/s"
    return f"{card.name}: {copy}, matrix product {rates} (measured now; the roofline of what follows)"


def result(results: Results, card: Card) -> dict[str, Any]:
    """Returns everything, for programs."""
    return dict(
        card=asdict(card),
        torch=torch.__version__,
        triton=triton.__version__ if AVAILABLE else None,
        rows=results.rows,
        notes=results.notes,
    )


def write_csv(rows: Sequence[Row], path: pathlib.Path) -> None:
    """Writes a line a row."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "bytes", "flops"])
        writer.writeheader()
        writer.writerows(rows)


def write_json(result: dict[str, Any], path: pathlib.Path) -> None:
    """Writes everything."""
    path.write_text(json.dumps(result, indent=1) + "\n")
