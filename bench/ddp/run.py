"""The processes: every setting in turn, round after round."""

import argparse
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench._link import End
from bench.ddp import MICRO_BATCHES, USUAL
from bench.ddp.settings import Steps
from bench.overlap import KEEP, seconds
from bench.port import free_port
from tpfuse.tools.ledger.text import Progress

WARM = 2  # DDP makes its buckets anew after the first step


def measure(args: argparse.Namespace, gbit: float, ends: list[End]) -> dict[str, Any]:
    """Returns the row of one number of replicas at one rate."""
    results = mp.get_context("spawn").SimpleQueue()
    os.environ.update(OMP_NUM_THREADS="1", **KEEP)
    mp.spawn(_rank, (args, gbit, ends, free_port(), results), nprocs=len(ends))
    row: dict[str, Any] = results.get()
    return row


def _rank(rank: int, args: argparse.Namespace, gbit: float, ends: list[End], port: int, results: Any) -> None:
    ends[rank].join()
    torch.set_num_threads(1)
    address = f"tcp://{ends[rank].master}:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(ends))
    progress = Progress(long=True)
    steps = Steps(args).all()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(args.rounds + WARM):
        if rank == 0:
            progress.update(f"{len(ends)} replicas, {gbit:g} Gbit/s: round {i + 1} of {args.rounds + WARM}")
        for name, step in steps.items():
            took = seconds(step) / MICRO_BATCHES.get(name, 1)
            if i >= WARM:
                times[name].append(took)
    progress.clear()
    if rank == 0:
        results.put(dict(ranks=len(ends), gbit=gbit) | figures(times))
    dist.barrier()
    dist.destroy_process_group()


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
