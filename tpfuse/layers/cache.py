"""The keys and values of one attention layer during generation, this rank's heads only."""

from collections.abc import Callable

from torch import Tensor

from ..kernels.attention.op import attention_decode
from ..kernels.attention.options import DecodeOptions


class KVCache:
    """Holds keys and values in one tensor, ``kv`` [B, G/R, 2, L, E], written in place.

    ``mask`` [B, L] says which positions may be seen, and is shared by all layers; ``padded=False``: all may.
    ``length`` positions are filled.
    """

    def __init__(self, mask: Tensor, *, padded: bool = True):
        self.mask, self.padded = mask, padded
        self.length = 0
        self.kv = mask.new_empty(0)  # made by the first positions, which know its shape

    def store(self, kv: Tensor) -> None:
        """Stores the next positions: kv [B, G/R, 2, n, E]."""
        (batch, most), n = self.mask.shape, kv.shape[3]
        if self.length == 0:
            self.kv = kv.new_empty(batch, kv.shape[1], 2, most, kv.shape[-1])
        self.kv.narrow(3, self.length, n).copy_(kv)
        self.length += n

    def fill(self, qkv: Tensor, batch: int, seq: int) -> None:
        """Stores the prompt: qkv [M, G/R, Q + 2, E], rows s * batch + b, M >= seq * batch."""
        self.store(qkv[: seq * batch, :, -2:].unflatten(0, (seq, batch)).permute(1, 2, 3, 0, 4))

    def see(
        self,
        q: Tensor,
        window: int | None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        by: Callable[..., Tensor] = attention_decode,
    ) -> Tensor:
        """Attends from the last position to the last ``window`` ones: q [B, G/R, Q, E] -> o [B, H/R E].

        ``scale`` (E ** -0.5) and ``softcap`` are attention's.
        """
        k, v = self.kv[:, :, :, : self.length].transpose(1, 3).unbind(2)  # [B, length, G/R, E]
        mask = self.mask[:, : self.length] if self.padded else None
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        options = DecodeOptions(mask, lengths=None, window=window, scale=scale, softcap=softcap)
        return by(q, k, v, options)

    def attend(
        self,
        qkv: Tensor,
        batch: int,
        window: int | None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Stores one new position and attends from it: qkv [M >= batch, G/R, Q + 2, E] -> o [M, H/R E].

        ``scale`` and ``softcap`` as to :meth:`see`.  Rows of o beyond the batch are zero.
        """
        self.store(qkv[:batch, :, -2:].unsqueeze(3))
        o = self.see(qkv[:batch, :, :-2], window, scale=scale, softcap=softcap)
        out: Tensor = o.new_zeros(len(qkv), o.shape[1])
        out[:batch] = o
        return out
