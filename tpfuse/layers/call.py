"""One call of a block or of attention, as a record: made once, handed on whole."""

from typing import NamedTuple

from torch import Tensor

from .cache import KVCache


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

    ``key_mask`` bool [batch, seq], true where a key may be seen.  ``cu_seqlens`` int32 [N + 1], the bounds of packed
    documents (batch 1), of which the longest has ``max_seqlen`` positions.  ``rng`` int64 [3] = (seed, step,
    first_sample), needed where dropout is on.  ``keep``: save what backward reads; if false n and activations are
    recomputed in backward.  ``router_sums``: layers with experts give what losses of balance are made of (balance.py).
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
