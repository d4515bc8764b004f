"""The processes: every method in turn, round after round."""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench import documents, machine
from bench._link import End, at_rates, of_ranks
from bench.overlap import seconds
from bench.sparse_gradients import UNTIMED, arguments, page
from bench.sparse_gradients.topk_a import TopkA, topk_a_hook
from tpfuse import OkTopk, ok_topk_hook
from tpfuse.models import GPT, GPTConfig
from tpfuse.tools.ledger.text import Progress

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
    providers = {}
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
            seed = torch.Generator().manual_seed(dist.get_world_size() * i + dist.get_rank())
            ids = torch.randint(256, (args.batch, args.seq), generator=seed)
            ddp(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        providers[name] = step
    return providers


# ---- measurement ----


def timed(args: argparse.Namespace, gbit: float) -> dict[str, list[float]]:
    """Returns the seconds of each method's steps, on every rank alike."""
    choices, progress, replicas = steps(args), Progress(long=True), dist.get_world_size()
    times: dict[str, list[float]] = {name: [] for name in choices}
    for i in range(args.rounds + UNTIMED):
        for name, step in choices.items():
            if dist.get_rank() == 0:
                progress.update(f"{replicas} replicas, {page.rate(gbit)} Gbit/s, round {i + 1}: {name}")
            took = seconds(lambda step=step, i=i: step(i))
            if i >= UNTIMED:
                times[name].append(took)
    progress.clear()
    return times


def measure(args: argparse.Namespace, gbit: float, ends: list[End]) -> dict[str, Any]:
    """Returns a row of the table."""
    times = of_ranks(timed, ends, args, gbit)
    over = {name: [t / dense for t, dense in zip(took, times["dense"], strict=True)] for name, took in times.items()}
    row = dict(
        ranks=len(ends),
        gbit=gbit,
        seconds={name: statistics.median(took) for name, took in times.items()},
        over_dense={name: statistics.quantiles(ratios, n=4) for name, ratios in over.items()},
    )
    print(documents.line(page.line(row)), flush=True)
    return row


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    print(documents.table(page.heads(list(methods(args))), []))
    rows = []
    for ranks in args.ranks:
        rows += at_rates(args.rate, ranks, lambda gbit, ends: measure(args, gbit, ends))
    if args.json:
        result = dict(machine=machine.this_machine(), arguments=vars(args) | dict(json=None), rows=rows)
        args.json.write_text(json.dumps(result, indent=1))
