"""The norm of a whole model's gradients, of which each rank holds some: a slice counts over its ranks, a slice that
several ranks hold once, what every rank holds once."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ...collectives import all_gather
from ...kernels.runtime.rules import check_number, limited
from ...layers.shards import Whole
from ...parallel import resolve

_ORDER = limited("be more than 0", lambda v: v > 0)  # inf: the largest element


class GradPart(NamedTuple):
    """This rank's elements of a gradient, the groups over which it is sharded, and how many ranks in each have the same
    elements.

    ``leaf``: the dimension and the width of the leaves whose norms are taken apart (``TensorParallel(bitwise=V)``), and
    how many of those here have the same elements; ``copies`` counts leaves then.
    """

    elements: Tensor
    groups: tuple[str, ...] = ()
    copies: int = 1
    leaf: tuple[int, int, int] | None = None


def part_of(grad: Tensor, slice_of: Whole | None) -> GradPart:
    """Returns a gradient's part; ``slice_of``: the whole that its parameter is a slice of, if it is split."""
    groups: dict[str, None] = {}
    covered, leaf = False, None if slice_of is None or isinstance(grad, DTensor) else _leaf(slice_of)
    if isinstance(grad, DTensor):
        for i, placement in enumerate(grad.placements):
            group = grad.device_mesh.get_group(i)
            covered = covered or (slice_of is not None and _ranks(group) == _ranks(slice_of.tp.group))
            if not isinstance(placement, Replicate):
                groups[group.group_name] = None
        grad = grad.to_local()
    if slice_of is None:
        return GradPart(grad, tuple(groups))
    if not covered and slice_of.tp.group_name is not None:
        groups[slice_of.tp.group_name] = None
    return GradPart(grad, tuple(groups), slice_of.spec.copies if leaf is None else slice_of.spec.leaf_copies, leaf)


def _leaf(slice_of: Whole) -> tuple[int, int, int] | None:
    spec, tp = slice_of
    if tp.bitwise is None or spec.dim is None:
        return None
    width = tp.leaf(spec.shape[spec.dim], copies=spec.leaf_copies)
    return spec.dim, width, spec.leaf_copies // spec.copies


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group)


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


def total_norm(parts: Sequence[GradPart], order: float = 2.0, name: str = "total_norm") -> Tensor:
    """Returns the norm over all ranks, a scalar in fp64, the same bits on every rank; each rank calls it.

    A few launches, whatever the number of parts; norms are taken in fp32 (fp64 of fp64).  ValueError for an ``order``
    that is not positive.
    """
    check_number(f"{name}: norm_type", order, _ORDER)
    norm = _norm(order)
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    kinds: dict[tuple[tuple[str, ...], int, torch.dtype, torch.device], list[Tensor]] = {}
    in_leaves = [part for part in parts if part.leaf is not None]
    for x, groups, copies, _ in (part for part in parts if part.leaf is None):
        kinds.setdefault((groups, copies, x.dtype, x.device), []).append(x)
    device = parts[0].elements.device
    norms_of: dict[tuple[str, ...], list[Tensor]] = {}
    for (groups, copies, dtype, _), grads in kinds.items():
        norms = norm.raised(_norms(grads, order, dtype), copies)
        norms_of.setdefault(groups, []).append(norm.joined(norms).to(device))
    totals = [
        over_groups(norm.joined(torch.stack(norms_of[groups])), groups, norm.joined) for groups in sorted(norms_of)
    ]
    if in_leaves:
        totals.append(_over_leaves(in_leaves, norm, order).to(device))
    return norm.lowered(norm.joined(torch.stack(totals)))


def _over_leaves(parts: list[GradPart], norm: _Norm, order: float) -> Tensor:
    """Returns what is joined of the norms of all leaves: one sum of one shape, the same at every number of ranks."""
    rows = []  # a part's, of the leaves that are here
    for x, _, copies, leaf in parts:
        assert leaf is not None
        dim, width, same = leaf
        pieces = [piece.contiguous() for piece in x.split(width, dim)]
        rows.append(norm.raised(_norms(pieces, order, x.dtype), copies).repeat_interleave(same))
    here = torch.stack(rows)
    for name in parts[0].groups:
        here = all_gather(here, resolve(name).size(), name).transpose(0, 1).flatten(1)
    return norm.joined(here.flatten())


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
    """Scales gradients of norm ``total`` so that it is at most ``max_norm``, in place and without a wait."""
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for x in grads:
        kinds.setdefault((x.dtype, x.device), []).append(x)
    for (dtype, device), tensors in kinds.items():
        torch._foreach_mul_(tensors, scale.to(device, dtype))
