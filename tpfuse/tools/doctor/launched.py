"""The group that the doctor examines: the one that is given, torch's world, or under torchrun one for the call."""

import contextlib
import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist

_calls = itertools.count()


@contextlib.contextmanager
def world(group: dist.ProcessGroup | None) -> Iterator[dist.ProcessGroup | None]:
    """Yields the group; None for a process that is alone.  What is made here ends here."""
    if group is not None or not dist.is_available():
        yield group
    elif dist.is_initialized():
        yield dist.group.WORLD
    elif not dist.is_torchelastic_launched():
        yield None
    else:
        gpu = torch.cuda.is_available() and dist.is_nccl_available()
        if gpu:
            torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
        store, rank, size = next(dist.rendezvous("env://"))
        # A later group must not find this one's keys.
        prefixed = dist.PrefixStore(f"tpfuse-doctor/{next(_calls)}", store)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=prefixed, rank=rank, world_size=size)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()
