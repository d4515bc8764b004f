"""Steps of training (forward + backward) of a small GPT under every schedule, beside torch's own pipelines."""

import argparse
import pathlib
import statistics
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.pipeline.plain import THEIRS, Pipeline
from bench.pipeline.sleeping import slowest
from tpfuse.models import GPT, GPTConfig
from tpfuse.pipeline import SCHEDULES, order, schedule, simulate

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def text() -> Tensor:
    """Returns the bytes of the documents, one after another."""
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sorted(DOCS.glob("*.md")))), dtype=torch.uint8)


def config(args: argparse.Namespace) -> GPTConfig:
    sizes = dict(hidden_size=args.width, num_layers=args.layers, num_heads=args.heads, max_positions=args.seq)
    rates = dict(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
    return GPTConfig(vocab_size=256, activation="gelu_tanh", tie_embeddings=False, **rates, **sizes)


class Saved:
    """The most bytes that autograd keeps at a time in a step, each storage once, those of ``apart`` not counted."""

    def __init__(self, *apart: Tensor):
        self.apart = {t.untyped_storage()._cdata for t in apart}
        self.counts: dict[int, int] = {}
        self.alive = self.peak = 0

    def pack(self, t: Tensor) -> "_Alive":
        saved, key, size = _Alive(t), t.untyped_storage()._cdata, t.untyped_storage().nbytes()
        if key not in self.apart:
            self.counts[key] = self.counts.get(key, 0) + 1
            self.alive += size * (self.counts[key] == 1)
            self.peak = max(self.peak, self.alive)
            weakref.finalize(saved, self._freed, key, size)
        return saved

    def _freed(self, key: int, size: int) -> None:
        self.counts[key] -= 1
        self.alive -= size * (self.counts[key] == 0)


class _Alive:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def measure(args: argparse.Namespace, say: Any) -> list[dict[str, Any]]:
    """Runs every pipeline in turn, ``args.rounds`` times; speed is the ratio of neighbouring steps, over tpfuse's
    1F1B."""
    sizes, size, m = config(args), dist.get_world_size(), args.micro_batches
    group = dist.group.WORLD
    full = GPT(sizes, seed=0)
    pipelines: dict[tuple[str, str], Any] = {}
    for name in SCHEDULES:
        model = GPT(sizes, seed=0, stage=(dist.get_rank(), size, name, None, _layers(name, size, args.layers)))
        pipelines["tpfuse", name] = schedule(model, group, name, m)
        if name in THEIRS:
            pipelines["torch", name] = Pipeline(full, name, m)
    text_ids = text()
    times: dict[tuple[str, str], list[float]] = {key: [] for key in pipelines}
    losses: dict[tuple[str, str], float] = {}
    saved: dict[tuple[str, str], int] = {}
    for i in range(args.rounds + 1):
        begin = torch.randint(len(text_ids) - args.seq, (args.batch,), generator=torch.Generator().manual_seed(i))
        ids = torch.stack([text_ids[b : b + args.seq] for b in begin.tolist()]).long()
        for key, pipeline in pipelines.items():
            say(f"training: round {i} of {args.rounds}, {' '.join(key)}")
            if i == 0:  # makes connections, and counts
                counted = Saved(ids, *pipeline.model.parameters())
                with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda saved: saved.tensor):
                    losses[key] = float(_shared(pipeline.step(input_ids=ids, labels=ids)))
                saved[key] = int(slowest(counted.peak))
            else:
                dist.barrier()
                start = time.perf_counter()
                pipeline.step(input_ids=ids, labels=ids)
                times[key].append(slowest(time.perf_counter() - start))
            pipeline.model.zero_grad()
    bubbles = {name: simulate(order(name, size, m), 1.0, 1.0, 1.0).bubble for name in SCHEDULES}
    rows = []
    for (provider, name), seconds in times.items():
        ratios = [base / t for base, t in zip(times["tpfuse", "1f1b"], seconds, strict=True)]
        low, mid, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows.append(
            dict(
                provider=provider,
                schedule=name,
                seconds=statistics.median(seconds),
                tokens_per_s=args.batch * args.seq / statistics.median(seconds),
                speed=[low, mid, high],
                bubble=bubbles[name],
                saved_bytes=saved[provider, name],
                loss=losses[provider, name],
            )
        )
    return rows


def _layers(name: str, size: int, layers: int) -> list[int]:
    """Returns layers of stages as those of torch's have: each as many."""
    count = size * SCHEDULES[name].chunks[0]
    return [layers // count] * count


def _shared(loss: Tensor) -> Tensor:
    """Returns the loss of the rank that has one; tpfuse's is on all."""
    largest = loss.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest
