"""The definition of attention in plain torch, and the views, angles and mask that it shares with the CPU
implementation.  The equations and the letters stand in op.py."""

import torch
from torch import Tensor

from ..rotary.reference import rotate
from ..runtime.op import acc_dtype
from ..runtime.philox import keep, mask_key
from ..runtime.philox import scale as keep_scale
from .options import INF, DecodeOptions, Options, QueryChunk, query_positions

# ---- shared with the CPU implementation ----


def heads(qkv: Tensor, batch: int, seq: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [B, G, Q, S, E], k and v [B, G, 1, S, E], as views."""
    t = by_position(qkv, batch, seq)
    return t[:, :, :-2], t[:, :, -2:-1], t[:, :, -1:]


def operands(x: Tensor, options: Options, chunk: QueryChunk | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [B, G, Q, n, E], k and v [B, G, 1, S, E], as views of x: qkv, or a chunk's q [m, G, Q, E]."""
    if chunk is None:
        return heads(x, options.batch, options.seq)
    k, v = by_position(chunk.kv, options.batch, options.seq).split(1, 2)
    return by_position(x, options.batch, chunk.queries), k, v


def by_position(x: Tensor, batch: int, positions: int) -> Tensor:
    """Returns x [M, G, slots, E] as [B, G, slots, positions, E], a view."""
    return x[: positions * batch].unflatten(0, (positions, batch)).permute(1, 2, 3, 0, 4)


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


def rotate_both(q: Tensor, k: Tensor, options: Options, rows: slice, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """Rotates queries [..., n, E] at positions ``rows`` and keys [..., S, E]; ``back``: the other way, as gradients."""
    rotation = angles(options, acc_dtype(q))
    if rotation is None:
        return q, k
    cos, sin = rotation[0], -rotation[1] if back else rotation[1]
    turned = rotate(q, cos[..., rows, :], sin[..., rows, :], options.interleaved)
    return turned, rotate(k, cos, sin, options.interleaved)


def keep_mask(
    options: Options, rows: Tensor, samples: Tensor, *, heads: int, keys: range, dtype: torch.dtype
) -> Tensor:
    """Returns the 0/1 dropout mask [samples, heads, rows, keys] of the probabilities."""
    assert options.rng is not None
    *key, first_sample = mask_key(options.rng)
    head = (options.site << 16) + options.first_head + torch.arange(heads, device=rows.device)[:, None, None]
    sample = first_sample + samples[:, None, None, None]
    return keep(key, rows[:, None], head, columns=len(keys), sample=sample, p=options.p, dtype=dtype, first=keys.start)


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


def _dense(
    x: Tensor, options: Options, chunk: QueryChunk | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | float]:
    """Returns q [B, G, Q, n, E], k and v [B, G, 1, S, E], rotated and in fp32; S [B, G, Q, n, S], -inf where masked;
    and scale dS / dz."""
    (q, k, v), rows = operands(x, options, chunk), query_positions(options, chunk)
    q, k = rotate_both(q, k, options, rows)
    q, k, v = (t.to(acc_dtype(x)) for t in (q, k, v))
    s = q @ k.transpose(-1, -2) * options.scale
    slope: Tensor | float = options.scale
    if options.softcap is not None:
        tanh = torch.tanh(s / options.softcap)
        s, slope = options.softcap * tanh, options.scale * (1 - tanh.square())
    if options.bias is not None:
        bias = options.bias[:, rows].to(s.dtype)
        s = s + bias.unflatten(0, q.shape[1:3] if len(bias) > 1 else (1, 1))
    return q, k, v, s.masked_fill(~visible(options, x.device)[..., rows, :], -INF), slope


def _scaled_mask(options: Options, probs: Tensor, rows: slice) -> Tensor | float:
    """Returns 0 or 1 / (1 - p) for every probability [B, G, Q, n, S] of the queries at positions ``rows``."""
    if options.rng is None:
        return 1.0
    B, G, Q, _, S = probs.shape
    positions = torch.arange(rows.start, rows.stop, device=probs.device)
    samples = torch.arange(B, device=probs.device)
    mask = keep_mask(options, positions, samples, heads=G * Q, keys=range(S), dtype=probs.dtype)
    return mask.unflatten(1, (G, Q)) * keep_scale(options.p)


def _by_row(x: Tensor, rows: int) -> Tensor:
    """Returns x [B, G, slots, n, E] as [rows, G, slots, E], zero beyond n B; contiguous."""
    flat = x.permute(3, 0, 1, 2, 4).flatten(0, 1)
    return (
        flat.contiguous() if len(flat) == rows else torch.cat([flat, flat.new_zeros(rows - len(flat), *flat.shape[1:])])
    )


def _forward(x: Tensor, options: Options, chunk: QueryChunk | None) -> tuple[Tensor, Tensor]:
    _, _, v, s, _ = _dense(x, options, chunk)
    lse = torch.logsumexp(s, -1)
    lse = torch.where(lse == -INF, INF, lse)
    probs = torch.exp(s - lse[..., None])
    o = (probs * _scaled_mask(options, probs, query_positions(options, chunk)) @ v).to(x.dtype)
    return _by_row(o, len(x)).flatten(1), lse.flatten(1, 2).clone()


def _backward(
    do: Tensor, x: Tensor, o: Tensor, lse: Tensor, options: Options, chunk: QueryChunk | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq [B, G, Q, n, E], dk and dv [B, G, 1, S, E] in the dtype of sums."""
    q, k, v, s, slope = _dense(x, options, chunk)
    rows, groups = query_positions(options, chunk), (q.shape[1], q.shape[2])
    probs = torch.exp(s - lse.unflatten(1, groups)[..., None])
    do, o = (by_head(t, options.batch, q.shape[3], groups).to(s.dtype) for t in (do, o))
    mask = _scaled_mask(options, probs, rows)
    dz = probs * (do @ v.transpose(-1, -2) * mask - (do * o).sum(-1, keepdim=True)) * slope
    dq, dk = dz @ k, (dz.transpose(-1, -2) @ q).sum(2, keepdim=True)
    dv = ((probs * mask).transpose(-1, -2) @ do).sum(2, keepdim=True)
    return *rotate_both(dq, dk, options, rows, back=True), dv


def attention_fwd_ref(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    return _forward(qkv, options, None)


def attention_bwd_ref(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, options: Options) -> Tensor:
    gradients = _backward(do, qkv, o, lse, options=options, chunk=None)
    return _by_row(torch.cat(gradients, 2).to(qkv.dtype), len(qkv))


def attention_of_queries_fwd_ref(q: Tensor, chunk: QueryChunk, options: Options) -> tuple[Tensor, Tensor]:
    return _forward(q, options, chunk)


def attention_of_queries_bwd_ref(
    do: Tensor, q: Tensor, chunk: QueryChunk, o: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """-> dq in q's dtype, and dkv in that of sums: of these queries alone."""
    dq, dk, dv = _backward(do, q, o, lse, options=options, chunk=chunk)
    return _by_row(dq.to(q.dtype), len(q)), _by_row(torch.cat([dk, dv], 2), len(chunk.kv))


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
