"""The rows that blocks work on, out of a batch and back."""

import torch
from torch import Tensor, nn

from ..collectives import collect, split
from ..parallel import TensorParallel
from ..sequence_parallel.context import by_position, by_rank


class BatchRows:
    """[B, S] as sequence-major rows s * B + b: a context-parallel rank's piece of them, padded to a multiple of
    ``tp.row_multiple``, and this rank's share of the piece.

    ``count``: the rows of the piece, of which ``per_shard`` are here; ``first``: where in whole sequences these lie.
    """

    def __init__(self, shape: torch.Size, tp: TensorParallel):
        (self.batch, self.seq), self.tp = shape, tp
        self._piece = tp.piece(self.seq) * self.batch
        self.count = -(-self._piece // tp.row_multiple) * tp.row_multiple
        self.per_shard = self.count // tp.row_shards
        self._start = tp.row_rank * self.per_shard
        self.first = tp.first_row(self.seq, self.batch, start=self._start, rows=self.per_shard)

    def all(self, x: Tensor, fill: int) -> Tensor:
        """[B, S] -> [M] of this rank's piece, ``fill`` in the padding"""
        x = x.t()
        rows = torch.cat([x[chunk] for chunk in self.tp.chunks(self.seq)]) if self.tp.cp is not None else x
        rows = rows.reshape(-1)
        return nn.functional.pad(rows, (0, self.count - rows.shape[0]), value=fill)

    def share(self, x: Tensor) -> Tensor:
        """[B, S, D], the same on every rank -> this rank's [m, D]; the gradient is whole on every rank."""
        rows, cp = x.transpose(0, 1).flatten(0, 1), self.tp.cp
        if cp is not None:
            padded = nn.functional.pad(rows, (0, 0, 0, cp.size * self._piece - rows.shape[0]))
            rows = split(by_rank(padded, self.tp), cp)
        rows = nn.functional.pad(rows, (0, 0, 0, self.count - rows.shape[0]))
        return split(rows, self.tp) if self.tp.sequence_parallel else rows

    def collected(self, rows: Tensor) -> Tensor:
        """This rank's [m, D] -> [B, S, D], the same on every rank."""
        return self.back(collect(rows, self.tp, size=self.count) if self.tp.sequence_parallel else rows)

    def select(self, rows: Tensor, keep: int | Tensor) -> tuple[Tensor, "BatchRows"]:
        """This rank's [m, D] -> its share of the rows that :func:`positions_of` names, and their batch; of positions
        [N] it is one sample."""
        hidden = self.collected(rows)
        hidden = hidden.flatten(0, 1)[positions_of(keep, hidden.shape[:2], hidden.device)]
        hidden = hidden if hidden.dim() == 3 else hidden[None]
        batch = BatchRows(hidden.shape[:2], self.tp)
        return batch.share(hidden), batch

    def local(self, x: Tensor, fill: int) -> Tensor:
        """[B, S] -> this rank's [m]"""
        return self.all(x, fill)[self._start : self._start + self.per_shard]

    def back(self, rows: Tensor) -> Tensor:
        """[M, ...] of this rank's piece -> [B, S, ...], the same on every context-parallel rank."""
        if self.tp.cp is not None:
            rows = collect(rows[: self._piece], self.tp.cp, size=self.tp.cp.size * self._piece)
            rows = by_position(rows, self.tp)
        return rows[: self.batch * self.seq].unflatten(0, (self.seq, self.batch)).transpose(0, 1)

    def flat(self, x: Tensor) -> Tensor:
        """[B, S] -> [S B] of whole sequences, without padding."""
        return x.t().reshape(-1)


def positions_of(keep: int | Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """Returns the positions b S + s of a batch [B, S] that logits_to_keep names, int64 [B, K]; [N] by a mask.

    ``keep``: the number of last ones, 0 for all; positions [K] or [B, K]; or bool [B, S].
    """
    every = torch.arange(shape.numel(), device=device).view(shape)
    if isinstance(keep, int):
        return every[:, -keep:]
    if keep.dtype == torch.bool:
        return every[keep]
    return every.gather(1, keep.expand(len(every), -1))
