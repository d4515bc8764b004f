"""What an optimizer needs of a split model: which parameters decay, and the norm of the whole gradient."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..collectives import all_gather
from ..layers.module import named_specs
from ..layers.norm import LayerNorm
from ..parallel import resolve


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns two groups for a torch optimizer: weights with ``weight_decay``, norms and biases without.

    Frozen parameters are in neither.
    """
    norms = {
        id(p)
        for m in model.modules()
        if isinstance(m, LayerNorm | nn.LayerNorm | nn.RMSNorm)
        for p in m.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            plain = id(p) in norms or name.endswith("bias")
            (rest if plain else decayed).append(p)
    return [dict(params=decayed, weight_decay=weight_decay), dict(params=rest, weight_decay=0.0)]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients so that their norm over the whole model is at most ``max_norm``.

    Returns the norm before, a scalar, the same on every rank.  A sharded parameter is counted over its ranks, a
    replicated one, or a shard that several ranks hold, once.  Works on plain shards, under DDP, and on the DTensors of
    FSDP2.
    """
    kinds: dict[tuple[tuple[str, ...], int, torch.dtype], list[Tensor]] = {}  # by groups, copies, dtype
    for (_, spec, tp), p in zip(named_specs(model), model.parameters(), strict=True):
        if p.grad is None:
            continue
        grad: Tensor = p.grad
        groups: tuple[str, ...] = ()
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            sharded = (i for i, placement in enumerate(grad.placements) if not isinstance(placement, Replicate))
            groups = tuple(mesh.get_group(i).group_name for i in sharded)
            grad = grad.to_local()
        elif spec.dim is not None and tp.size > 1 and tp.group_name is not None:
            groups = (tp.group_name,)
        kinds.setdefault((groups, spec.copies, grad.dtype), []).append(grad)
    if not kinds:
        return torch.zeros(())
    sums: dict[tuple[str, ...], Tensor] = {}  # of squares, by the groups that they are to be summed over
    for (groups, copies, dtype), grads in kinds.items():
        square = _sum_of_squares(grads, dtype) / copies
        sums[groups] = sums[groups] + square if groups in sums else square
    total = functools.reduce(torch.add, (_over_groups(square, groups) for groups, square in sums.items())).sqrt()
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for dtype in {dtype: None for *_, dtype in kinds}:
        scaled = [grad for (*_, own), grads in kinds.items() if own == dtype for grad in grads]
        torch._foreach_mul_(scaled, scale.to(dtype))
    *_, first = next(iter(kinds))
    return total.to(torch.promote_types(first, torch.float32))


def _sum_of_squares(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the sum over gradients of one dtype, in fp64, from norms in fp32 (fp64 for fp64), in a few launches."""
    norms = torch._foreach_norm(grads, dtype=torch.promote_types(dtype, torch.float32))
    return torch.stack(norms).double().square().sum()


def _over_groups(square: Tensor, groups: tuple[str, ...]) -> Tensor:
    """Returns the sum over each group, in rank order."""
    for name in groups:
        square = all_gather(square, resolve(name).size(), name).sum()
    return square
