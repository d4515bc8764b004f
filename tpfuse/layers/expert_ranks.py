"""The ranks that hold experts: the tensor-parallel ranks, or those of all replicas, one replica behind another."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.runtime.errors import check
from ..parallel import TensorParallel
from ..ranks.messages import gather

ExpertGroup = dist.ProcessGroup | DeviceMesh | TensorParallel  # a TensorParallel is what :func:`expert_ranks` returned


def expert_ranks(caller: str, experts: ExpertGroup | None, tp: TensorParallel) -> TensorParallel:
    """Returns the ranks that experts are divided among: ``tp`` for None, and where there is one replica.

    ``experts``: mesh["dp", "tp"], or a ProcessGroup of its ranks in that order, all ranks of which call this.
    ValueError of ``caller`` on every rank for other ranks, and with ``tp.bitwise``.
    """
    if isinstance(experts, TensorParallel):
        return experts
    tp.agree(caller, {"experts=": "given" if experts is not None else "left out"})
    if experts is None:
        return tp
    rule = f"{caller}: experts must be mesh['dp', 'tp'] or a ProcessGroup of its ranks"
    check(isinstance(experts, dist.ProcessGroup | DeviceMesh), f"{rule}, got {experts!r}")
    group = flat_group(experts) if isinstance(experts, DeviceMesh) else experts
    members = dist.get_process_group_ranks(group)
    replicas = gather([dist.get_rank()] if tp.group is None else dist.get_process_group_ranks(tp.group), group)
    n = len(replicas[0])
    check(
        all(mine == members[i // n * n :][:n] for i, mine in enumerate(replicas)),
        f"{rule}, the tensor-parallel ranks of one replica behind those of another, got ranks {members}, whose"
        f" tensor-parallel ranks are {', '.join(map(str, dict.fromkeys(map(tuple, replicas))))}",
    )
    if len(members) == tp.size:
        return tp
    check(tp.cp is None, f"{caller}: experts over replicas are not built for cp=; leave experts off, or cp")
    check(
        tp.bitwise is None,
        f"{caller}: experts over replicas are not built for bitwise={tp.bitwise}; leave experts off, or bitwise",
    )
    return TensorParallel.over_replicas(group, tp)


def flat_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns the group over all ranks of a mesh, which torch makes once."""
    with torch.device("cpu"):
        return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
