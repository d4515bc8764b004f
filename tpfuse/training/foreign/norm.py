"""The norm of a whole model's gradients, of which each rank holds some: a slice counts over its ranks, a slice that
several ranks hold once, what every rank holds once."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...collectives import all_gather
from ...kernels.runtime.errors import check
from ...kernels.runtime.leaves import placed
from ...kernels.runtime.rules import check_number, limited
from ...layers.shards import SplitParameter
from ...parallel import TensorParallel, resolve
from .replica_shards import ReplicaShard, gathered, replica_shards

_ORDER = limited("be more than 0", lambda v: v > 0)  # inf: the largest element


class GradPart(NamedTuple):
    """This rank's elements of a gradient, the groups over which it is sharded, and how many ranks in each have the same
    elements.

    ``leaf``: the dimension and the width of the leaves whose norms are taken apart (``TensorParallel(bitwise=V)``).
    ``shard``: how FSDP2 divides the rank's slice, of which these elements are then a part.
    """

    elements: Tensor
    groups: tuple[str, ...] = ()
    copies: int = 1
    leaf: tuple[int, int] | None = None
    shard: ReplicaShard | None = None


def part_of(grad: Tensor, slice_of: SplitParameter | None) -> GradPart:
    """Returns a gradient's part; ``slice_of``: the whole that its parameter is a slice of, if it is split."""
    groups: dict[str, None] = {}
    covered, leaf, shard = False, None if slice_of is None else _leaf(slice_of), None
    if isinstance(grad, DTensor):
        shards = replica_shards(grad, TensorParallel() if slice_of is None else slice_of.tp)
        check(
            leaf is None or len(shards) < 2,
            f"the norm of bitwise gradients: FSDP2 divides one of {tuple(grad.shape)} over {len(shards)} dimensions of"
            " a mesh; flatten them to one",
        )
        shard = shards[0] if len(shards) == 1 else None
        over, ranks_of = grad.device_mesh.get_all_groups(), dist.get_process_group_ranks
        covered = slice_of is not None and ranks_of(slice_of.tp.group) in map(ranks_of, over)
        groups = {g.group_name: None for g, s in zip(over, grad.placements, strict=True) if not s.is_replicate()}
        grad = grad.to_local()
    if slice_of is None:
        return GradPart(grad, tuple(groups), shard=shard)
    if not covered and slice_of.tp.group_name is not None:
        groups[slice_of.tp.group_name] = None
    return GradPart(grad, tuple(groups), slice_of.spec.copies, leaf, shard=shard)


def _leaf(slice_of: SplitParameter) -> tuple[int, int] | None:
    spec, tp = slice_of
    if tp.bitwise is None or spec.dim is None:
        return None
    return spec.dim, tp.leaf(spec.shape[spec.dim], copies=spec.leaf_copies)


class _Norm(NamedTuple):
    """Norms of parts become the norm of the whole: each is raised, all are joined, the result is lowered."""

    raised: Callable[[Tensor, int], Tensor]  # of a part that so many ranks hold
    joined: Callable[[Tensor], Tensor]  # [n] -> a scalar
    lowered: Callable[[Tensor], Tensor]


def _norm(order: float) -> _Norm:
    if order == math.inf:
        return _Norm(lambda x, copies: x, lambda x: x.amax(0), lambda x: x)
    raised = lambda x, copies: x.pow(order) / copies if copies > 1 else x.pow(order)
    return _Norm(raised, lambda x: x.sum(0), lambda x: x.pow(1 / order))


def total_norm(
    parts: Sequence[GradPart],
    order: float = 2.0,
    name: str = "total_norm",
    *,
    stages: dist.ProcessGroup | None = None,
    in_leaves: bool | None = None,
) -> Tensor:
    """Returns the norm over all ranks, a scalar in fp64, the same bits on every rank; each rank calls it.

    ``stages``: the ranks of a pipeline, which hold other parts.  ``in_leaves``: whether the norms of leaves are added
    (None: where a part has some), by a sum that does not depend on their order.  Else a few launches, whatever the
    number of parts.  Norms are taken in fp32 (fp64 of fp64).  ValueError for an ``order`` that is not positive.
    """
    check_number(f"{name}: norm_type", order, _ORDER)
    norm = _norm(order)
    if any(part.leaf is not None for part in parts) if in_leaves is None else in_leaves:
        return norm.lowered(_in_any_order(parts, norm, order, stages))
    total = norm.joined(_by_groups(parts, norm, order))
    return norm.lowered(total if stages is None else over_groups(total, (stages.group_name,), norm.joined))


def _by_groups(parts: Sequence[GradPart], norm: _Norm, order: float) -> Tensor:
    """Returns what is joined of the parts over each set of groups [n]; a zero where there are none."""
    kinds: dict[tuple[tuple[str, ...], int, torch.dtype, torch.device], list[Tensor]] = {}
    for x, groups, copies, *_ in parts:
        kinds.setdefault((groups, copies, x.dtype, x.device), []).append(x)
    norms_of: dict[tuple[str, ...], list[Tensor]] = {}
    for (groups, copies, dtype, _), grads in kinds.items():
        norms = norm.raised(_norms(grads, order, dtype), copies)
        norms_of.setdefault(groups, []).append(norm.joined(norms).to(parts[0].elements.device))
    totals = [
        over_groups(norm.joined(torch.stack(norms_of[groups])), groups, norm.joined)
        for groups in sorted(norms_of, key=lambda names: ([resolve(name).size() for name in names], names))
    ]
    return torch.stack(totals) if totals else torch.zeros(1, dtype=torch.float64)


def _in_any_order(parts: Sequence[GradPart], norm: _Norm, order: float, stages: dist.ProcessGroup | None) -> Tensor:
    """Returns what is joined of the norms of all leaves and of all parts without: rounded once, so that it has the same
    bits at every number of ranks, replicas and stages.

    A norm is of a contiguous leaf at a multiple of 16 bytes: torch's kernels begin otherwise at other addresses.
    """
    device = parts[0].elements.device if parts else torch.device("cpu")
    norms_of: dict[tuple[str, ...], list[Tensor]] = {(): [torch.zeros(0, dtype=torch.float64, device=device)]}
    for x, groups, copies, leaf, shard in parts:
        if shard is not None:
            x, groups = gathered(x, shard), tuple(name for name in groups if name != shard.group.group_name)
        pieces = [x] if leaf is None else [placed(piece.contiguous()) for piece in x.split(leaf[1], leaf[0])]
        norms_of.setdefault(groups, []).append(norm.raised(_norms(pieces, order, x.dtype), copies))
    values = torch.cat([_gathered(torch.cat(norms_of[groups]), groups) for groups in sorted(norms_of)])
    if stages is not None:
        longest = int(_gathered(torch.tensor([len(values)], device=device), (stages.group_name,)).max())
        values = _gathered(torch.nn.functional.pad(values, (0, longest - len(values))), (stages.group_name,))
    if order == math.inf:
        return norm.joined(values)
    return torch.tensor(math.fsum(values.tolist()), dtype=torch.float64, device=device)


def _gathered(x: Tensor, groups: Iterable[str]) -> Tensor:
    """Returns the elements of x [n] of all ranks."""
    for name in groups:
        x = all_gather(x, resolve(name).size(), name).flatten()
    return x


def _norms(grads: list[Tensor], order: float, dtype: torch.dtype) -> Tensor:
    """Returns the norms of tensors of one dtype, in fp64: [n], and one zero where none has an element."""
    nonempty = [x for x in grads if x.numel()]
    if not nonempty:
        return grads[0].new_zeros(1, dtype=torch.float64)
    return torch.stack(torch._foreach_norm(nonempty, order, dtype=torch.promote_types(dtype, torch.float32))).double()


def summed(x: Tensor) -> Tensor:
    return x.sum(0)


def over_groups(x: Tensor, groups: Iterable[str], joined: Callable[[Tensor], Tensor] = summed) -> Tensor:
    """Returns what ``joined`` makes of every rank's x [...], in rank order, over one group after the other."""
    for name in groups:
        x = joined(all_gather(x, resolve(name).size(), name))
    return x


def scale_(grads: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scales gradients of norm ``total`` so that it is at most ``max_norm``, in place and without a wait.  The scale is
    in fp32 (fp64 of fp64): in fp16 it may be 0."""
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in grads:
        kinds.setdefault((x.dtype, x.device), []).append(x)
    for (dtype, device), tensors in kinds.items():
        torch._foreach_mul_(tensors, scale.to(device, torch.promote_types(dtype, torch.float32)))
