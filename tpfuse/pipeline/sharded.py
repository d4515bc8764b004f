"""FSDP2 over the replicas of a pipeline's stages.

Parameters are gathered once a step, before its first micro-batch, and stay gathered until its last: forward and
backward passes of a stage alternate, and the other stages would wait for a gather between them.  Gradients accumulate
unsharded, those of a split backward pass too, and are summed into the shards once, at the end of the step: the sum, not
FSDP2's mean, as the loss is one over all replicas.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..kernels.runtime.errors import check
from .runtime import end_backward, initialize, is_replicated, sum_into_shards


class Shards:
    """The FSDP2 modules of a model; there may be none."""

    def __init__(self, model: nn.Module):
        self.modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        inner = {id(m) for outer in self.modules for m in outer.modules() if m is not outer}
        self.roots = [m for m in self.modules if id(m) not in inner]

    @contextlib.contextmanager
    def gathered(self, *, backward: bool) -> Iterator[None]:
        """Gathers all parameters; on exit shards them, and with ``backward`` sums the gradients into the shards."""
        for module in self.modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        for root in self.roots:
            initialize(root)
            root.set_is_last_backward(False)
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_forward(False)
            root.set_reshard_after_backward(False)
        handles: list[Any] = [module.unshard(async_op=True) for module in self.modules]
        for handle in handles:
            handle.wait()
        try:
            yield
            for root in self.roots if backward else ():
                sum_into_shards(root)
        except BaseException:
            for root in self.roots:
                _forget(root)
            raise
        finally:
            for module in self.modules:
                module.reshard()

    def add_up(self) -> None:
        """Adds gradients of separate weight actions to the sum in ``reduce_dtype``, as FSDP2 does after backward."""
        for root in self.roots:
            end_backward(root)


def _forget(root: Any) -> None:
    """Drops the gradients that a failed step left in unsharded parameters."""
    for p in root.parameters():
        p.grad = None
    if hasattr(root, "reset_iter_state"):  # newer versions of torch
        root.reset_iter_state()


def check_sharded(model: Any) -> None:
    """Raises ValueError if FSDP2 shards a model's stages over other ranks than its data-parallel replicas."""
    check(
        not any(is_replicated(m) for m in model.modules()),
        "pipeline: replicate over pipeline stages is not built; give the model dp=mesh['dp'], and step sums its"
        " gradients over the replicas",
    )
    group: dist.ProcessGroup | None = model.groups.dp
    for name, p in model.named_parameters():
        groups = p.device_mesh.get_all_groups() if isinstance(p, DTensor) else []
        foreign = [g for g in groups if g.size() > 1 and g.group_name not in (model.tp.group_name, _name(group))]
        check(
            not foreign,
            f"pipeline: {name} is sharded over ranks that are not the model's replicas; give the model dp=mesh['dp'],"
            " and fully_shard the same mesh",
        )


def is_shard(p: Tensor, group: dist.ProcessGroup) -> bool:
    """Returns True if ``p`` is a DTensor sharded over the replicas of ``group``."""
    return isinstance(p, DTensor) and any(g.group_name == group.group_name for g in p.device_mesh.get_all_groups())


def _name(group: dist.ProcessGroup | None) -> str | None:
    return None if group is None else group.group_name
