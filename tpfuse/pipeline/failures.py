"""Names the rank of a pipeline that has ended when a message fails: the error of a closed connection does not say whose
it was."""

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..ranks.failure import explained
from .schedules import Order

_TAG = 1 << 30  # of messages that nobody receives
_LOOKS, _PAUSE = 4, 0.2  # times, and seconds between: a closed connection may be noticed later than its message failed


@contextlib.contextmanager
def naming_lost_ranks(order: Order, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> Iterator[None]:
    """Raises a RuntimeError of a step again as one that names the lost ranks by their numbers in the world.

    An error is raised unchanged if no rank is lost, and always over NCCL, whose watchdog ends the process.
    """
    try:
        yield
    except RuntimeError as error:
        stages = _stages(order, group.rank())
        causes = [f"rank {dist.get_global_rank(group, r)}, which holds {_stages(order, r)}," for r in _lost(group)]
        if replicas is not None:
            causes += [f"rank {dist.get_global_rank(replicas, r)}, a replica of {stages}," for r in _lost(replicas)]
        if not causes:
            raise
        raise RuntimeError(
            f"pipeline {order.schedule}, rank {dist.get_rank()}, which holds {stages}: {' and '.join(causes)} has ended"
            f" or has come to no such message in time: {explained(error)}"
        ) from error


def _lost(group: dist.ProcessGroup) -> list[int]:
    """Returns the ranks of a group whose connection is broken: over gloo a message to one fails at once."""
    if dist.get_backend(group) != "gloo":
        return []
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    for attempt in range(_LOOKS):
        time.sleep(_PAUSE * (attempt > 0))
        if lost := [rank for rank in peers if _fails(group, rank)]:
            return lost
    return []


def _fails(group: dist.ProcessGroup, rank: int) -> bool:
    try:
        dist.isend(torch.zeros(1), group=group, group_dst=rank, tag=_TAG)
    except RuntimeError:
        return True
    return False


def _stages(order: Order, rank: int) -> str:
    held = sorted({stage for ranks in order.ranks for stage, holder in enumerate(ranks) if holder == rank})
    return f"stage {held[0]}" if len(held) == 1 else f"stages {', '.join(map(str, held[:-1]))} and {held[-1]}"
