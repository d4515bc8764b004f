"""The machine: whether it can run the day at all, packages, versions, the card and its two ceilings."""

import ast
import contextlib
import importlib
import importlib.metadata
import os
import pathlib
import platform
import sys

from bench.gpu_day.part import Context

PACKAGE = pathlib.Path(__file__).parents[3] / "tpfuse"
OPTIONAL = "pytest", "transformers", "matplotlib", "tqdm"
KERNELS = "triton"  # the library imports without it, and has no kernels then


def imported() -> dict[str, str]:
    """Package -> the first file of the library that imports it when it is imported itself."""
    modules: dict[str, str] = {KERNELS: "kernels/runtime/triton.py"}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                modules.setdefault(name, str(path.relative_to(PACKAGE)))
    modules.pop(PACKAGE.name, None)
    return dict(sorted(modules.items()))


def jobs(context: Context) -> list[str]:
    return ["machine", "card"]


def run(job: str, context: Context) -> None:
    _machine(context) if job == "machine" else _card(context)


def _machine(context: Context) -> None:
    versions, missing = dict(python=platform.python_version()), []
    for name, path in imported().items():
        try:
            versions[name] = getattr(importlib.import_module(name), "__version__", "?")
        except ImportError as error:
            missing.append(f"{name}, which tpfuse/{path} imports ({error})")
    if missing:
        raise RuntimeError(f"not installed: {'; '.join(missing)}")
    for name in OPTIONAL:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    import torch

    if not context.tiny and not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU here; --rehearse runs every line on a CPU")
    from tpfuse.tools.bench.roofline import card_name

    context.emit(dict(device=card_name(context.device), versions=versions, cores=os.cpu_count()))


def _card(context: Context) -> None:
    import dataclasses

    from bench.gpu_day.sheets import data_sheet
    from tpfuse.tools.bench.definition import DTYPES
    from tpfuse.tools.bench.roofline import measure_card

    sizes = dict(copy_mib=4, side=64) if context.tiny else {}
    card = measure_card(context.device, {name: DTYPES[name] for name in ("bf16",)}, **sizes)
    sheet = data_sheet(card.name)
    context.emit(dict(card=dataclasses.asdict(card), sheet=None if sheet is None else dataclasses.asdict(sheet)))


def headline(rows: list[dict]) -> str:
    card = next((row["card"] for row in rows if "card" in row), None)
    if card is None:
        return ", ".join(row["device"] for row in rows)
    return f"{card['name']}: copy {card['copy_gbs']:.0f} GB/s, bf16 {card['matrix_tflops']['bf16']:.0f} TFLOP/s"
