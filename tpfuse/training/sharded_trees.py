"""Gradients of a step's micro-batches as binary trees, of parameters that FSDP2 shards over the replicas.

FSDP2 scatters the sum over the replicas at the end of each backward pass.  So the R replicas take the micro-batches
i R to i R + R - 1 at their i-th pass, whose sum is the tree's node over these, and the nodes of K / R passes are added
shard by shard: the same tree as :mod:`..pipeline.trees`, in which a replica computes a row of micro-batches.  A sum
over replicas is an exchange of shards, of as many bytes as FSDP2's own reduce-scatter.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..kernels.runtime.errors import check
from ..kernels.runtime.leaves import tree
from ..layers.module import as_parameter, local
from ..layers.shards import named_specs
from ..parallel import TensorParallel
from ..pipeline.trees import EMBEDDING, HEAD, GradientTrees
from .foreign.replica_shards import padded, replica_shards


class TreeReduceScatter:
    """FSDP2's reduce-scatter as a binary tree over the replicas, always a sum (torch.distributed.fsdp's protocol)."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None  # of what was added last

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self.dtype = input_tensor.dtype
        output_tensor.copy_(_scattered_sum(input_tensor, group))


def _scattered_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [R n, ...] of each rank -> this rank's n rows of the tree over the ranks' x."""
    nodes = torch.empty_like(x)
    dist.all_to_all_single(nodes, x, group=group)
    return tree(nodes.chunk(group.size()))


class ShardedTrees(GradientTrees):
    """The sums of a model's gradients over ``local`` micro-batches on each of the ``replicas``, which FSDP2 shards it
    over.  From here on FSDP2 gives the sum over the replicas, not their mean, also of a call that is no micro-batch."""

    replicas: dist.ProcessGroup

    def __init__(self, model: nn.Module, local: int, replicas: dist.ProcessGroup):
        super().__init__(model, local, replicas)
        self._ranks = {p: tp for _, p, _, tp in named_specs(model)}
        self._model, self._sum = model, TreeReduceScatter()
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_reduce_scatter(self._sum)  # type: ignore[arg-type]  # by its methods
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def index(self, i: int) -> int:
        return i * self.size + self.replicas.rank()

    def add(self, p: nn.Parameter, gradient: Tensor, micro_batch: int, use: int = EMBEDDING) -> None:
        """Adds a shard's gradient, or that of the whole slice which the head has."""
        if use == HEAD:  # of the gathered parameter
            name = next(name for name, gathered in self._model.named_parameters() if gathered is p)
            p = self.trained[name]
            gradient = self._scattered(gradient, p, self._ranks[p])
        elif self._sum.dtype not in (None, p.dtype):
            path = next(name for name, q in self.trained.items() if q is p)
            check(
                False,
                f"data_parallel: FSDP2 adds the gradients of {path} over replicas in {self._sum.dtype}, and over"
                f" micro-batches in {p.dtype}; use MixedPrecisionPolicy(reduce_dtype={p.dtype})",
            )
        super().add(p, local(gradient), micro_batch, use)

    def totals(self) -> dict[nn.Parameter, Tensor]:
        return {p: as_parameter(total, p) for p, total in super().totals().items()}

    def _reduced(self, keys: list[tuple[nn.Parameter, int]]) -> list[Tensor]:
        return [self._sums[key].total() for key in keys]

    def _scattered(self, gradient: Tensor, p: nn.Parameter, tp: TensorParallel) -> Tensor:
        """A gradient of this rank's slice of a parameter -> this replica's shard of the sum over the replicas."""
        assert isinstance(p, DTensor)
        shape = local(p).shape
        for shard in replica_shards(p, tp):
            rows = padded(gradient.movedim(shard.dim, 0), shard.chunk * self.size).contiguous()
            gradient = _scattered_sum(rows, self.replicas)[: shape[shard.dim]].movedim(0, shard.dim)
        return gradient
