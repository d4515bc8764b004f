"""``python -m tpfuse layouts``: the layout of every op of a block on a mesh, solved, searched and explained."""

import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ....kernels.runtime.errors import check
from ... import command as cli
from ...command import CommandParser
from ...ledger.commands import add_settled_seq, settled_config
from ...ledger.plots import bars
from ...ledger.text import duration, quantity, table
from ...options import DTYPES, add_dtype, add_model, add_optimizer
from ..collectives import Link
from ..split import Job
from .conversions import Mesh
from .coordinate_descent import descent
from .graph import stack
from .milp import exact, least_memory
from .problem import Solution
from .result import FOOTNOTE, Result, difference, explain, runs_as
from .space import Rates, Space

EXACT, DESCENT, SECOND, MEGATRON = "exact", "descent", "second best", "Megatron"


DETAILS = """Finds the layout of each op of a transformer block on a mesh, in the words of DTensor: an activation
[batch, seq, width] is Shard(0), Shard(1), Shard(2) (of heads, where there are heads), Replicate or Partial on each axis
of the mesh, a weight [out, in] is Shard(0) (Megatron's columns), Shard(1) (its rows) or Replicate. Solved exactly
(integer programming) for the least seconds of forward and backward, beside what coordinate descent finds, and
Megatron's own. Needs scipy: pip install 'tpfuse[plan]'. Such as: layouts --model gpt-22b --mesh 8 --split-weights
--explain"""


def register(p: CommandParser) -> None:
    p.runs(_run, DETAILS)
    add_model(p)
    p.add_argument(
        "--mesh", type=mesh_shape, default="8", metavar="N|NxM", help="ranks of one axis or two, outer first"
    )
    add_settled_seq(p)
    cli.add_count(p, "--batch", "sequences that the mesh runs at once", 1)
    cli.add_count(p, "--micro-batches", "micro-batches of --batch between two sums of the weights' gradients", 1)
    cli.add_count(p, "--blocks", "number of blocks in a row, each with layouts of its own", 1)
    add_dtype(p)
    add_optimizer(p, "adamw-fp32")
    state = p.add_mutually_exclusive_group()
    cli.add_number(
        state,
        "--memory",
        cli.rate,
        "limit on a rank's weights, gradients and optimizer states of all blocks, in GB (default: no limit)",
    )
    cli.add_flag(state, "--split-weights", "limit memory to the least: every matrix split over all ranks")
    cli.add_number(
        p,
        "--tflops",
        cli.rate,
        "matrix rate that a rank reaches, in TFLOP/s (default: 75 %% of an A100's peak, 234)",
        default=234.0,
    )
    cli.add_number(
        p,
        "--memory-bandwidth",
        cli.rate,
        "memory bandwidth that a rank reaches, in GB/s (default: 80 %% of an A100's, 1632)",
        default=1632.0,
    )
    links = "bandwidth of a rank's link along each axis, in GB/s (default: 230, along the outer one 25)"
    cli.add_numbers(p, "--bandwidth", cli.rate, links, of="X")
    cli.add_number(p, "--latency", cli.seconds, "time a message is under way, in seconds", default=1e-6)
    cli.add_flag(p, "--explain", "print the cost of each op's other layouts, and the second best choice")
    cli.add_output(p)


def mesh_shape(text: str) -> tuple[int, ...]:
    """Returns the axes of "4x8"."""
    try:
        return tuple(cli.positive(part) for part in text.split("x"))
    except ArgumentTypeError:
        raise ArgumentTypeError(f"must be ranks an axis such as 8 or 4x8, got {text!r}") from None


def _run(args: Namespace) -> None:
    layouts = solve(args)
    cli.present(args, layouts.text(), layouts.json(), lambda path: draw(layouts, path))


class Layouts(NamedTuple):
    """Solutions by search, the exact one first; ``times``: seconds of each search; ``failed``: searches without a
    solution, and why."""

    title: str
    space: Space
    solutions: dict[str, Solution]
    times: dict[str, float]
    failed: dict[str, str]
    explained: bool

    def results(self) -> dict[str, Result]:
        return {name: Result.of(self.space, solution) for name, solution in self.solutions.items()}

    def text(self) -> str:
        results, best = self.results(), self.solutions[EXACT]
        header = ("", "takes", *results[EXACT].parts, "sent", "state", "found in")
        rows = []
        for name, r in results.items():
            parts = (duration(x) if x else "-" for x in r.parts.values())
            sizes = quantity(r.sent, "B"), quantity(r.memory, "B")
            rows.append((name, duration(r.seconds), *parts, *sizes, duration(self.times[name])))
        pages = [
            f"{self.title}; {self.space.problem.variables:,} variables",
            f"{results[EXACT].text()}\n{FOOTNOTE}",
            table(header, rows),
        ]
        pages.append("\n".join(f"{name}: {runs_as(self.space, s)}" for name, s in self.solutions.items()))
        pages += [f"{name}: {why}" for name, why in self.failed.items()]
        if self.explained:
            pages += [f"all layouts of each op, the chosen ones marked (*):\n{explain(self.space, best)}"]
            if SECOND in self.solutions:
                pages += [f"{SECOND}: {difference(self.space, best, self.solutions[SECOND])}"]
        return "\n\n".join(pages)

    def json(self) -> dict[str, object]:
        results = {name: result.json() for name, result in self.results().items()}
        for name, solution in self.solutions.items():
            results[name]["runs"] = None if (split := self.space.split(solution)) is None else split._asdict()
        return dict(variables=self.space.problem.variables, found=results, took=self.times, failed=self.failed)


def solve(args: Namespace) -> Layouts:
    """Runs the searches of the options.

    ValueError for sizes that do not match, and where no layout fits in --memory.
    """
    sizes, widths = args.mesh, args.bandwidth or [25.0] * (len(args.mesh) - 1) + [230.0]
    check(len(widths) == len(sizes), f"layouts: --bandwidth needs {len(sizes)} numbers, one an axis, got {len(widths)}")
    mesh = Mesh(sizes, tuple(Link(args.latency, width * 1e9) for width in widths))
    config = settled_config(args)
    job = Job(config, args.batch, args.seq, dtype=DTYPES[args.dtype], optimizer=args.optimizer)
    space = Space(
        stack(job, args.blocks), mesh, Rates(args.tflops * 1e12, args.memory_bandwidth * 1e9, args.micro_batches)
    )
    limit = float("inf") if args.memory is None else args.memory * 1e9
    if args.split_weights:
        limit = least_memory(space.problem)
    problem = space.problem._replace(limit=limit)
    searches: dict[str, Callable[[], Solution]] = {
        EXACT: lambda: exact(problem),
        DESCENT: lambda: descent(problem, space.starts()),
    }
    if args.explain:
        searches[SECOND] = lambda: exact(problem, [solutions[EXACT].pick])
    for axes in dict.fromkeys([(len(sizes) - 1,), tuple(range(len(sizes)))]):
        name = f"{MEGATRON} ({', '.join(map(str, axes))})"
        searches[name] = lambda axes=axes: _megatron(space, axes)  # type: ignore[misc]
    solutions, times, failed = dict[str, Solution](), dict[str, float](), dict[str, str]()
    for name, solve_by in searches.items():
        began = time.perf_counter()
        try:
            solutions[name] = solve_by()
        except ValueError as error:
            if name == EXACT:
                raise
            failed[name] = str(error)
        times[name] = time.perf_counter() - began
    memory = "no limit on state" if args.memory is None else f"{quantity(limit, 'B')} of state"
    title = (
        f"{args.model}, batch {args.batch} x {args.seq}, {args.blocks} of {job.config.num_layers} blocks on"
        f" {' x '.join(map(str, sizes))} ranks, {'weights split' if args.split_weights else memory}"
    )
    return Layouts(title, space, solutions, times=times, failed=failed, explained=args.explain)


def _megatron(space: Space, axes: tuple[int, ...]) -> Solution:
    """Returns Megatron's layouts, whatever the memory limit; ValueError where shapes do not allow them."""
    pick = space.nearest(space.megatron(axes))
    check(space.exactly(pick, space.megatron(axes)), "batch, positions, heads or widths do not divide evenly")
    return space.problem.solution(pick)


def draw(layouts: Layouts, path: Path) -> None:
    """Draws the seconds by part of each solution."""
    parts = {name: result.parts for name, result in layouts.results().items()}
    bars(parts, path, title=layouts.title, axis="of forward and backward", unit="s")
