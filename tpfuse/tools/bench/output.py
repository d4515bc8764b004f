"""Rows as a table that fits a terminal, CSV and JSON."""

import csv
import itertools
import json
import math
import pathlib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ...kernels.runtime.triton import AVAILABLE, triton
from ..ledger.text import table as aligned
from .roofline import Card
from .run import COLUMNS, Results, Row

GROUP = "op", "shape", "dtype", "mode"  # what a group of rows shares


def figure(value: float | None) -> str:
    """Returns three digits."""
    return "" if value is None else f"{value:.2g}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _speedup(row: Row) -> str:
    if row["speedup"] is None or row["provider"] == row["baseline"]:
        return "" if row["speedup"] is None else "baseline"
    return f"{row['speedup']:.2f} ({row['speedup_p20']:.2f}-{row['speedup_p80']:.2f})"


def _share(row: Row) -> str:
    """A share of memory's roofline says nothing where the cache was read instead."""
    return "" if row["roofline"] is None or row["bound"] == "cache" else f"{100 * row['roofline']:.1f}"


# A table's columns, the most important first: a narrow terminal leaves out the last ones, but none of the first FIXED.
CELLS: dict[str, Callable[[Row], str]] = {
    "provider": lambda row: row["provider"],
    " ": lambda row: "WRONG" if row["wrong"] else "",
    "p50 us": lambda row: figure(row["p50_us"]),
    "speed-up": _speedup,
    "error": lambda row: "" if row["error"] is None else f"{row['error']:.1e}",
    "limit": lambda row: "" if row["error"] is None else f"{row['limit']:.1e}",
    "p20-p80 us": lambda row: f"{figure(row['p20_us'])}-{figure(row['p80_us'])}",
    "GB/s": lambda row: figure(row["gbs"]),
    "TFLOP/s": lambda row: figure(row["tflops"]),
    "roof %": _share,
    "of": lambda row: row["bound"] or "",
    "peak MiB": lambda row: figure(row["peak_mib"]),
    "regs": lambda row: "" if row["registers"] is None else str(row["registers"]),
    "spill B": lambda row: "" if row["spills"] is None else str(row["spills"]),
    "timed": lambda row: row["timed"],
    "path": lambda row: row["path"] or "",
}
FIXED = 6


def table(rows: Sequence[Row], width: int) -> str:
    """Returns the rows in groups of what shares its inputs, in no more than ``width`` columns of a terminal.

    Columns that are empty are left out, and then the last ones that do not fit, which a line under the table names.
    """
    if not rows:
        return "no rows"
    cells = {head: [cell(row) for row in rows] for head, cell in CELLS.items()}
    heads = [head for head in CELLS if any(cells[head])]
    fixed = sum(head in heads for head in list(CELLS)[:FIXED])
    for kept in range(len(heads), fixed - 1, -1):
        head, rule, *body = aligned(heads[:kept], zip(*(cells[head] for head in heads[:kept]))).splitlines()
        if kept == fixed or len(rule) <= width:
            break
    lines = [head, rule]
    for group, members in itertools.groupby(zip(rows, body), lambda pair: [pair[0][key] for key in GROUP]):
        lines += ["", *textwrap.wrap(" ".join(group), width), *(line for _, line in members)]
    dropped = f"not in {width} columns: {', '.join(heads[kept:])}; --csv and --json have them"
    return "\n".join([*lines, *(["", *textwrap.wrap(dropped, width)] if kept < len(heads) else [])])


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
    """Returns everything, for programs; what is no number as JSON has them becomes a string."""
    plain = lambda value: str(value) if isinstance(value, float) and not math.isfinite(value) else value
    return dict(
        card=asdict(card),
        torch=torch.__version__,
        triton=triton.__version__ if AVAILABLE else None,
        rows=[{key: plain(value) for key, value in row.items()} for row in results.rows],
        notes=results.notes,
    )


def write_csv(rows: Sequence[Row], path: pathlib.Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def write_json(result: dict[str, Any], path: pathlib.Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")
