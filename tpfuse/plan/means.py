"""What steps are costed by on a cluster: the ledger's pieces, and its links, memory and optimizer."""

from typing import Any

from ..ledger.memory import OPTIMIZERS
from .cluster import Cluster
from .devices import Here
from .messages import between_stages, over_dp
from .pieces import LedgerCosts
from .split import Costs, Job, Split
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


def state(job: Job, split: Split, elements: Any) -> Any:
    """Returns the bytes of ``elements`` on a rank before FSDP, a number or an array: parameters, gradients, optimizer,
    and DDP's buckets of gradients, which a pipeline does not have.

    Sharded with stages, parameters and gradients are whole during a step, beside the shards; without, two blocks of
    the model are.
    """
    size = job.dtype.itemsize
    optimizer = OPTIMIZERS[job.optimizer](size)
    if not split.sharded:
        return elements * (2 * size + optimizer + size * (split.dp > 1 and split.pp == 1))
    whole = 2 * elements if split.pp > 1 else 2 * elements / max(1, job.config.num_layers)
    return elements * (2 * size + optimizer) / split.dp + size * whole
