"""Process groups: what a user gives, and the one over all ranks of a TensorParallel with its calls."""

import weakref

import torch.distributed as dist

from ..kernels.runtime.errors import check

_call_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, str]" = weakref.WeakKeyDictionary()


def process_group(
    name: str, group: "dist.ProcessGroup | dist.DeviceMesh | None", dim: str, *, optional: bool = True
) -> dist.ProcessGroup | None:
    """Returns the group that the argument ``name`` gives, usually mesh[dim]; ValueError for what is none, and for None
    unless it is ``optional``."""
    if isinstance(group, dist.DeviceMesh) and group.ndim == 1:
        return group.get_group()
    if isinstance(group, dist.ProcessGroup) or (group is None and optional):
        return group
    raise ValueError(
        f"{name} must be a DeviceMesh of one dimension or a ProcessGroup that this process is in, got {group!r}; pass"
        f" mesh[{dim!r}]"
    )


def check_pieces(pieces: list[list[int]], context: dist.ProcessGroup) -> None:
    """Raises ValueError for a group of context-parallel ranks whose tensor-parallel ranks, ``pieces``, do not fit.

    It is the same on every rank of ``context``.
    """
    members, ranks = dist.get_process_group_ranks(context), [rank for piece in pieces for rank in piece]
    alike = len({*map(len, pieces)}) == 1 and len({*ranks}) == len(ranks)
    check(
        alike and tuple(members) in zip(*pieces, strict=True),
        "TensorParallel: cp must be mesh['cp'] of a mesh with 'cp' and 'tp': ranks with tensor-parallel groups of"
        f" their own, each in the same place of its; got ranks {members}, of tensor-parallel ranks {pieces}",
    )


def call_group(context: dist.ProcessGroup, pieces: list[list[int]]) -> str:
    """Returns the name of the group of all these ranks, for messages between their hosts.  They alone call this; it is
    made once for each ``context``."""
    if context not in _call_groups:
        ranks = [rank for piece in pieces for rank in piece]
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _call_groups[context] = group.group_name
    return _call_groups[context]
