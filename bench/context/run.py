"""The processes: every kind in turn, round after round; and one step of each size for its memory."""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench._link import End, of_ranks, unshaped
from bench._resident import resident
from bench.context import ATTENTION, HEADS, KINDS, MODELS, RANKS
from bench.context.ring import RingAttention
from bench.overlap import KEEP, seconds
from tpfuse import TensorParallel
from tpfuse.kernels.attn.options import Options
from tpfuse.models import GPT, GPTConfig
from tpfuse.sequence_parallel.context import attend_pieces
from tpfuse.tools.ledger.text import Progress

E = 64  # columns of a head
Step = Callable[[], None]


def config(seq: int) -> GPTConfig:
    keys = dict(hidden_size=HEADS * E, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, num_hidden_layers=4)
    keys |= dict(model_type="llama", intermediate_size=1024, vocab_size=1000, max_position_embeddings=seq)
    return GPTConfig.from_hf(keys)


# ---- time ----


def measure(args: argparse.Namespace, gbit: float, ends: list[End]) -> dict[str, Any]:
    """Returns the row of one rate."""
    times = of_ranks(timed, ends, args, gbit, environment=KEEP)
    return dict[str, Any](gbit=gbit) | {group: _figures(of_group) for group, of_group in times.items()}


def timed(args: argparse.Namespace, gbit: float) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of each kind's steps by their group, on every rank alike."""
    progress, times = Progress(long=True), dict[str, dict[str, list[float]]]()
    groups = {name: _attention(args.seq, count) for name, count in ATTENTION.items()} | _models(args.seq)
    for group, steps in groups.items():
        times[group] = {name: [] for name in steps}
        for i in range(args.rounds + 1):
            if dist.get_rank() == 0:
                progress.update(f"{gbit:g} Gbit/s, {group}: round {i + 1} of {args.rounds + 1}")
            for name, step in steps.items():
                took = seconds(step)
                if i:
                    times[group][name].append(took)
    progress.clear()
    return times


def _figures(times: dict[str, list[float]]) -> dict[str, dict[str, list[float]]]:
    """Returns quartiles of the seconds, and of each kind over the first in the same round."""
    reference = next(iter(times.values()))
    over = {name: [a / b for a, b in zip(took, reference, strict=True)] for name, took in times.items()}
    return dict(seconds=_quartiles(times), over=_quartiles(over))


def _quartiles(times: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: statistics.quantiles(took, n=4, method="inclusive") for name, took in times.items()}


def _attention(seq: int, groups: int) -> dict[str, Step]:
    torch.manual_seed(0)
    Q, n = HEADS // groups, seq // dist.get_world_size()
    qkv = torch.randn(n, groups, Q + 2, E, requires_grad=True)
    do = torch.randn(n, HEADS * E)
    options = Options(seq=seq, causal=True, scale=E**-0.5)

    def pieces(cp_kind: str, overlap: str = "off") -> Step:
        tp = TensorParallel(cp=dist.group.WORLD, cp_kind=cp_kind, overlap=overlap)
        return lambda: attend_pieces(qkv, options, tp).backward(do)

    q, k, v = (_heads(t).requires_grad_() for t in qkv.detach().split([Q, 1, 1], 2))
    ring = lambda: RingAttention.apply(q, k, v).backward(_heads(do.view(n, groups, Q, E)))
    return dict(zip(KINDS, (pieces("heads"), pieces("heads", "pairwise"), pieces("keys"), ring), strict=True))


def _heads(t: Tensor) -> Tensor:
    """[n, G, Q, E] -> [1, G Q, n, E]"""
    return t.flatten(1, 2).transpose(0, 1)[None].contiguous()


def _models(seq: int) -> dict[str, dict[str, Step]]:
    world, ids = dist.group.WORLD, torch.randint(1000, (1, seq), generator=torch.Generator().manual_seed(0))
    heads, keys = (dict(cp=world, cp_kind=cp_kind) for cp_kind in ("heads", "keys"))
    whole = dict(group=world, sequence_parallel=True)
    splits = [(heads, "off"), (heads, "pairwise"), (keys, "off"), (whole, "off"), (whole, "pairwise")]

    models = [GPT(config(seq), tp=TensorParallel(**ranks, overlap=overlap)).train() for ranks, overlap in splits]
    loss = lambda model: model(ids, labels=ids).loss
    step = lambda model: lambda: loss(model).backward()
    prompt = lambda model: lambda: torch.no_grad()(loss)(model)
    return {
        "a step": dict(zip(MODELS, map(step, models), strict=True)),
        "a prompt": dict(zip(MODELS, map(prompt, models), strict=True)),
    }


# ---- memory ----


def memory(lengths: list[int]) -> list[dict[str, Any]]:
    """Returns a row a length: MiB by the number of ranks, that of the one with the most."""
    progress, rows = Progress(long=True), []
    for seq in lengths:
        row: dict[str, Any] = dict(seq=seq)
        for ranks in RANKS:
            progress.update(f"memory of {seq} positions over {ranks} ranks")
            row[str(ranks)] = of_ranks(held, unshaped(ranks), seq)
        rows.append(row)
    progress.clear()
    return rows


def held(seq: int) -> float:
    """Returns the MiB by which a training step has grown the rank that grows most."""
    tp = TensorParallel(cp=dist.group.WORLD, cp_kind="heads")
    _step(tp, 64)  # what is allocated once
    start = resident("VmHWM")
    _step(tp, seq)
    grown = torch.tensor((resident("VmHWM") - start) / 2**20)
    dist.all_reduce(grown, op=dist.ReduceOp.MAX)
    return float(grown)


def _step(tp: TensorParallel, seq: int) -> None:
    model = GPT(config(seq), tp=tp).train()
    ids = torch.randint(1000, (1, seq), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
