"""Processor time and messages of forward and backward, with leaves and without."""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench.bits import V
from tpfuse import TensorParallel
from tpfuse.models import GPT, GPTConfig
from tpfuse.tools.ledger import Ledger
from tpfuse.tools.ledger.text import table
from tpfuse.tools.options import DTYPES

RANKS, VOCAB, SEQ, HEADS, WARM = (1, 2), 2048, 256, 8, 2


class Cost(NamedTuple):
    """``seconds`` without, and ``ratio``: quartiles.  ``sent``: bytes of a rank without and with; ``expected`` with."""

    width: int
    dtype: str
    ranks: int
    seconds: list[float]
    ratio: list[float]
    sent: tuple[int, int]
    expected: int


def costs(args: argparse.Namespace) -> list[Cost]:
    """Runs on every rank of two; rank 0's numbers count."""
    result = []
    for width in args.width:
        for dtype in args.dtype:
            for ranks in RANKS:
                group = dist.group.WORLD if ranks == dist.get_world_size() else None
                if group is not None or dist.get_rank() == 0:
                    result.append(_cost(args, width, dtype, TensorParallel(group, sequence_parallel=True)))
                dist.barrier()
    return result


def _cost(args: argparse.Namespace, width: int, dtype: str, tp: TensorParallel) -> Cost:
    config = GPTConfig(
        vocab_size=VOCAB, max_positions=SEQ, hidden_size=width, num_layers=2, num_heads=HEADS, activation="gelu_tanh"
    )
    leaves = TensorParallel(tp.group, sequence_parallel=True, bitwise=V)
    models = [GPT(config, tp=split, seed=3).to(DTYPES[dtype]).train() for split in (tp, leaves)]
    ids = torch.randint(VOCAB, (width // 256, SEQ), generator=torch.Generator().manual_seed(0))
    times: list[list[float]] = [[], []]
    for i in range(args.rounds + WARM):
        for model, took in zip(models, times, strict=True):
            began = time.process_time()
            _step(model, ids, i)
            took.append(time.process_time() - began)
    sent = []
    for model in models:
        with Ledger() as ledger:
            _step(model, ids, 0)
        sent.append(ledger.total().wire)
    plain, ours = (took[WARM:] for took in times)
    extra = 16 * ids.numel() * (V // tp.size - 1) * (tp.size - 1)
    ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    return Cost(width, dtype, tp.size, _quartiles(plain), _quartiles(ratios), (sent[0], sent[1]), sent[0] + extra)


def _step(model: Any, ids: torch.Tensor, step: int) -> None:
    model.zero_grad()
    model(ids, labels=ids, step=step, first_sample=0).loss.backward()


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


def text(result: list[Cost]) -> str:
    """Returns the table."""
    head = "width", "dtype", "R", "s without", "with / without", "quartiles", "bytes without", "with", "expected"
    lines = [
        (c.width, c.dtype, c.ranks, f"{c.seconds[1]:.3f}", f"{c.ratio[1]:.2f}", f"{c.ratio[0]:.2f} to {c.ratio[2]:.2f}")
        + (*c.sent, c.expected)
        for c in result
    ]
    return table(head, lines)
