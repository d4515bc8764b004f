"""Seconds of a step's messages on a cluster's links: over tp and cp as the ledger counts them, over dp, between stages.

A ring's all-gather and its reduce-scatter are half of its all-reduce each; all-to-all, tpfuse's exchange, is the first
half of the direct one.  Groups that share a unit's links get a ring's share of them, so no algorithm between distant
partners is considered here.
"""

import numpy as np

from ...pipeline.clock import Array
from ...training.data_parallel import BUCKETS
from .cluster import Cluster
from .collectives import ALL_REDUCE, seconds
from .split import Split

_RING, _DIRECT = ALL_REDUCE["ring"], ALL_REDUCE["direct"]


def over_tp(op: str, wire: float, split: Split, cluster: Cluster, *, ranks: int = 0) -> float:
    """Returns the seconds of a ledger's collective among ``ranks`` that stand side by side (0: ``split.tp``);
    ``wire``: bytes as the ledger counts them."""
    return _collective(op, wire, cluster, ranks=ranks or split.tp, stride=1)


def over_cp(op: str, wire: float, split: Split, cluster: Cluster) -> float:
    """Returns the seconds of a ledger's collective among the ranks that hold pieces of a sequence."""
    return _collective(op, wire, cluster, ranks=split.cp, stride=split.tp)


def _collective(op: str, wire: float, cluster: Cluster, *, ranks: int, stride: int) -> float:
    if ranks == 1:
        return 0.0
    gathered = wire * ranks / (ranks - 1)
    if op.startswith("all_gather"):
        return seconds(_RING, ranks, gathered, cluster.link(ranks, stride)) / 2
    if op.startswith("reduce_scatter"):
        return seconds(_RING, ranks, wire, cluster.link(ranks, stride)) / 2
    if op.startswith("all_reduce"):
        return seconds(_RING, ranks, wire, cluster.link(ranks, stride))
    return seconds(_DIRECT, ranks, gathered, cluster.direct(ranks, stride)) / 2


def over_dp(gradients: float, split: Split, cluster: Cluster) -> float:
    """Returns the seconds in which replicas sum ``gradients`` bytes of a rank once, nothing hidden.

    Replicas: an all-reduce of each of DDP's buckets.  Sharded: FSDP's all-gathers of the parameters over dp x cp, two
    of as many bytes, or of stages one, and a reduce-scatter, bucket by bucket.
    """
    ranks, stride = (split.shards, split.tp) if split.sharded else (split.dp, split.cp * split.tp)
    if ranks == 1 or not gradients:
        return 0.0
    link, passes = cluster.link(ranks, stride), 1.5 if split.sharded and split.pp == 1 else 1.0
    buckets = 1 + max(0, -(-int(gradients - BUCKETS[0]) // BUCKETS[1]))
    return passes * buckets * seconds(_RING, ranks, gradients / buckets, link)


def between_stages(size: float, split: Split, cluster: Cluster) -> Array:
    """Returns the seconds of ``size`` bytes from each pipeline rank to each, [pp, pp], 0 from one to itself.

    All devices of a pipeline rank send at the same time, each over its own links to its partner; the slowest decides.
    """
    joining = cluster.joining_levels(split.pp, split.ranks // split.pp)
    rates = np.minimum.accumulate([level.bandwidth for level in cluster.levels])
    seconds = np.array([level.latency for level in cluster.levels]) + size / rates
    return np.where(np.eye(split.pp, dtype=bool), 0.0, seconds[joining])
