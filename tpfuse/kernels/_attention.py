"""What the three sides of attention (reference, CPU, Triton) share: the arguments, views of qkv, rotation, the mask of probabilities."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._philox import keep, mask_key

INF = float("inf")
LOG2E = 1.4426950408889634


class Options(NamedTuple):
    """What attention_fwd and attention_bwd take after their own tensors: ``attention_fwd(qkv, *Options(batch=2, seq=8))``."""

    key_mask: Tensor | None = None  # bool [B, S]
    cu_seqlens: Tensor | None = None  # int32 [N + 1]
    bias: Tensor | None = None  # [H or 1, S, S]
    cos: Tensor | None = None  # [P, W / 2]
    sin: Tensor | None = None
    positions: Tensor | None = None  # int64 [S B]
    rng: Tensor | None = None  # int64 [3]
    batch: int = 1
    seq: int = 0
    max_seqlen: int | None = None
    causal: bool = False
    window: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    interleaved: bool = False
    p: float = 0.0
    site: int = 0
    first_head: int = 0


TENSORS = 7  # how many of them come first


def heads(qkv: Tensor, batch: int, seq: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, G, Q, S, E], k and v [B, G, 1, S, E], as views."""
    t = qkv[: seq * batch].unflatten(0, (seq, batch)).permute(1, 2, 3, 0, 4)
    return t[:, :, :-2], t[:, :, -2:-1], t[:, :, -1:]


def by_head(o: Tensor, batch: int, seq: int, G: int, Q: int) -> Tensor:
    """[M, G Q E] -> [B, G, Q, S, E], as a view."""
    return o[: seq * batch].unflatten(0, (seq, batch)).unflatten(-1, (G, Q, o.shape[-1] // (G * Q))).permute(1, 2, 3, 0, 4)


def angles(options: Options, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """cos and sin [B or 1, 1, 1, S, W / 2] of every row."""
    if options.cos is None:
        return None
    B, S = options.batch, options.seq
    where = torch.arange(S, device=options.cos.device)[:, None] if options.positions is None else options.positions[: S * B].view(S, B)
    cos, sin = (table.to(dtype)[where].transpose(0, 1)[:, None, None] for table in (options.cos, options.sin))
    return cos, sin


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first W columns of x [..., E]: column i with i + W / 2, interleaved 2i with 2i + 1; rounded once, to x's dtype."""
    W = 2 * cos.shape[-1]
    pairs = x[..., :W].to(cos.dtype)
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.split(max(W // 2, 1), -1)
    turned = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([turned.to(x.dtype), x[..., W:]], -1)


def kept(options: Options, rows: Tensor, keys: int, samples: Tensor, H: int, dtype: torch.dtype, first_key: int = 0) -> Tensor:
    """0/1 [samples, H, rows, keys]"""
    *key, first_sample = mask_key(options.rng)
    head = (options.site << 16) + options.first_head + torch.arange(H, device=rows.device)[:, None, None]
    return keep(key, rows[:, None], head, keys, first_sample + samples[:, None, None, None], options.p, dtype, first=first_key)


def pad(x: Tensor, rows: int) -> Tensor:
    """x [S B, ...] -> [rows, ...], zero beyond."""
    return x.contiguous() if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def scores(qkv: Tensor, options: Options) -> tuple[int, int]:
    """That causal and window leave (a triangle of n rows counted n^2 / 2, as is customary), a product over which is 2 E flops each; and
    those made, in tiles of 128 queries with their keys.  Documents are not known from shapes."""
    S, heads = options.seq, options.batch * qkv.shape[1] * (qkv.shape[2] - 2)
    if not options.causal:
        return heads * S * S, heads * S * S
    seen, made = S if options.window is None else min(options.window, S), 0
    for start in range(0, S, 128):
        end = min(start + 128, S)
        made += (end - start) * (end - max(0, start - seen + 1))
    return heads * (seen * (2 * S - seen) // 2), heads * made
