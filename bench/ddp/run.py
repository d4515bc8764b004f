"""The processes: every setting in turn, round after round."""

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist

from bench._link import End, of_ranks
from bench.ddp import MICRO_BATCHES, USUAL
from bench.ddp.settings import Steps
from bench.overlap import KEEP, seconds
from tpfuse.tools.ledger.text import Progress

WARM = 2  # DDP makes its buckets anew after the first step


def measure(args: argparse.Namespace, gbit: float, ends: list[End]) -> dict[str, Any]:
    """Returns the row of one number of replicas at one rate."""
    times = of_ranks(timed, ends, args, gbit, environment=KEEP)
    return dict(ranks=len(ends), gbit=gbit) | figures(times)


def timed(args: argparse.Namespace, gbit: float) -> dict[str, list[float]]:
    """Returns the seconds of each setting's steps, on every rank alike."""
    progress, replicas = Progress(long=True), dist.get_world_size()
    steps = Steps(args).all()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(args.rounds + WARM):
        if dist.get_rank() == 0:
            progress.update(f"{replicas} replicas, {gbit:g} Gbit/s: round {i + 1} of {args.rounds + WARM}")
        for name, step in steps.items():
            took = seconds(step) / MICRO_BATCHES.get(name, 1)
            if i >= WARM:
                times[name].append(took)
    progress.clear()
    return times


def figures(times: dict[str, list[float]]) -> dict[str, Any]:
    """Returns quartiles: of the seconds, of each step over the usual one, and of what overlap saves and hides.

    Hidden is the share of the all-reduce's own time that a step does not take beyond computing.
    """
    rounds = {name: torch.tensor(took) for name, took in times.items()}
    usual, apart, messages = rounds[USUAL], rounds["no overlap"], rounds["messages"]
    backward = rounds["compute"] - rounds["forward"]
    return dict(
        seconds={name: _quartiles(took) for name, took in rounds.items()},
        over={name: _quartiles(took / usual) for name, took in rounds.items()},
        saved=_quartiles(1 - usual / apart),
        hidden=_quartiles(1 - (usual - rounds["compute"]) / messages),
        can_hide=_quartiles(torch.minimum(backward, messages) / messages),
        over_least=_quartiles(usual / (rounds["forward"] + torch.maximum(backward, messages))),
    )


def _quartiles(values: torch.Tensor) -> list[float]:
    return statistics.quantiles(values.tolist(), n=4, method="inclusive")
