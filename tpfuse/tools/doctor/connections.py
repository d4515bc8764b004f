"""Connections of the doctor's own between a group's ranks, which a failed rank closes, so that none waits for it."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ...ranks.agreement import channel
from ...ranks.together import together

T = TypeVar("T")
LIMIT = timedelta(seconds=60)  # for one message, where a rank has ended without closing anything


@contextlib.contextmanager
def connections(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Yields a group of the same ranks and backends, for one section; an exception inside ends the other ranks' waits
    too.  Each rank calls it.

    torch's new_group would have the whole world take part, or else give a name to which the store holds addresses of a
    group that has been destroyed.
    """
    between, ranks, store = channel(group), dist.get_process_group_ranks(group), c10d._get_default_store()
    assert between is not None
    name, *_ = between.gather(f"tpfuse-doctor-{uuid.uuid4().hex}")  # rank 0's; and all are here
    at = group.size(), group.rank(), ranks
    own, _ = c10d._new_process_group_helper(*at, backend(group), store, name, timeout=LIMIT)
    c10d._world.pg_group_ranks[own] = {rank: i for i, rank in enumerate(ranks)}
    try:
        yield own
    finally:
        dist.destroy_process_group(own)


def backend(group: dist.ProcessGroup) -> dist.Backend:
    """Returns "gloo", "nccl", or what a group has by device, as in "cpu:gloo,cuda:nccl"."""
    config = dist.get_backend_config(group)
    names = {part.rpartition(":")[2] for part in config.split(",")}
    return dist.Backend(names.pop() if len(names) == 1 else config)


def each(group: dist.ProcessGroup, action: Callable[[], T]) -> list[T]:
    """Returns ``action()`` of every rank, in rank order, on every rank; an error on one is one on all."""
    return gathered(group, together(action, (group,)))


def gathered(group: dist.ProcessGroup, mine: T) -> list[T]:
    """Returns every rank's value, in rank order, on every rank."""
    every: list[T] = [mine] * group.size()
    dist.all_gather_object(every, mine, group=group)
    return every


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device that the group's ranks compute on: this process's GPU, unless their messages carry none."""
    if torch.cuda.is_available() and (group is None or "nccl" in dist.get_backend_config(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
