"""What steps are costed by on a cluster: the ledger's pieces, and its links, memory and optimizer."""

from typing import Any

from ..ledger.memory import OPTIMIZERS
from .cluster import Cluster
from .devices import Here
from .messages import between_stages, over_dp
from .pieces import LedgerCosts
from .split import Costs, Elements, Job, Split
from .state import optimizer_seconds
from .step import Means

SHARE = 0.9  # of a device's memory that a plan may fill: the rest is the allocator's, NCCL's and the driver's


def means_of(cluster: Cluster, *, share: float = SHARE, costs: Costs | None = None) -> Means:
    """Returns what steps on ``cluster`` are costed by, of whose memory a plan may fill ``share``.

    ``costs``: those of the same device and links, where they are at hand.  Sums pass beside computing on a GPU; on CPUs
    gloo and GEMMs want the same cores.
    """
    return Means(
        LedgerCosts(cluster) if costs is None else costs,
        hop=lambda split, rows: between_stages(rows, split, cluster),
        sums=lambda split, size: over_dp(size, split, cluster),
        update=lambda job, split, elements: optimizer_seconds(elements, job, split, cluster.device),
        state=state,
        limit=share * cluster.device.memory,
        hides=not isinstance(cluster.device, Here),
    )


def state(job: Job, split: Split, elements: Elements) -> Any:
    """Returns the bytes of a rank, a number or an array: parameters, gradients, optimizer, DDP's buckets of gradients,
    which a pipeline does not have, and what FSDP has whole."""
    size = job.dtype.itemsize
    each = 2 * size + OPTIMIZERS[job.optimizer](size)
    if not split.sharded:
        return elements.own * (each + size * (split.dp > 1 and split.pp == 1))
    return elements.shard * each + elements.whole * size
