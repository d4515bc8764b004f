"""A model whose pieces have made-up costs, a cost model without devices, and plans of both."""

import numpy as np

from tpfuse.models import GPTConfig
from tpfuse.tools.plan.cluster import Cluster, Level
from tpfuse.tools.plan.costs import CostModel
from tpfuse.tools.plan.devices import Device
from tpfuse.tools.plan.report import Plans
from tpfuse.tools.plan.search import search
from tpfuse.tools.plan.spans import SpanCache
from tpfuse.tools.plan.split import ATTENTION, CP, GEMM, MEMORY, TP, Job, PieceCost, Pieces


def config(layers):
    return GPTConfig(vocab_size=96, max_positions=64, hidden_size=32, num_layers=layers, num_heads=4)


def job(layers=4, batch=8):
    return Job(config(layers), batch, 64)


def piece(seconds, split, *, saved=1.0, parameters=1.0):
    """A piece of ``seconds`` at tp = 1 and one sequence: I and W together take a little longer than B."""
    work = seconds * split.micro_batch / split.tp / split.cp
    cp = {CP: 0.05 * parameters / split.tp * (split.cp > 1)}
    cheap = 0.8 if split.saving == "fastest" and not split.full else 1.0
    part = lambda x: {GEMM: 0.6 * x, ATTENTION: 0.3 * x, MEMORY: 0.1 * x, TP: 0.1 * seconds * (split.tp > 1)} | cp
    back = work * (1 + cheap) + (work if split.full else 0)
    size = split.micro_batch / split.tp / split.cp * saved * (0.2 if split.full else 1.0 if cheap < 1 else 0.7)
    return PieceCost(
        {"F": part(work), "B": part(back), "I": part(0.55 * back), "W": part(0.5 * back)},
        saved=size,
        held=0.6 * size,
        transient=0.3 * split.micro_batch / split.cp,
        parameters=parameters / split.tp,
    )


class PieceCosts:
    """The same pieces for the same key, of ``blocks`` seconds; ``keys``: the keys of all calls."""

    def __init__(self, blocks=(1.0,) * 4, *, embedding=0.3, head=0.7):
        self.blocks, self.ends, self.pieces, self.keys = blocks, (embedding, head), {}, []

    def __call__(self, job, split):
        key = split.tp, split.cp, split.micro_batch, split.saving, split.full
        self.keys.append(key)
        if split.tp > 4:
            raise ValueError("four heads cannot be split")
        if key not in self.pieces:
            embedding, head = (piece(x, split, saved=0.5, parameters=2.0) for x in self.ends)
            blocks, border = [piece(x, split) for x in self.blocks], piece(0.01, split, saved=0)
            self.pieces[key] = Pieces(embedding, blocks, head, hop_bytes=split.micro_batch / split.cp, border=border)
        return self.pieces[key]


def sums(split, size):
    """FSDP's gathers and scatter over dp x cp take half as long again as a sum, but of stages."""
    ranks, passes = (split.shards, 1.0 if split.pp > 1 else 1.5) if split.sharded else (split.dp, 1.0)
    return 0.1 * size * passes * (ranks > 1)


def hops(ranks, seconds):
    """Messages between the two ranks of a node, and three times as long between nodes."""
    node = np.arange(ranks) // 2
    return seconds * np.where(node[:, None] == node, 1.0, 3.0) * ~np.eye(ranks, dtype=bool)


def costs(pieces=None, *, limit=float("inf"), hop=0.05, hides=True):
    return CostModel(
        pieces or PieceCosts(),
        hops=lambda split, size: hops(split.pp, hop * size),
        sums=sums,
        pieces_sum=lambda split, size: 0.0,
        update=lambda job, elements: 0.02 * elements,
        state=lambda job, split, elements: 4.0 * elements.local + 12.0 * elements.shard,
        limit=limit,
        hides=hides,
    )


def plans(devices=4, *, peak=None, limit=float("inf"), fixed=(), keep=10):
    """The plans of a job of four layers and eight sequences."""
    device = Device("fake", peak or {}, 1e12, 1e9)
    cluster, model, cache = Cluster(device, devices, (Level(devices, 1e9, 1e-6),)), costs(limit=limit), SpanCache()
    result = search(job(), devices, model, fixed=dict(fixed), keep=keep, cache=cache)
    return Plans(job(), cluster, model, result, dict(fixed), cache)
