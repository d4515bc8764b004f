"""The cost model of a step: pieces, messages, optimizer and state on a cluster."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ...pipeline.clock import Array
from ...pipeline.schedules import EVERY
from ..ledger.aten import ELEMENTWISE
from ..ledger.memory import BY_ELEMENTS
from ..ledger.recorder import FORWARD, Entry
from .cluster import Cluster
from .devices import AnyDevice, LocalCPU
from .messages import between_stages, over_cp, over_dp
from .pieces import LedgerCosts
from .split import CostFunction, Elements, Job, Split

MEMORY_SHARE = 0.9  # of a device's memory that a plan may fill: the rest is the allocator's, NCCL's and the driver's


class CostModel(NamedTuple):
    """Functions that cost a step, and what the devices allow.

    ``pieces``: costs of a model's pieces.  ``hops(split, bytes)``: seconds to send from each pipeline rank to each,
    [pp, pp].  ``sums(split, bytes)``: seconds of the all-reduce over dp (FSDP: of all-gathers and a reduce-scatter).
    ``pieces_sum(split, bytes)``: the least seconds of the sum of so many bytes of gradients over cp, which is in
    ``pieces`` too.  ``update(job, elements)``: seconds of the optimizer over so many of a rank.  ``state(job, split,
    elements)``: bytes of parameters, gradients, optimizer and buffers.  ``limit``: bytes that a rank may hold.
    ``hides``: messages pass while the device computes.
    """

    pieces: CostFunction
    hops: Callable[[Split, float], Array]
    sums: Callable[[Split, float], float]
    pieces_sum: Callable[[Split, float], float]
    update: Callable[[Job, float], float]
    state: Callable[[Job, Split, Elements], Any]
    limit: float
    hides: bool


def cost_model(cluster: Cluster, *, share: float = MEMORY_SHARE, pieces: CostFunction | None = None) -> CostModel:
    """Returns the cost model of ``cluster``, of whose memory a plan may fill ``share``.

    ``pieces``: costs of the same device and links to use in place of new ones.  Sums pass while a GPU computes; on CPUs
    gloo and GEMMs compete for cores.
    """
    return CostModel(
        LedgerCosts(cluster) if pieces is None else pieces,
        hops=lambda split, size: between_stages(size, split, cluster),
        sums=lambda split, size: over_dp(size, split, cluster),
        pieces_sum=lambda split, size: over_cp("all_reduce", size, split, cluster),
        update=lambda job, elements: optimizer_seconds(elements, job, cluster.device),
        state=state_bytes,
        limit=share * cluster.device.memory,
        hides=not isinstance(cluster.device, LocalCPU),
    )


def state_bytes(job: Job, split: Split, elements: Elements) -> Any:
    """Returns the bytes of a rank's state, a number or an array: parameters and gradients, of as many steps as the
    schedule keeps, optimizer, DDP's buckets of gradients (which a pipeline does not have), and what FSDP has
    gathered."""
    size, versions = job.dtype.itemsize, EVERY[split.schedule].versions(split.pp)
    element = 2 * size * versions + BY_ELEMENTS[job.optimizer](size)
    if not split.sharded:
        in_buckets = (elements.local - elements.experts) * (split.dp > 1 and split.pp == 1)
        return elements.local * element + in_buckets * size
    return elements.shard * element + elements.gathered * size


def optimizer_seconds(elements: float, job: Job, device: AnyDevice) -> float:
    """Returns the seconds of an optimizer's step over ``elements`` of a rank: one pass through memory that reads
    parameters, gradients and states and writes parameters and states."""
    size = job.dtype.itemsize
    states, count = BY_ELEMENTS[job.optimizer](size), round(elements)
    read, written = count * (2 * size + states), count * (size + states)
    step = Entry(job.optimizer, ELEMENTWISE, FORWARD, read=read, written=written, least=read + written, flops=0)
    return device.seconds(step, job.dtype)
