"""Which rank of a pipeline has ended, where a message to it or from it has failed: the error of a closed connection
does not say whose it was."""

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
def named(order: Order, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> Iterator[None]:
    """Raises a RuntimeError of a step as one that names the ranks that are lost, by their numbers in the world.

    One where no rank is lost is raised as it is; so is any over NCCL, where the watchdog ends the process.
    """
    try:
        yield
    except RuntimeError as error:
        own = _stages(order, group.rank())
        found = [f"rank {dist.get_global_rank(group, r)}, which holds {_stages(order, r)}," for r in _lost(group)]
        if replicas is not None:
            found += [f"rank {dist.get_global_rank(replicas, r)}, a replica of {own}," for r in _lost(replicas)]
        if not found:
            raise
        raise RuntimeError(
            f"pipeline {order.schedule}, rank {dist.get_rank()}, which holds {own}: {' and '.join(found)} has ended or"
            f" has come to no such message in time: {explained(error)}"
        ) from error


def _lost(group: dist.ProcessGroup) -> list[int]:
    """Returns the ranks of a group to which the connection is broken: over gloo a message to one fails at once."""
    if dist.get_backend(group) != "gloo":
        return []
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    for look in range(_LOOKS):
        time.sleep(_PAUSE * (look > 0))
        if found := [rank for rank in peers if _fails(group, rank)]:
            return found
    return []


def _fails(group: dist.ProcessGroup, rank: int) -> bool:
    try:
        dist.isend(torch.zeros(1), group=group, group_dst=rank, tag=_TAG)
    except RuntimeError:
        return True
    return False


def _stages(order: Order, rank: int) -> str:
    held = sorted({stage for ranks in order.ranks for stage, at in enumerate(ranks) if at == rank})
    return f"stage {held[0]}" if len(held) == 1 else f"stages {', '.join(map(str, held[:-1]))} and {held[-1]}"
