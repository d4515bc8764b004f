"""The tables of rotary positions of a model's calls, and the row of theirs that each row has."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..kernels.rotary.table import rope_table
from ..kernels.runtime.launch import next_power_of_2
from ..layers.call import Rope, Ropes
from .config.model import ModelConfig
from .inputs import bound_of
from .rows import BatchRows

_TABLE = 8192  # rows of a table at least: a longer call seldom makes another


class RotaryTables:
    """Makes the tables of calls, and keeps the latest ones."""

    def __init__(self, name: str, config: ModelConfig):
        self.name, self.config = name, config
        self.kept: dict[tuple[bool, bool], tuple[tuple[Any, ...], list[tuple[Tensor, Tensor]]]] = {}

    def __call__(
        self,
        rows: BatchRows,
        position_ids: Tensor | None,
        device: torch.device,
        below: int | None = None,
        *,
        longest: int | None = None,
    ) -> Rope | Ropes | None:
        """Returns a call's tables, and the row of theirs that each row has; None of learned positions.

        ``below``: a bound of position_ids, where the caller knows one, and ``longest`` their maximum and 1.  On a CPU
        it is that; a GPU would have to be waited for, so its table then has all of max_positions, and the device stops
        where one lies beyond.
        """
        c = self.config
        if c.rope is None:
            return None
        length = rows.seq
        if position_ids is not None:
            if below is None or torch.compiler.is_compiling():
                below = bound_of(self.name, position_ids, max(c.max_positions, length))
            length = max(next_power_of_2(below), _TABLE)
            length = min(length, c.max_positions) if below <= c.max_positions else length
        elif torch.compiler.is_compiling():
            length = max(length, c.max_positions)  # one table, and so one graph, for sequences of any length
        stretch = self._stretch(rows, position_ids, below, longest=longest)
        switch = None if position_ids is None else c.switches_at
        stretches = (stretch,) if switch is None else (switch, switch + 1)  # the tables of short and of long calls
        # Cached are one of the length of all rows, one for graphs, and one long enough for the positions so far.
        kind = position_ids is None, torch.compiler.is_compiling()
        key = device, stretch, length if position_ids is None else None
        cached = self.kept.get(kind)
        if cached is None or cached[0] != key or len(cached[1][0][0]) < length * len(stretches):
            with torch.inference_mode(False):  # the calls to come may need what backward can save
                tables = [self._rotation(rope, length, stretches, device) for rope in c.ropes]
            self.kept[kind] = cached = key, tables
        positions = None if position_ids is None else rows.flat(position_ids)
        if positions is not None and position_ids is not None and switch is not None:
            # on the device, so that the host need not wait for the longest position
            positions = positions + len(cached[1][0][0]) // 2 * (position_ids.max() >= switch)
        ropes = [Rope(*table, positions) for table in cached[1]]
        return ropes[0] if len(ropes) == 1 else Ropes(*ropes)

    def _stretch(
        self, rows: BatchRows, position_ids: Tensor | None, below: int | None, *, longest: int | None
    ) -> int | None:
        """Returns the length that dynamic tables stretch to; None of other rotary positions."""
        trained = self.config.stretches_past
        if trained is None:
            return None
        if position_ids is None:
            longest = rows.seq
        elif longest is None:  # a GPU is waited for where the call may be a long one
            longest = below if below is not None and below <= trained else int(position_ids.max()) + 1
        return max(longest, trained)

    def _rotation(
        self, rope: Mapping[str, Any], length: int, stretches: tuple[int | None, ...], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of ``length`` positions, for calls of each of ``stretches`` one below another."""
        width, scaling, most = self.config.head_size, dict(rope), self.config.max_positions
        table = lambda seq_len: rope_table(
            width, length, scaling=scaling, max_position_embeddings=most, seq_len=seq_len, device=device
        )
        cos, sin = zip(*map(table, stretches), strict=True)
        return (cos[0], sin[0]) if len(cos) == 1 else (torch.cat(cos), torch.cat(sin))


def packed_positions(cu_seqlens: Tensor, seq: int) -> Tensor:
    """Returns int64 [seq]: the position of each token in its document; 0 in what lies beyond the last."""
    token, bounds = torch.arange(seq, device=cu_seqlens.device), cu_seqlens.long()
    return (token - bounds[torch.searchsorted(bounds, token, right=True) - 1]).masked_fill(token >= bounds[-1], 0)
