"""What a training step takes where replicas' links are slow, by how gradients are averaged.

    python -m bench.sparse_gradients                 0.1, 0.3, 1, 10 Gbit/s and unshaped (root: network namespaces)
    python -m bench.sparse_gradients --json bench/results/sparse_gradients.json

Two replicas of a GPT under DistributedDataParallel, one thread each, every method in turn in the same processes: dense
all-reduce, torch's bf16, fp16 and PowerSGD hooks, TopkA and Ok-Topk.  Seconds are medians of a step's forward, backward
and messages, ratios medians over the rounds of a step's time to the dense one's in the same round, with quartiles.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench._link import End, at_rates
from bench.overlap import seconds
from bench.port import free_port
from bench.sparse_gradients.topk_a import TopkA, topk_a_hook
from tpfuse import OkTopk, ok_topk_hook
from tpfuse.models import GPT, GPTConfig

RANKS = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sparse_gradients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[0.1, 0.3, 1.0, 10.0, 0.0], help="Gbit/s, 0 is unshaped (default all)"
    )
    parser.add_argument("--density", type=float, default=0.01, help="of TopkA and Ok-Topk (default 0.01)")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each method (default 12)")
    for name, value in dict(width=256, layers=4, heads=4, seq=128, batch=4).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    return parser.parse_args()


# ---- the methods: name -> register(ddp) ----


def bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook, which DDP takes by its name on CUDA alone."""
    return default_hooks.bf16_compress_hook(group, bucket)


def methods(args: argparse.Namespace) -> dict[str, Callable[[DistributedDataParallel], None]]:
    group = dist.group.WORLD
    power = lambda: powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return {
        "dense": lambda ddp: None,
        "bf16": lambda ddp: ddp.register_comm_hook(group, bf16),
        "fp16": lambda ddp: ddp.register_comm_hook(group, default_hooks.fp16_compress_hook),
        "PowerSGD, rank 1": lambda ddp: ddp.register_comm_hook(power(), powerSGD_hook.powerSGD_hook),
        "TopkA": lambda ddp: ddp.register_comm_hook(TopkA(args.density, group), topk_a_hook),
        "Ok-Topk": lambda ddp: ddp.register_comm_hook(OkTopk(args.density, group=group), ok_topk_hook),
    }


def steps(args: argparse.Namespace) -> dict[str, Callable[[int], None]]:
    """Returns a training step of each method, of a model of its own."""
    made = {}
    for name, register in methods(args).items():
        config = GPTConfig(
            vocab_size=256,
            max_positions=args.seq,
            hidden_size=args.width,
            num_layers=args.layers,
            num_heads=args.heads,
            dropout=0.0,
            attention_dropout=0.0,
            embedding_dropout=0.0,
        )
        # One bucket: over gloo PowerSGD starts messages of several in an order that ranks need not share, and aborts.
        ddp = DistributedDataParallel(GPT(config), bucket_cap_mb=1000 if name.startswith("PowerSGD") else None)
        register(ddp)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

        def step(i: int, ddp: Any = ddp, optimizer: torch.optim.Optimizer = optimizer) -> None:
            seed = torch.Generator().manual_seed(RANKS * i + dist.get_rank())
            ids = torch.randint(256, (args.batch, args.seq), generator=seed)
            ddp(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        made[name] = step
    return made


# ---- measurement ----


def worker(rank: int, args: argparse.Namespace, ends: list[End], port: int, results: Any) -> None:
    ends[rank].join()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ends[rank].master}:{port}", rank=rank, world_size=RANKS)
    every = steps(args)
    times: dict[str, list[float]] = {name: [] for name in every}
    for i in range(args.rounds + 3):  # DDP rebuilds its buckets after the first, PowerSGD begins in the third
        for name, step in every.items():
            took = seconds(lambda step=step, i=i: step(i))
            if i >= 3:
                times[name].append(took)
    if rank == 0:
        results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace, ends: list[End]) -> dict[str, list[float]]:
    results = mp.get_context("spawn").Manager().Queue()
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(worker, (args, ends, free_port(), results), nprocs=RANKS)
    found: dict[str, list[float]] = results.get()
    return found


def rows_of(gbit: float, times: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    for name, took in times.items():
        ratios = [t / dense for t, dense in zip(took, times["dense"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        yield dict(gbit=gbit, method=name, seconds=statistics.median(took), over_dense=[low, middle, high])


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    def at(gbit: float, ends: list[End]) -> list[dict[str, Any]]:
        rows = list(rows_of(gbit, measure(args, ends)))
        for row in rows:
            low, middle, high = row["over_dense"]
            rate = f"{gbit:g}" if gbit else "unshaped"
            ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            print(f"| {rate} | {row['method']} | {1e3 * row['seconds']:.0f} | {ratio} |", flush=True)
        return rows

    print("| Gbit/s | method | ms a step | over dense (quartiles) |\n|---|---|---|---|")
    return [row for rows in at_rates(args.rate, RANKS, at) for row in rows]


def main() -> None:
    args = arguments()
    rows = run(args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(dict(torch=torch.__version__, arguments=vars(args), rows=rows), file, indent=1)
