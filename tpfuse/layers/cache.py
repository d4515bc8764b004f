"""The keys and values of one attention layer during generation, this rank's heads only."""

from torch import Tensor

from ..kernels.attention.op import attention_decode
from ..kernels.attention.options import DecodeOptions


class KVCache:
    """Holds preallocated k and v [B, L, G/R, E].

    ``mask`` [B, L] says which positions may be seen, and is shared by all layers.  ``length`` positions are filled.
    """

    def __init__(self, mask: Tensor):
        self.mask = mask
        self.length = 0
        self.k = self.v = mask.new_empty(0)  # made by the first fill, which knows their shape

    def fill(self, qkv: Tensor, batch: int, seq: int) -> None:
        """Stores the prompt: qkv [M, G/R, Q + 2, E], rows s * batch + b, M >= seq * batch."""
        rows = qkv[: seq * batch].unflatten(0, (seq, batch))
        shape = batch, self.mask.shape[1], *rows.shape[2:3], rows.shape[-1]
        self.k, self.v = rows.new_zeros(shape), rows.new_zeros(shape)
        self._store(rows, 0, seq)

    def attend(self, qkv: Tensor, batch: int, window: int | None) -> Tensor:
        """Stores one new position and attends from it: qkv [M >= batch, G/R, Q + 2, E] -> o [M, H/R E].

        Rows of o beyond the batch are zero.  The last ``window`` keys are seen.
        """
        self._store(qkv[:batch].unflatten(0, (1, batch)), self.length, 1)
        k, v, mask = (t[:, : self.length] for t in (self.k, self.v, self.mask))
        options = DecodeOptions(mask, lengths=None, window=window, scale=qkv.shape[-1] ** -0.5, softcap=None)
        o = attention_decode(qkv[:batch, :, :-2], k, v, options)
        out: Tensor = o.new_zeros(len(qkv), o.shape[1])
        out[:batch] = o
        return out

    def _store(self, rows: Tensor, start: int, seq: int) -> None:
        self.k[:, start : start + seq] = rows[:, :, :, -2].transpose(0, 1)
        self.v[:, start : start + seq] = rows[:, :, :, -1].transpose(0, 1)
        self.length = start + seq
