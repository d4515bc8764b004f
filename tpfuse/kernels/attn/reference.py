"""The definition of attention in plain torch, and the views, rotation and mask that it shares with the CPU
implementation.  The equations and the letters stand in op.py."""

import torch
from torch import Tensor

from ..runtime.op import acc_dtype
from ..runtime.philox import keep, mask_key
from ..runtime.philox import scale as keep_scale
from .options import INF, DecodeOptions, Options

# ---- shared with the CPU implementation ----


def heads(qkv: Tensor, batch: int, seq: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [B, G, Q, S, E], k and v [B, G, 1, S, E], as views."""
    t = qkv[: seq * batch].unflatten(0, (seq, batch)).permute(1, 2, 3, 0, 4)
    return t[:, :, :-2], t[:, :, -2:-1], t[:, :, -1:]


def by_head(o: Tensor, batch: int, seq: int, groups: tuple[int, ...]) -> Tensor:
    """Returns o [M, G Q E] as [B, G, Q, S, E], a view; ``groups`` is (G, Q)."""
    rows = o[: seq * batch].unflatten(0, (seq, batch))
    return rows.unflatten(-1, (*groups, o.shape[-1] // (groups[0] * groups[1]))).permute(1, 2, 3, 0, 4)


def angles(options: Options, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Returns cos and sin [B or 1, 1, 1, S, W / 2] of every row, None without rotary positions."""
    if options.cos is None or options.sin is None:
        return None
    B, S = options.batch, options.seq
    if options.positions is None:
        rows = torch.arange(S, device=options.cos.device)[:, None]
    else:
        rows = options.positions[: S * B].view(S, B)
    cos, sin = (table.to(dtype)[rows].transpose(0, 1)[:, None, None] for table in (options.cos, options.sin))
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first W columns of x [..., E]: column i with i + W / 2, interleaved 2i with 2i + 1.

    The arithmetic is that of cos and sin; the result is rounded once, to x's dtype.
    """
    W = 2 * cos.shape[-1]
    pairs = x[..., :W].to(cos.dtype)
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.split(max(W // 2, 1), -1)
    both = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([rotated.to(x.dtype), x[..., W:]], -1)


def keep_mask(
    options: Options, rows: Tensor, samples: Tensor, *, heads: int, keys: range, dtype: torch.dtype
) -> Tensor:
    """Returns the 0/1 dropout mask [samples, heads, rows, keys] of the probabilities."""
    assert options.rng is not None
    *key, first_sample = mask_key(options.rng)
    head = (options.site << 16) + options.first_head + torch.arange(heads, device=rows.device)[:, None, None]
    sample = first_sample + samples[:, None, None, None]
    return keep(
        key,
        rows[:, None],
        head,
        columns=len(keys),
        sample=sample,
        p=options.p,
        dtype=dtype,
        first=keys.start,
    )


# ---- the ops ----


def visible(options: Options, device: torch.device) -> Tensor:
    """Returns bool [B or 1, 1, 1, S, S], True where a query sees a key."""
    S = options.seq
    i, j = torch.arange(S, device=device)[:, None], torch.arange(S, device=device)
    allowed = torch.ones(1, 1, 1, S, S, dtype=torch.bool, device=device)
    if options.causal:
        allowed = allowed & (j <= i)
    if options.window is not None:
        allowed = allowed & ((i - j).abs() < options.window)
    if options.cu_seqlens is not None:
        document = torch.searchsorted(options.cu_seqlens, j.to(torch.int32), right=True)
        inside = (document > 0) & (document < len(options.cu_seqlens))
        allowed = allowed & (document[:, None] == document) & inside
    return allowed if options.key_mask is None else allowed & options.key_mask[:, None, None, None]


def _dense(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | float]:
    """Returns q [B, G, Q, S, E], k and v [B, G, 1, S, E], rotated and in fp32; S [B, G, Q, S, S], -inf where masked;
    and scale dS / dz."""
    q, k, v = heads(qkv, options.batch, options.seq)
    rotation = angles(options, acc_dtype(qkv))
    if rotation is not None:
        q, k = rotate(q, *rotation, options.interleaved), rotate(k, *rotation, options.interleaved)
    q, k, v = (t.to(acc_dtype(qkv)) for t in (q, k, v))
    s = q @ k.transpose(-1, -2) * options.scale
    slope: Tensor | float = options.scale
    if options.softcap is not None:
        tanh = torch.tanh(s / options.softcap)
        s, slope = options.softcap * tanh, options.scale * (1 - tanh.square())
    if options.bias is not None:
        s = s + options.bias.to(s.dtype).unflatten(0, q.shape[1:3] if len(options.bias) > 1 else (1, 1))
    return q, k, v, s.masked_fill(~visible(options, qkv.device), -INF), slope


def _scaled_mask(options: Options, probs: Tensor) -> Tensor | float:
    """Returns 0 or 1 / (1 - p) for every probability [B, G, Q, S, S]."""
    if options.rng is None:
        return 1.0
    B, G, Q, S, _ = probs.shape
    rows, samples = torch.arange(S, device=probs.device), torch.arange(B, device=probs.device)
    mask = keep_mask(options, rows, samples, heads=G * Q, keys=range(S), dtype=probs.dtype)
    return mask.unflatten(1, (G, Q)) * keep_scale(options.p)


def _pad(x: Tensor, rows: int) -> Tensor:
    """Returns x [S B, ...] as [rows, ...], zero beyond."""
    return x.contiguous() if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def attention_fwd_ref(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    _, _, v, s, _ = _dense(qkv, options)
    lse = torch.logsumexp(s, -1)
    lse = torch.where(lse == -INF, INF, lse)
    probs = torch.exp(s - lse[..., None])
    o = (probs * _scaled_mask(options, probs) @ v).to(qkv.dtype).permute(3, 0, 1, 2, 4).flatten(2).flatten(0, 1)
    return _pad(o, len(qkv)), lse.flatten(1, 2).clone()


def attention_bwd_ref(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, options: Options) -> Tensor:
    q, k, v, s, slope = _dense(qkv, options)
    probs = torch.exp(s - lse.unflatten(1, q.shape[1:3])[..., None])
    do, o = (by_head(t, options.batch, options.seq, q.shape[1:3]).to(s.dtype) for t in (do, o))
    mask = _scaled_mask(options, probs)
    dz = probs * (do @ v.transpose(-1, -2) * mask - (do * o).sum(-1, keepdim=True)) * slope
    dq, dk = dz @ k, (dz.transpose(-1, -2) @ q).sum(2, keepdim=True)
    dv = ((probs * mask).transpose(-1, -2) @ do).sum(2, keepdim=True)
    rotation = angles(options, s.dtype)
    if rotation is not None:
        cos, sin = rotation
        dq, dk = (rotate(t, cos, -sin, options.interleaved) for t in (dq, dk))
    dqkv = torch.cat([dq, dk, dv], 2).to(qkv.dtype).permute(3, 0, 1, 2, 4)
    return _pad(dqkv.reshape(options.seq * options.batch, *qkv.shape[1:]), len(qkv))


def attention_decode_ref(q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions) -> Tensor:
    """Attends with one new token to a cache of rotated keys.  q [B, G, Q, E], rotated too, k and v [B, L, G, E] -> o
    [B, G Q E].  It has no gradient.

    Sample b sees its first ``lengths[b]`` keys (all L without lengths), of those the last ``window``, where
    ``key_mask`` lets it.
    """
    acc, L = acc_dtype(q), k.shape[1]
    s = torch.einsum("bgqe,blge->bgql", q.to(acc), k.to(acc)) * options.scale
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    end = torch.full((len(q), 1), L, device=q.device) if options.lengths is None else options.lengths[:, None]
    position = torch.arange(L, device=q.device)
    allowed = position < end
    if options.window is not None:
        allowed = allowed & (position >= end - options.window)
    if options.key_mask is not None:
        allowed = allowed & options.key_mask
    s = s.masked_fill(~allowed[:, None, None], -INF)
    return torch.einsum("bgql,blge->bgqe", torch.softmax(s, -1).nan_to_num(0), v.to(acc)).to(q.dtype).flatten(1)
