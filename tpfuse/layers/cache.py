"""The keys and values of one attention layer during generation, this rank's heads only."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attn.op import attention_decode
from ..kernels.attn.options import DecodeOptions, Options
from ..kernels.attn.tiles import Keys, attend_tiles
from ..kernels.runtime import matmul
from ..kernels.runtime.leaves import cut
from ..kernels.runtime.op import acc_dtype


class CachePosition:
    """Index of the next position, held on the device: all caches of a model, whose rows have ``length`` positions,
    share one, and the host need not know how far they are."""

    def __init__(self, batch: int, length: int, device: torch.device):
        self.index = torch.full((1,), length - 1, device=device)
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=device)  # with the next position

    def advance(self) -> None:
        self.index += 1
        self.lengths += 1


class Seeing(NamedTuple):
    """Scores of a layer: over the last ``window`` positions (None: all), with attention's ``scale`` (None: E ** -0.5)
    and ``softcap``."""

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


class KVCache:
    """Holds keys and values in one tensor, ``kv`` [B, G/R, 2, L, E], written in place.

    ``mask`` [B, L] says which positions may be seen, and is shared by all layers; ``padded=False``: all may.
    ``length`` positions are filled, as far as the host knows; ``place`` says it where :meth:`fix` was called.
    """

    def __init__(self, mask: Tensor, *, padded: bool = True):
        self.mask, self.padded = mask, padded
        self.length = 0
        self.place: CachePosition | None = None
        self.kv = mask.new_empty(0)  # made by the first positions, which know its shape

    def fix(self, place: CachePosition) -> None:
        """From now on a call stores one position where ``place`` says, with the same shapes and numbers each time."""
        self.place = place
        self.kv[:, :, :, self.length :].zero_()  # what is not seen is multiplied by 0

    def store(self, kv: Tensor) -> None:
        """Stores the next positions: kv [B, G/R, 2, n, E]."""
        if self.place is not None:
            self.kv.index_copy_(3, self.place.index, kv)
            return
        (batch, most), n = self.mask.shape, kv.shape[3]
        if self.length == 0:
            self.kv = kv.new_empty(batch, kv.shape[1], 2, most, kv.shape[-1])
        self.kv.narrow(3, self.length, n).copy_(kv)
        self.length += n

    def fill(self, qkv: Tensor, batch: int, seq: int) -> None:
        """Stores the prompt: qkv [M, G/R, Q + 2, E], rows s * batch + b, M >= seq * batch."""
        self.store(qkv[: seq * batch, :, -2:].unflatten(0, (seq, batch)).permute(1, 2, 3, 0, 4))

    def repeat(self, n: int, mask: Tensor) -> None:
        """Makes ``n`` rows of each of the batch; ``mask`` [n B, L] is the one of them all."""
        self.mask, self.kv = mask, self.kv.repeat_interleave(n, 0)

    def reorder(self, rows: Tensor, start: int) -> None:
        """Row b goes on from what row ``rows[b]`` was, from the position ``first`` on; before it rows stay."""
        changed = self.kv[:, :, :, start : self.length]
        changed.copy_(changed.index_select(0, rows))

    def see(self, q: Tensor, seeing: Seeing, decode: Callable[..., Tensor] = attention_decode) -> Tensor:
        """Attends from the last position: q [B, G/R, Q, E] -> o [B, H/R E]."""
        filled = self.length if self.place is None else self.mask.shape[1]
        k, v = self.kv[:, :, :, :filled].transpose(1, 3).unbind(2)  # [B, length, G/R, E]
        mask = self.mask[:, :filled] if self.padded else None
        lengths = None if self.place is None else self.place.lengths
        scale = q.shape[-1] ** -0.5 if seeing.scale is None else seeing.scale
        options = DecodeOptions(mask, lengths=lengths, window=seeing.window, scale=scale, softcap=seeing.softcap)
        return decode(q, k, v, options)

    def leaf(self, i: int, leaves: int) -> "KVCache":
        """Returns a view of leaf i of the heads, filled as far as this cache is."""
        view = KVCache(self.mask, padded=self.padded)
        view.length, view.place, view.kv = self.length, self.place, self.kv.chunk(leaves, 1)[i]
        return view

    def attend(self, qkv: Tensor, batch: int, seq: int, seeing: Seeing, *, leaves: int = 0, tile: int = 0) -> Tensor:
        """Stores the next ``seq`` positions and attends from them: qkv [M, G/R, Q + 2, E], rows s * batch + b, M >=
        seq * batch -> o [M, H/R E].

        Rows of o beyond seq * batch are zero.  ``leaves``: as in kernels.attn.op.attend.  ``tile``, unless 0: in tiles
        of so many queries, as training and prompts.
        """
        if leaves > 1 and tile == 0:  # which treat a head alike wherever it is
            pieces = cut("KVCache", qkv, 1, leaves)
            outputs = [self.leaf(i, leaves).attend(piece, batch, seq, seeing) for i, piece in enumerate(pieces)]
            if self.place is None:
                self.length += seq
            return torch.cat(outputs, 1)
        rows, filled_before = seq * batch, self.length
        if tile:
            start = self.length if self.place is None else int(self.place.index)
            self.fill(qkv, batch, seq)
            o = self._see_in_tiles(start, qkv[:rows, :, :-2].unflatten(0, (seq, batch)), seeing, tile)
        elif seq == 1:
            self.store(qkv[:batch, :, -2:].unsqueeze(3))
            o = self.see(qkv[:batch, :, :-2], seeing)
        else:
            self.fill(qkv, batch, seq)
            o = self._see_from(filled_before, qkv[:rows, :, :-2].unflatten(0, (seq, batch)), seeing)
        padded: Tensor = o.new_zeros(len(qkv), o.shape[1])
        padded[:rows] = o
        return padded

    def _see_in_tiles(self, start: int, q: Tensor, seeing: Seeing, tile: int) -> Tensor:
        """Attends as :meth:`_see_from`, in tiles of so many queries."""
        n, batch, _, _, E = q.shape
        k, v = self.kv[:, :, :, : start + n].unbind(2)
        mask = self.mask[:, : start + n] if self.padded else None
        scale = E**-0.5 if seeing.scale is None else seeing.scale
        options = Options(tile=tile, causal=True, window=seeing.window, scale=scale, softcap=seeing.softcap)
        o, _ = attend_tiles(q.permute(1, 2, 3, 0, 4), Keys.of(k, v, mask), options, start=start)
        return o.permute(3, 0, 1, 2, 4).reshape(n * batch, -1)

    def _see_from(self, start: int, q: Tensor, seeing: Seeing) -> Tensor:
        """Attends from the positions from ``first`` on: q [n, B, G/R, Q, E] -> o [n B, H/R E]; a query that may see
        nothing gives 0."""
        filled, heads = self.length, q.shape[3]
        k, v = (t.repeat_interleave(heads, 1) for t in self.kv[:, :, :, :filled].unbind(2))  # [B, H/R, length, E]
        key = torch.arange(filled, device=q.device)
        query = key[start:, None]
        visible = key <= query if seeing.window is None else (key <= query) & (key > query - seeing.window)
        if self.padded:
            visible = visible & self.mask[:, None, None, :filled]
        q = q.flatten(2, 3).permute(1, 2, 0, 3)
        if seeing.softcap is None:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=seeing.scale)
        else:
            q, k, v = matmul.operands(q, k, v)
            scale = q.shape[-1] ** -0.5 if seeing.scale is None else seeing.scale
            scores = seeing.softcap * torch.tanh((q @ k.mT).to(acc_dtype(q)) * (scale / seeing.softcap))
            o = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(v.dtype) @ v
        if self.padded:
            o = o.masked_fill(~visible.any(-1, keepdim=True), 0)
        return o.permute(2, 0, 1, 3).reshape(-1, o.shape[1] * o.shape[3]).to(self.kv.dtype)
