"""``python -m tpfuse layouts``: the layout of every op of a block on a mesh, solved, searched and explained."""

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ....kernels.runtime.errors import check
from ...ledger.options import DTYPES
from ...ledger.plots import bars
from ...ledger.presets import load_config
from ...ledger.text import duration, quantity, table
from ..collectives import Link
from ..split import Job
from .conversions import Mesh
from .coordinate_descent import descent
from .graph import stack
from .milp import exact, least_memory
from .problem import Found
from .result import FOOTNOTE, Result, difference, explain
from .space import Rates, Space

EXACT, DESCENT, SECOND, MEGATRON = "exact", "descent", "second best", "Megatron"


class Layouts(NamedTuple):
    """What was found by each way, the exact one first; ``took``: seconds of a search; ``failed``: ways that found none,
    and why."""

    title: str
    space: Space
    found: dict[str, Found]
    took: dict[str, float]
    failed: dict[str, str]
    explained: bool

    def results(self) -> dict[str, Result]:
        """Returns what was found, in words."""
        return {name: Result.of(self.space, found) for name, found in self.found.items()}

    def text(self) -> str:
        results, best = self.results(), self.found[EXACT]
        header = ("", "takes", *results[EXACT].parts, "sent", "state", "found in")
        rows = []
        for name, r in results.items():
            parts = (duration(x) if x else "-" for x in r.parts.values())
            sizes = quantity(r.sent, "B"), quantity(r.memory, "B")
            rows.append((name, duration(r.seconds), *parts, *sizes, duration(self.took[name])))
        pages = [
            f"{self.title}; {self.space.problem.variables:,} variables",
            f"{results[EXACT].text()}\n{FOOTNOTE}",
            table(header, rows),
        ]
        pages += [f"{name}: {why}" for name, why in self.failed.items()]
        if self.explained:
            pages += [f"every op's layouts beside the chosen ones (*):\n{explain(self.space, best)}"]
            if SECOND in self.found:
                pages += [f"{SECOND}: {difference(self.space, best, self.found[SECOND])}"]
        return "\n\n".join(pages)

    def json(self) -> dict[str, Any]:
        results = {name: result.json() for name, result in self.results().items()}
        return dict(variables=self.space.problem.variables, found=results, took=self.took, failed=self.failed)


def solve(args: Namespace) -> Layouts:
    """Runs the searches that the options describe.

    ValueError for sizes that do not go together, and where no layout fits in --memory.
    """
    sizes, widths = args.mesh, args.bandwidth or [25.0] * (len(args.mesh) - 1) + [230.0]
    check(len(widths) == len(sizes), f"layouts: --bandwidth needs {len(sizes)} numbers, one an axis, got {len(widths)}")
    mesh = Mesh(sizes, tuple(Link(args.latency, width * 1e9) for width in widths))
    job = Job(load_config(args.model), args.batch, args.seq, dtype=DTYPES[args.dtype], optimizer=args.optimizer)
    space = Space(
        stack(job, args.blocks), mesh, Rates(args.tflops * 1e12, args.memory_bandwidth * 1e9, args.micro_batches)
    )
    limit = float("inf") if args.memory is None else args.memory * 1e9
    if args.split_weights:
        limit = least_memory(space.problem)
    problem = space.problem._replace(limit=limit)
    ways: dict[str, Callable[[], Found]] = {
        EXACT: lambda: exact(problem),
        DESCENT: lambda: descent(problem, space.starts()),
    }
    if args.explain:
        ways[SECOND] = lambda: exact(problem, [found[EXACT].pick])
    for axes in dict.fromkeys([(len(sizes) - 1,), tuple(range(len(sizes)))]):
        name = f"{MEGATRON} ({', '.join(map(str, axes))})"
        ways[name] = lambda axes=axes: _megatron(space, axes)  # type: ignore[misc]
    found: dict[str, Found] = {}
    took: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, way in ways.items():
        began = time.perf_counter()
        try:
            found[name] = way()
        except ValueError as error:
            if name == EXACT:
                raise
            failed[name] = str(error)
        took[name] = time.perf_counter() - began
    held = "no limit on state" if args.memory is None else f"{quantity(limit, 'B')} of state"
    title = (
        f"{args.model}, batch {args.batch} x {args.seq}, {args.blocks} of {job.config.num_layers} blocks on"
        f" {' x '.join(map(str, sizes))} ranks, {'weights split' if args.split_weights else held}"
    )
    return Layouts(title, space, found, took=took, failed=failed, explained=args.explain)


def _megatron(space: Space, axes: tuple[int, ...]) -> Found:
    """Returns what Megatron's layouts cost, with or without the memory; ValueError where shapes do not allow them."""
    pick = space.nearest(space.megatron(axes))
    check(space.exactly(pick, space.megatron(axes)), "batch, positions, heads or widths do not divide evenly")
    return space.problem.found(pick)


def draw(layouts: Layouts, path: Path) -> None:
    """Draws seconds by part, of each way."""
    bars({name: result.parts for name, result in layouts.results().items()}, "seconds, forward and backward", path)
