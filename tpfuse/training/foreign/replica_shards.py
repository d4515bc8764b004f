"""How FSDP2 divides a rank's slice of a parameter over the replicas."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from ...collectives import all_gather
from ...parallel import TensorParallel


class ReplicaShard(NamedTuple):
    """``rows`` along the dimension ``dim`` of a slice are divided among ``group`` as by torch.chunk."""

    group: dist.ProcessGroup
    dim: int
    rows: int

    @property
    def chunk(self) -> int:
        """The number of rows of each replica but the last ones, which may have fewer."""
        return -(-self.rows // self.group.size())


def over_replicas(x: DTensor, tp: TensorParallel) -> Iterator[tuple[dist.ProcessGroup, Placement]]:
    """Yields the groups of several ranks over which a DTensor lies, and how; not the tensor-parallel one."""
    ranks = [] if tp.group is None else dist.get_process_group_ranks(tp.group)
    for group, placement in zip(x.device_mesh.get_all_groups(), x.placements, strict=True):
        if group.size() > 1 and dist.get_process_group_ranks(group) != ranks:
            yield group, placement


def replica_shards(x: DTensor, tp: TensorParallel) -> list[ReplicaShard]:
    """Returns how the replicas divide a DTensor, whose parameter ``tp`` splits evenly if it does."""
    shards = []
    for group, placement in over_replicas(x, tp):
        if placement.is_replicate():
            continue
        dim = _dim(placement)
        slices = sum(not p.is_replicate() and _dim(p) == dim for p in x.placements) > 1
        shards.append(ReplicaShard(group, dim, x.shape[dim] // tp.size if slices else x.shape[dim]))
    return shards


def _dim(placement: Any) -> int:
    """The dimension of a Shard, or of the _StridedShard that FSDP2 makes of a slice along the same one."""
    dim: int = placement.dim
    return dim


def padded(x: Tensor, rows: int) -> Tensor:
    """x [n, ...] -> [rows, ...], with zeros beyond."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x))) if rows > len(x) else x


def gathered(x: Tensor, shard: ReplicaShard) -> Tensor:
    """Returns the slice of which x is this replica's shard."""
    rows = padded(x.movedim(shard.dim, 0), shard.chunk).contiguous()
    whole = all_gather(rows, shard.group.size(), shard.group.group_name).flatten(0, 1)
    return whole[: shard.rows].movedim(0, shard.dim)
