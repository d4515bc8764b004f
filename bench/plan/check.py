"""Plans against real runs: all plans of two processes, and all of a pipeline of four whose stages sleep.

    python -m bench.plan.check                about four minutes on two idle cores, after python -m tpfuse calibrate

Training: every dp x tp of two processes with every micro-batch and way of saving takes real steps, beside the planner's
seconds by the calibration of this machine.  A process has a core of its own; messages pass through memory.

Sleeping: every plan of four stages, of a model on four A100s, runs on the real runtime, whose stages sleep as long as
the planner says of their passes, all by one scale.  Beside it are the simulator's seconds, given what an action and a
message were measured to take.  Sleeping takes no core: what is checked is the order of passes and their waiting, no
GPU's speed.

A row says how many plans, the errors' median and the largest, and Spearman's rank correlation.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from bench._parser import parser_of
from bench.pipeline import sleeping
from tpfuse.pipeline import simulate
from tpfuse.pipeline.schedules import Order
from tpfuse.tools.ledger.layer import with_layers
from tpfuse.tools.ledger.machine import DEFAULT, Machine
from tpfuse.tools.ledger.presets import load_config
from tpfuse.tools.ledger.processes import on_ranks
from tpfuse.tools.ledger.text import duration, progress, table
from tpfuse.tools.plan.check import correlation, measure
from tpfuse.tools.plan.cluster import preset, this_machine
from tpfuse.tools.plan.costs import CostModel, cost_model
from tpfuse.tools.plan.explain import label
from tpfuse.tools.plan.report import cells
from tpfuse.tools.plan.search import candidates
from tpfuse.tools.plan.spans import SpanCache
from tpfuse.tools.plan.split import Job
from tpfuse.tools.plan.step import Load

STAGES = 4


class PlanErrors(NamedTuple):
    """Plans by name, and seconds of each."""

    kind: str
    names: Sequence[str]
    predicted: Sequence[float]
    measured: Sequence[float]

    @property
    def errors(self) -> list[float]:
        """Errors of the predictions, in %."""
        return [100 * (p / m - 1) for p, m in zip(self.predicted, self.measured, strict=True)]

    def row(self) -> str:
        """Returns a row of the table in the docs."""
        off, rank = list(map(abs, self.errors)), correlation(list(self.predicted), list(self.measured))
        return f"| {self.kind} | {len(off)} | {statistics.median(off):.1f} % | {max(off):.1f} % | {rank:.3f} |"

    def text(self) -> str:
        """Returns all plans."""
        seconds = zip(self.names, self.predicted, self.measured, self.errors, strict=True)
        rows = [(name, duration(p), duration(m), f"{error:+.1f} %") for name, p, m, error in seconds]
        return table((self.kind, "predicted", "measured", "error"), rows)


HEAD = "| | plans | median error | largest | rank correlation |\n|---|---|---|---|---|"


def loads(job: Job, devices: int, costs: CostModel, pp: int) -> list[Load]:
    """Returns all plans of ``pp`` stages without FSDP, each with its fastest partition."""
    cache, loads = SpanCache(), []
    for split in progress(candidates(job, devices, dict(pp=pp, cp=1, sharded=False)), "planning"):
        spans = cache.spans(job, split, costs.pieces)
        layers = spans.fastest(split.pp * split.chunks)
        loads.append(Load(job, split._replace(layers=layers), costs, spans))
    return loads


# ---- training ----


def training(machine: Machine, job: Job, *, steps: int) -> PlanErrors:
    """Compares all plans of two processes that have no stages."""
    plans = [load.step() for load in loads(job, 2, cost_model(this_machine(machine, 2, job.dtype)), pp=1)]
    measured = measure(job, [plan.split for plan in plans], steps=steps)
    return PlanErrors("two processes that train", list(map(label, plans)), [plan.seconds for plan in plans], measured)


# ---- sleeping ----


class SleepTimes(NamedTuple):
    """Seconds of steps, and the seconds of an action and a message themselves."""

    steps: list[float]
    overhead: float
    communication: float


def passes(load: Load, scale: float) -> list[sleeping.Passes]:
    """Returns the seconds of a plan's stages, ``scale`` times as long."""
    return [sleeping.Passes(*(scale * seconds for seconds in row)) for row in zip(*load.passes, strict=True)]


class Sleeper(NamedTuple):
    """A plan whose stages sleep: the actions of its ranks, and the seconds of its stages."""

    order: Order
    stages: list[sleeping.Passes]


def asleep(sleepers: list[Sleeper], rounds: int) -> SleepTimes:
    """Returns the fastest of ``rounds`` steps of each plan; every rank calls it."""
    overhead, communication = sleeping.overhead(8, 0.01, 5), sleeping.communication(10)
    times = []
    for x in progress(sleepers, "sleeping", long=True) if dist.get_rank() == 0 else sleepers:
        run = sleeping.steps(x.order, dist.group.WORLD, x.stages)
        steps = [sleeping.step(run) for _ in range(rounds + 1)]
        times.append(min(steps[1:]))  # the step before these makes connections
    return SleepTimes(times, overhead, communication)


def sleeping_stages(job: Job, *, fastest: float, rounds: int) -> PlanErrors:
    """Compares all plans of four stages, scaled so that the fastest takes ``fastest`` seconds."""
    staged = loads(job, STAGES, cost_model(preset("a100-80gb", STAGES)), pp=STAGES)
    scale = fastest / min(load.timeline().seconds for load in staged)
    sleepers = [Sleeper(load.order(), passes(load, scale)) for load in staged]
    slept = on_ranks(STAGES, asleep, sleepers, rounds)
    predicted = [
        simulate(
            x.order, *map(list, zip(*x.stages, strict=True)), communication=slept.communication, overhead=slept.overhead
        ).seconds
        for x in sleepers
    ]
    names = [", ".join(map(str, cells(load.split))) for load in staged]
    return PlanErrors("four stages that sleep", names, predicted, slept.steps)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of("bench.plan.check", __doc__)
    parser.add_argument("--machine", type=Path, default=DEFAULT, help=f"what calibrate wrote (default {DEFAULT})")
    parser.add_argument("--steps", type=int, default=5, help="training steps of each plan (default 5)")
    parser.add_argument("--fastest", type=float, default=0.3, help="seconds of the fastest step asleep (default 0.3)")
    parser.add_argument("--rounds", type=int, default=2, help="steps asleep of each plan (default 2)")
    args = parser.parse_args(argv)
    trained = Job(load_config("gpt-3m"), 8, 128, torch.float32)
    staged = Job(with_layers(load_config("llama3-8b"), 8), 8, 2048)
    rows = []
    for compared in (
        training(Machine.load(args.machine), trained, steps=args.steps),
        sleeping_stages(staged, fastest=args.fastest, rounds=args.rounds),
    ):
        print(compared.text(), flush=True)
        rows.append(compared.row())
    print("\n".join(["", HEAD, *rows]))


if __name__ == "__main__":
    main()
