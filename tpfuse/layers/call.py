"""One call of a block or of attention, as a record: made once, handed on whole."""

from typing import NamedTuple

from torch import Tensor

from ..kernels.attn.options import default_seq
from ..kernels.runtime.philox import FirstRow
from ..parallel import TensorParallel
from .cache import KVCache
from .sites import site


class Rope(NamedTuple):
    """Rotary positions: tables ``cos`` and ``sin`` [P, E/2 or less] fp32, and the row of theirs that each row has.

    ``positions`` is int64 [seq * batch], for rows s * batch + b; None: s.  ``interleaved``: the pairs that are rotated
    together are neighbours, not half a head apart.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None
    interleaved: bool = False


class Ropes(NamedTuple):
    """Rotary positions of two kinds of layers: those without a window, and those with one."""

    full: Rope
    sliding: Rope


class Call(NamedTuple):
    """Arguments of one call over rows s * batch + b, beside the rows.

    ``seq``, ``key_mask``, ``cu_seqlens`` and ``rope`` are those of whole sequences, also where context-parallel ranks
    hold a piece of each.

    ``key_mask`` bool [batch, seq], true where a key may be seen.  ``cu_seqlens`` int32 [N + 1], the bounds of packed
    documents (batch 1), of which the longest has ``max_seqlen`` positions.  ``rng`` int64 [3] = (seed, step,
    first_sample), needed where dropout is on.  ``keep``: save what backward reads; if false n and activations are
    recomputed in backward.  ``router_sums``: layers with experts give what losses of balance are made of (balance.py).
    ``layer``: the layer's number among dropout sites, in place of its own: torch.compile compiles a block for any
    number of an argument, but anew for each number of a module.
    """

    batch: int = 1
    seq: int | None = None  # None: all rows over batch; rows beyond seq * batch are padding
    rng: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    rope: Rope | Ropes | None = None
    cache: KVCache | None = None
    keep: bool = True
    router_sums: bool = False
    layer: int | None = None

    def positions(self, rows: int, tp: TensorParallel) -> int:
        """Returns the positions of whole sequences, of which the ranks of ``tp`` together hold ``rows`` rows."""
        return default_seq(rows, self.batch) * tp.cp_size if self.seq is None else self.seq

    def first_row(self, rows: int, shard: int, shards: int, tp: TensorParallel) -> FirstRow:
        """Returns where in whole sequences the ``rows`` of one of so many shards lie, those of the ranks of ``tp``."""
        start = shard * rows
        if tp.cp is None:
            return start
        return tp.first_row(self.positions(rows * shards, tp), self.batch, start=start, rows=rows)

    def site(self, name: str, layer: int, p: float) -> int:
        """Returns the dropout site (:func:`.sites.site`) of a layer whose own number is ``layer``; 0 where nothing is
        dropped, so that layers are alike."""
        return 0 if p == 0 else site(layer if self.layer is None else self.layer, name)

    def valid_rows(self, rows: int, tp: TensorParallel) -> int:
        """Returns how many of the ``rows`` of all ranks of ``tp``, from the first on, are no padding."""
        if self.seq is None:
            return rows
        return sum(chunk.stop - chunk.start for chunk in tp.chunks(self.seq)) * self.batch

    def rotation(self, window: int | None) -> Rope | None:
        """Returns the rotary positions of a layer with this window."""
        if isinstance(self.rope, Ropes):
            return self.rope.full if window is None else self.rope.sliding
        return self.rope


CALL = Call()


def required(name: str, batch: int | None) -> int:
    """Returns the batch of a call; TypeError of ``name`` where none was given."""
    if batch is None:
        raise TypeError(f"{name}: missing argument batch: x has rows s * batch + b")
    return batch
