"""torch.amp.GradScaler: an infinity in one rank's slice is one on every rank of its tensor-parallel group, so that all
take a step or none does, and their scales stay equal."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from .behind import stand_behind_method
from .known import split_parameters
from .norm import over_groups

_Found = dict[torch.device, Tensor]  # 1.0 where a gradient on that device was not finite, else 0.0


def install() -> None:
    """Both unscale_ and the check of optimizers that unscale by themselves (fused ones) go through one method."""
    for kind in (GradScaler, ShardedGradScaler):
        stand_behind_method(kind, "_unscale_grads_", _unscale)


@torch.no_grad()
def _unscale(original: Callable[..., _Found], scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> _Found:
    found = original(scaler, optimizer, *args, **kwargs)
    groups = _groups(optimizer)
    if groups and found:
        first, *others = found.values()
        mine = torch.stack([first, *(x.to(first.device, non_blocking=True) for x in others)]).amax(0)
        anywhere = over_groups(mine, groups, lambda x: x.amax(0))
        for x in found.values():
            x.copy_(anywhere, non_blocking=True)
    return found


def _groups(optimizer: Optimizer) -> list[str]:
    """Returns the tensor-parallel groups of an optimizer's split parameters, in one order on all ranks."""
    known = split_parameters()
    if not known:
        return []
    held = (known.get(p) for group in optimizer.param_groups for p in group["params"])
    return sorted({whole.tp.group_name for whole in held if whole is not None and whole.tp.group_name is not None})
