"""The rows that blocks work on, out of a batch and back."""

import torch
from torch import Tensor, nn

from ..collectives import collect, split
from ..parallel import TensorParallel


class BatchRows:
    """[B, S] as sequence-major rows s * B + b, padded to a multiple of ``tp.row_multiple``, and this rank's share."""

    def __init__(self, shape: torch.Size, tp: TensorParallel):
        (self.batch, self.seq), self.tp = shape, tp
        self.count = -(-self.batch * self.seq // tp.row_multiple) * tp.row_multiple
        self.per_shard = self.count // tp.row_shards
        self.first = tp.row_rank * self.per_shard

    def all(self, x: Tensor, fill: int) -> Tensor:
        """[B, S] -> [M], ``fill`` in the padding"""
        rows = x.t().reshape(-1)
        return nn.functional.pad(rows, (0, self.count - len(rows)), value=fill)

    def share(self, x: Tensor) -> Tensor:
        """[B, S, D], the same on every rank -> this rank's [m, D]; the gradient is whole on every rank."""
        rows = nn.functional.pad(x.transpose(0, 1).flatten(0, 1), (0, 0, 0, self.count - self.batch * self.seq))
        return split(rows, self.tp) if self.tp.sequence_parallel else rows

    def collected(self, rows: Tensor) -> Tensor:
        """This rank's [m, D] -> [B, S, D], the same on every rank."""
        return self.back(collect(rows, self.tp) if self.tp.sequence_parallel else rows)

    def local(self, x: Tensor, fill: int) -> Tensor:
        """[B, S] -> this rank's [m]"""
        return self.all(x, fill)[self.first : self.first + self.per_shard]

    def back(self, rows: Tensor) -> Tensor:
        """[M, ...] -> [B, S, ...]"""
        return rows[: self.batch * self.seq].unflatten(0, (self.seq, self.batch)).transpose(0, 1)
