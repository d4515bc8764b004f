"""The machine that a result is of, as tables name it."""

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpfuse.kernels.runtime.processor import LIMITS, order_of_sums

Machine = Mapping[str, Any]


def this_machine() -> dict[str, Any]:
    """Returns what decides a result beside the code: values of JSON, by their names."""
    order = order_of_sums()
    return {
        "processor": order["processor"],
        "instructions": order["instructions"],
        "limits": {name: value for name, value in LIMITS.items() if value is not None},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "libraries": order["libraries"],
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def kind(machine: Machine) -> str:
    """Returns the kind of processor: the model, and the instructions that its libraries use, or are limited to."""
    instructions: str = machine["instructions"]
    return f"{machine['processor']}, {f'limited to {instructions.split()[0]}' if machine['limits'] else instructions}"


def caption(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line that says where the results were measured; "" of none."""
    known = [result["machine"] for result in results if "machine" in result]
    if not known:
        return "Measured before results said their processor." if any(results) else ""
    each = "; ".join(f"{kind(m)}, {m['cores']} cores, torch {m['torch']}, {m['date']}" for m in known)
    return f"Measured on: {each}."


def heads(column: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the heads of a column for each result: its name, and the kind of processor where there are several."""
    if len(results) == 1:
        return [column]
    return [f"{column}: {kind(result['machine']) if 'machine' in result else 'not said'}" for result in results]


def flips(claims: Mapping[str, Sequence[float]]) -> str:
    """Names the claims, ratios by kind of processor, that are above 1 on one kind and below it on another."""
    flipped = [claim for claim, ratios in claims.items() if min(ratios, default=1) < 1 < max(ratios, default=1)]
    return f"Above 1 on one kind of processor and below it on another: {'; '.join(flipped)}." if flipped else ""
