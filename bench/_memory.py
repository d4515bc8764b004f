"""Does the memory of a rank grow with its steps?  python -m bench.soak --memory

A tiny model takes thousands of training steps; every 20 steps a rank reads its resident set, what malloc has given out
and what it keeps free (mallinfo2, all arenas), and how many blocks Python has given out.  A row gives the slope of a
line through the second half, with its standard error, on the rank where it is largest:

    tpfuse, gloo            two ranks, sequence parallelism, dropout
    tpfuse, one process     the same model, no messages
    torch, gloo             torch's own layers of the same shape, an all-reduce for each of tpfuse's messages
    gloo's all_gather       16 bytes, nothing else of a step: torch alone
    tpfuse's comparison     24 bytes, as a model's call exchanges them: sends and receives

A slope in resident memory without one in what is given out is no leak: it is memory that malloc keeps between blocks.
"""

import contextlib
import ctypes
import functools
import json
import os
import queue
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import tpfuse
from bench._link import free_port
from tests.forking import forking
from tpfuse import TensorParallel
from tpfuse.models import GPT, GPTConfig
from tpfuse.ranks.messages import channel
from tpfuse.tools.ledger.text import Progress, table

EACH = 20  # steps between two samples
WIDTH, HEADS, LAYERS, SEQ, BATCH, VOCAB = 32, 4, 2, 16, 4, 64
MESSAGES = 12 * LAYERS  # about what tpfuse sends in a step
Step = Callable[[int], None]


class Sample(NamedTuple):
    """Bytes of this process, and Python's blocks."""

    resident: int
    used: int
    free: int
    blocks: int


class _Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


@functools.cache
def _mallinfo2() -> Callable[[], Any]:
    read = ctypes.CDLL(None).mallinfo2
    read.restype = _Mallinfo2
    return read


def sample() -> Sample:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    heap = _mallinfo2()()
    return Sample(resident, heap.uordblks + heap.hblkhd, heap.fordblks, sys.getallocatedblocks())


def slope(steps: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Fits a line -> its slope, and the standard error of that."""
    x, y = steps - steps.mean(), values - values.mean()
    best = float(x @ y / (x @ x))
    return best, float(np.sqrt(((y - best * x) ** 2).sum() / max(1, len(x) - 2) / (x @ x)))


# ---- what takes steps: (rank, ranks) -> step(number) ----


def _ours(rank: int, ranks: int) -> Step:
    tp = TensorParallel(dist.group.WORLD if ranks > 1 else None, sequence_parallel=ranks > 1)
    rates = dict.fromkeys(("dropout", "attention_dropout", "embedding_dropout"), 0.1)
    shape = dict(vocab_size=VOCAB, max_positions=SEQ, hidden_size=WIDTH, num_layers=LAYERS, num_heads=HEADS)
    model = GPT(GPTConfig(**shape, **rates), tp=tp, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))

    def step(number: int) -> None:
        model(ids, labels=ids, step=number, first_sample=0).loss.backward()
        tpfuse.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _plain(rank: int, ranks: int) -> Step:
    block = lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *(block() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, rows = torch.randint(VOCAB, (BATCH, SEQ)), torch.zeros(BATCH * SEQ, WIDTH)

    def step(number: int) -> None:
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for _ in range(MESSAGES):
            dist.all_reduce(rows)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _gather(rank: int, ranks: int) -> Step:
    mine = torch.zeros(2, dtype=torch.int64)
    return lambda number: dist.all_gather([torch.empty_like(mine) for _ in range(ranks)], mine)


def _compare(rank: int, ranks: int) -> Step:
    links = channel(dist.group.WORLD)
    return lambda number: links.exchange("memory", 0, 0)


CASES = {  # name: (what takes steps, ranks, times as many steps)
    "tpfuse, gloo": (_ours, 2, 1),
    "tpfuse, one process": (_ours, 1, 1),
    "torch, gloo": (_plain, 2, 1),
    "gloo's all_gather": (_gather, 2, 10),
    "tpfuse's comparison": (_compare, 2, 10),
}


# ---- the measurement ----


def _measure(rank: int, name: str, steps: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    make, ranks, times = CASES[name]
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    step, stride = make(rank, ranks), EACH * times
    samples = np.zeros((steps // EACH, 1 + len(Sample._fields)))  # made before, so that it is no growth
    for number in range(len(samples) * stride):
        step(number)
        if number % stride == 0:
            samples[number // stride] = number, *sample()
    results.put(samples)
    if ranks > 1:
        dist.barrier()


def measure(name: str, steps: int) -> dict[str, tuple[float, float]]:
    """Runs a case -> slope and standard error of each part of a sample, on the rank where it is largest."""
    port, results = free_port(), forking().Queue()
    arguments = lambda rank: dict(target=_measure, args=(rank, name, steps, port, results), daemon=True)
    processes = [forking().Process(**arguments(rank)) for rank in range(CASES[name][1])]
    try:
        for process in processes:
            process.start()
        ranks = []
        while len(ranks) < len(processes):
            if any(process.exitcode for process in processes):
                raise RuntimeError(f"bench.soak --memory: a rank of {name!r} has failed")
            with contextlib.suppress(queue.Empty):
                ranks.append(results.get(timeout=0.1))
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
            process.join()
    late = [samples[len(samples) // 2 :] for samples in ranks]  # what caches hold is there by then
    return {part: max(slope(s[:, 0], s[:, i]) for s in late) for i, part in enumerate(Sample._fields, 1)}


def main(steps: int, as_json: bool) -> int:
    """Prints the table, or JSON."""
    progress, slopes = Progress(long=True), {}
    for name in CASES:
        progress.update(f"memory: {name}")
        slopes[name] = measure(name, steps)
    progress.clear()
    if as_json:
        print(json.dumps(dict(steps=steps, slopes=slopes)))
        return 0
    cell = lambda fit: f"{fit[0]:.1f} +- {fit[1]:.1f}"
    rows = [[name, CASES[name][2] * steps, *map(cell, parts.values())] for name, parts in slopes.items()]
    print(table(("bytes a step", "steps", "resident", "given out", "kept free", "Python blocks"), rows))
    return 0
