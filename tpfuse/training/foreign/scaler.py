"""torch.amp.GradScaler: an infinity in one rank's slice is one on every rank of its tensor-parallel group, so that all
take a step or none does, and their scales stay equal.  Of whole matrices the gradients of the slices are unscaled too,
which are clipped, and gathered again at a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...layers.module import local
from ..originals import original_of
from .known import split_parameters
from .norm import over_groups

_Flags = dict[torch.device, Tensor]  # 1.0 where a gradient on that device was not finite, else 0.0


@torch.no_grad()
def unscale(original: Callable[..., _Flags], scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> _Flags:
    """Stands in the place of GradScaler._unscale_grads_, through which go both unscale_ and the check of optimizers
    that unscale by themselves (fused ones)."""
    flags = original(scaler, optimizer, *args, **kwargs)
    for matrix in (p for group in optimizer.param_groups for p in group["params"] if original_of(p) is not p):
        gradient, slices = matrix.grad, original_of(matrix).grad
        if gradient is not None and slices is not None and local(gradient).data_ptr() != slices.data_ptr():
            slices.mul_(args[0].to(slices.device, non_blocking=True))
    groups = _groups(optimizer)
    if groups and flags:
        device = next(iter(flags))
        flag = torch.stack([x.to(device, non_blocking=True) for x in flags.values()]).amax(0)
        anywhere = over_groups(flag, groups, lambda x: x.amax(0))
        for x in flags.values():
            x.copy_(anywhere, non_blocking=True)
    return flags


def _groups(optimizer: Optimizer) -> list[str]:
    """Returns the tensor-parallel groups of an optimizer's split parameters, in one order on all ranks."""
    split = split_parameters()
    if not split:
        return []
    placements = (split[p] for group in optimizer.param_groups for p in group["params"] if p in split)
    return sorted({placement.tp.group_name for placement in placements if placement.tp.group_name is not None})
