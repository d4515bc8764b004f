"""Messages from rank to rank, and more gloo connections between the ranks of a group, beside the group's own.

torch's ``new_group`` would have every rank of the world take part.  With ``use_local_synchronization`` it makes a name
of how many groups a rank is in, which ranks need not agree on, and to which the store may hold addresses of old.
"""

import weakref
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

_DEFAULTS = dist.distributed_c10d.default_pg_timeout, dist.distributed_c10d.default_pg_nccl_timeout
_counts: "weakref.WeakKeyDictionary[dist.Store, dict[str, int]]" = weakref.WeakKeyDictionary()  # how many, by ranks


def connect(group: dist.ProcessGroup) -> Any:
    """Returns new connections between the ranks of ``group``, with its limit of time.  Each rank calls it.

    They are a ProcessGroupGloo, of whose messages torch's stub says nothing.
    """
    store = dist.distributed_c10d._get_default_store()
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    counts = _counts.setdefault(store, {})
    counts[ranks] = counts.get(ranks, 0) + 1
    prefixed = dist.PrefixStore(f"tpfuse/{ranks}/{counts[ranks]}", store)
    return dist.ProcessGroupGloo(prefixed, group.rank(), group.size(), limit(group))


def limit(group: dist.ProcessGroup) -> timedelta:
    """Returns how long the group's ranks wait for each other: as long as the world's where the group was made without a
    limit, as torch makes those of a mesh."""
    seconds, world = _limit(group), dist.group.WORLD
    return seconds if world is None or seconds not in _DEFAULTS else _limit(world)


def _limit(group: dist.ProcessGroup) -> timedelta:
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout
    return dist.distributed_c10d.default_pg_timeout


def share_limit(group: dist.ProcessGroup) -> None:
    """Makes torch's collectives of a group wait as long as :func:`limit` says."""
    if _limit(group) != limit(group):
        dist.distributed_c10d._set_pg_timeout(limit(group), group)


class LimitedWork:
    """A message on its way between processes of a group of gloo."""

    def __init__(self, work: dist.Work, seconds: timedelta):
        self._work, self._seconds = work, seconds

    def wait(self) -> None:
        self._work.wait(self._seconds)  # gloo's connections keep the limit that they were made with


Handle: TypeAlias = dist.Work | LimitedWork


def send(x: Tensor, links: Any, to: int) -> Handle:
    """Starts to send x to a rank of ``links``, a group or connections by :func:`connect`."""
    return _limited(links.send([x], to, 0), links)


def receive(x: Tensor, links: Any, source: int) -> Handle:
    """Starts to receive x from a rank of ``links``."""
    return _limited(links.recv([x], source, 0), links)


def _limited(work: dist.Work, links: Any) -> Handle:
    return LimitedWork(work, limit(links)) if isinstance(links, dist.ProcessGroup) else work
