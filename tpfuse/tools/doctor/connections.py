"""Separate connections between a group's ranks for the doctor: a failed rank closes them, so that none waits for it."""

import contextlib
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ...ranks.messages import channel, gather

LIMIT = timedelta(seconds=60)  # for one message, where a rank has ended without closing anything


@contextlib.contextmanager
def connections(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """Yields a group of the same ranks and backends, for one section; an exception inside ends the other ranks' waits
    too.  Each rank calls it.

    torch's new_group would have the whole world take part, or else give a name to which the store holds addresses of a
    group that has been destroyed.
    """
    ranks, store = dist.get_process_group_ranks(group), c10d._get_default_store()
    name: Any = gather(f"tpfuse-doctor-{uuid.uuid4().hex}", channel(group))[0]  # and all are here
    new, _ = c10d._new_process_group_helper(
        group.size(), group.rank(), ranks, backend(group), store, name, timeout=LIMIT
    )
    c10d._world.pg_group_ranks[new] = {rank: i for i, rank in enumerate(ranks)}
    try:
        yield new
    finally:
        dist.destroy_process_group(new)


def backend(group: dist.ProcessGroup) -> dist.Backend:
    """Returns "gloo", "nccl", or what a group has by device, as in "cpu:gloo,cuda:nccl"."""
    config = dist.get_backend_config(group)
    names = {part.rpartition(":")[2] for part in config.split(",")}
    return dist.Backend(names.pop() if len(names) == 1 else config)


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device that the group's ranks compute on: this process's GPU, unless their messages carry none."""
    if torch.cuda.is_available() and (group is None or "nccl" in dist.get_backend_config(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
