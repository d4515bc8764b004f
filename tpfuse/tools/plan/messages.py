"""Seconds of a step's messages on a cluster's links: over tp as the ledger counts them, over dp, between stages.

A ring's all-gather and its reduce-scatter are half of its all-reduce each; all-to-all, tpfuse's exchange, is the first
half of the direct one.  Groups that share a unit's links get a ring's share of them, so no algorithm between distant
partners is considered here.
"""

from ...training.data_parallel import BUCKETS
from .cluster import Cluster
from .collectives import ALL_REDUCE, seconds
from .split import Split

_RING, _DIRECT = ALL_REDUCE["ring"], ALL_REDUCE["direct"]


def over_tp(op: str, wire: float, split: Split, cluster: Cluster, *, ranks: int = 0) -> float:
    """Returns the seconds of a ledger's collective among ``ranks`` that stand side by side (0: ``split.tp``);
    ``wire``: bytes as the ledger counts them."""
    n = ranks or split.tp
    if n == 1:
        return 0.0
    gathered = wire * n / (n - 1)
    if op.startswith("all_gather"):
        return seconds(_RING, n, gathered, cluster.link(n, 1)) / 2
    if op.startswith("reduce_scatter"):
        return seconds(_RING, n, wire, cluster.link(n, 1)) / 2
    if op.startswith("all_reduce"):
        return seconds(_RING, n, wire, cluster.link(n, 1))
    return seconds(_DIRECT, n, gathered, cluster.direct(n, 1)) / 2


def over_dp(gradients: float, split: Split, cluster: Cluster) -> float:
    """Returns the seconds in which replicas sum ``gradients`` bytes of a rank once a step, nothing hidden.

    Replicas: an all-reduce of each of DDP's buckets.  Sharded: FSDP's two all-gathers of the parameters, of as many
    bytes, and a reduce-scatter, bucket by bucket.
    """
    if split.dp == 1 or not gradients:
        return 0.0
    link = cluster.link(split.dp, split.tp)
    buckets = 1 + max(0, -(-int(gradients - BUCKETS[0]) // BUCKETS[1]))
    return (1.5 if split.sharded else 1.0) * buckets * seconds(_RING, split.dp, gradients / buckets, link)


def between_stages(size: float, split: Split, cluster: Cluster) -> float:
    """Returns the seconds of ``size`` bytes from a rank to that of the next stage: the slowest of all."""
    if split.pp == 1:
        return 0.0
    link = cluster.neighbour(split.pp, split.tp * split.dp)
    return link.latency + size / link.bandwidth
