"""Attention on the fused qkv: causal, key-padding, window and document masks, grouped heads, rotary positions, soft-capped scores, an
additive bias, and dropout in global coordinates.

    q, k = turn(q), turn(k)     z = scale q k'     S = softcap tanh(z / softcap) + bias     P = softmax(S)     o = dropout(P) v
    dP = dropout'(do v')        dS = P (dP - delta), delta = rowsum(do o)              dz = dS (1 - tanh(z / softcap)^2)
    dq = turn'(scale dz k)      dk = turn'(scale dz' q)                                dv = dropout(P)' do

Dao 2023 (arXiv:2307.08691) for the recomputing backward, Su et al. 2021 (arXiv:2104.09864) for the turning.  Letters: B batch, S
positions, G kv heads, Q query heads a kv head, H = G Q, E width, W <= E the columns that turn.  qkv [M, G, Q + 2, E] with row s B + b
(q heads, k, v of each group), M >= S B: rows beyond are padding, o and dqkv are zero there.  o [M, G Q E], lse [B, H, S].

Scores and softmax are fp32 (fp64 for fp64), o and dqkv have qkv's dtype.  q and k turn in fp32 and are rounded once, to qkv's dtype, so
that a cache of turned keys holds what attention multiplies.  A row that sees no key gives 0, and its lse is +inf, so that exp(S - lse) is
0 in backward too.  Query i sees key j where j <= i (causal), i - window < j (window) and both lie in one interval of cu_seqlens.  The mask
of a probability is counted by (query position, site << 16 | global query head, key position, sample), whatever the documents; nothing of
it is saved.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._attention import INF, TENSORS, Options, angles, by_head, heads, kept, pad, turn
from ._attention_cpu import bwd_cpu, fwd_cpu
from ._decode import decode_cost, decode_launch
from ._flash import fwd_cost, fwd_launch
from ._flash_backward import bwd_cost, bwd_launch
from ._op import acc_dtype, autocast, check, op
from ._philox import scale as keep_scale
from .reduce_bias_dropout_add_norm import active_rng

# ---- reference ----


def _visible(options: Options, device: torch.device) -> Tensor:
    """bool [B or 1, 1, 1, S, S]"""
    S = options.seq
    i, j = torch.arange(S, device=device)[:, None], torch.arange(S, device=device)
    seen = torch.ones(1, 1, 1, S, S, dtype=torch.bool, device=device)
    if options.causal:
        seen = seen & (j <= i)
    if options.window is not None:
        seen = seen & (i - options.window < j)
    if options.cu_seqlens is not None:
        document = torch.searchsorted(options.cu_seqlens, j.to(torch.int32), right=True)
        inside = (document > 0) & (document < len(options.cu_seqlens))
        seen = seen & (document[:, None] == document) & inside
    return seen if options.key_mask is None else seen & options.key_mask[:, None, None, None]


def _dense(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | float]:
    """q [B, G, Q, S, E], k, v [B, G, 1, S, E] turned and in fp32; S [B, G, Q, S, S], -inf where masked; scale dS / dz."""
    q, k, v = heads(qkv, options.batch, options.seq)
    turns = angles(options, acc_dtype(qkv))
    if turns is not None:
        q, k = turn(q, *turns, options.interleaved), turn(k, *turns, options.interleaved)
    q, k, v = (t.to(acc_dtype(qkv)) for t in (q, k, v))
    s, slope = q @ k.transpose(-1, -2) * options.scale, options.scale
    if options.softcap is not None:
        tanh = torch.tanh(s / options.softcap)
        s, slope = options.softcap * tanh, options.scale * (1 - tanh.square())
    if options.bias is not None:
        s = s + options.bias.to(s.dtype).view(-1, q.shape[2] if len(options.bias) > 1 else 1, *s.shape[-2:])
    return q, k, v, s.masked_fill(~_visible(options, qkv.device), -INF), slope


def _mask(options: Options, probs: Tensor) -> Tensor | float:
    """0 or 1 / (1 - p) of every probability [B, G, Q, S, S]"""
    if options.rng is None:
        return 1.0
    B, G, Q, S, _ = probs.shape
    position, sample = torch.arange(S, device=probs.device), torch.arange(B, device=probs.device)
    return kept(options, position, S, sample, G * Q, probs.dtype).unflatten(1, (G, Q)) * keep_scale(options.p)


def attention_fwd_ref(
    qkv: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, rng: Tensor | None, batch: int, seq: int, max_seqlen: int | None, causal: bool, window: int | None,
    scale: float, softcap: float | None, interleaved: bool, p: float, site: int, first_head: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = Options(
        key_mask, cu_seqlens, bias, cos, sin, positions, rng, batch, seq, max_seqlen, causal, window, scale, softcap, interleaved, p, site,
        first_head,
    )  # fmt: skip
    _, _, v, s, _ = _dense(qkv, options)
    lse = torch.logsumexp(s, -1)
    lse = torch.where(lse == -INF, INF, lse)
    probs = torch.exp(s - lse[..., None])
    o = (probs * _mask(options, probs) @ v).to(qkv.dtype).permute(3, 0, 1, 2, 4).flatten(2).flatten(0, 1)
    return pad(o, len(qkv)), lse.flatten(1, 2).clone()


def attention_bwd_ref(
    do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, rng: Tensor | None, batch: int, seq: int, max_seqlen: int | None, causal: bool, window: int | None,
    scale: float, softcap: float | None, interleaved: bool, p: float, site: int, first_head: int,
) -> Tensor:  # fmt: skip
    options = Options(
        key_mask, cu_seqlens, bias, cos, sin, positions, rng, batch, seq, max_seqlen, causal, window, scale, softcap, interleaved, p, site,
        first_head,
    )  # fmt: skip
    q, k, v, s, slope = _dense(qkv, options)
    probs = torch.exp(s - lse.unflatten(1, q.shape[1:3])[..., None])
    do, o = (by_head(t, batch, seq, *q.shape[1:3]).to(s.dtype) for t in (do, o))
    mask = _mask(options, probs)
    dz = probs * (do @ v.transpose(-1, -2) * mask - (do * o).sum(-1, keepdim=True)) * slope
    dq, dk = dz @ k, (dz.transpose(-1, -2) @ q).sum(2, keepdim=True)
    dv = ((probs * mask).transpose(-1, -2) @ do).sum(2, keepdim=True)
    turns = angles(options, s.dtype)
    if turns is not None:
        back = turns[0], -turns[1], interleaved
        dq, dk = turn(dq, *back), turn(dk, *back)
    dqkv = torch.cat([dq, dk, dv], 2).to(qkv.dtype).permute(3, 0, 1, 2, 4).reshape(seq * batch, *qkv.shape[1:])
    return pad(dqkv, len(qkv))


def _fwd_fake(qkv, *args):
    options, (M, G, slots, E) = Options(*args), qkv.shape
    lse = qkv.new_empty(options.batch, G * (slots - 2), options.seq, dtype=acc_dtype(qkv))
    return qkv.new_empty(M, G * (slots - 2) * E), lse


def _bwd_fake(do, qkv, *_):
    return qkv.new_empty(qkv.shape)


attention_fwd = op(attention_fwd_ref, launch=fwd_launch, cpu=fwd_cpu, fake=_fwd_fake, cost=fwd_cost)
attention_bwd = op(attention_bwd_ref, launch=bwd_launch, cpu=bwd_cpu, fake=_bwd_fake, cost=bwd_cost)


def attention_decode_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    lengths: Tensor | None,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """One new token against a cache of turned keys.  q [B, G, Q, E], turned too, k and v [B, L, G, E] -> o [B, G Q E].  No gradient.

    Sample b sees its first ``lengths[b]`` keys (int32 [B]; all L without), of those the last ``window``, where ``key_mask`` [B, L] lets it.
    """
    acc, L = acc_dtype(q), k.shape[1]
    s = torch.einsum("bgqe,blge->bgql", q.to(acc), k.to(acc)) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    end = torch.full((len(q), 1), L, device=q.device) if lengths is None else lengths[:, None]
    position = torch.arange(L, device=q.device)
    seen = position < end
    if window is not None:
        seen = seen & (position >= end - window)
    if key_mask is not None:
        seen = seen & key_mask
    s = s.masked_fill(~seen[:, None, None], -INF)
    return torch.einsum("bgql,blge->bgqe", torch.softmax(s, -1).nan_to_num(0), v.to(acc)).to(q.dtype).flatten(1)


def _decode_fake(q, *_):
    return q.new_empty(len(q), q[0].numel())


attention_decode = op(attention_decode_ref, launch=decode_launch, fake=_decode_fake, cost=decode_cost)


# ---- autograd ----


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, *options):
        o, lse = attention_fwd(qkv, *options)
        ctx.save_for_backward(qkv, o, lse, *options[:TENSORS])
        ctx.numbers = options[TENSORS:]
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        return attention_bwd(do.contiguous(), *ctx.saved_tensors, *ctx.numbers), *[None] * len(Options._fields)


# ---- public ----


def attention(
    qkv: Tensor,
    *,
    batch: int,
    seq: int | None = None,
    causal: bool,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
    first_head: int = 0,
) -> Tensor:
    """softmax(scale q k') v for every head, with dropout on the probabilities.

    qkv [M, G, Q + 2, E]: row s * batch + b, per kv head its Q query heads, k and v; ``seq`` positions (default M / batch; rows beyond
    seq * batch are padding).  ``scale`` > 0 defaults to E ** -0.5.  Returns o [M, G Q E] in qkv's dtype (under autocast: in its dtype).

    What a query sees: with ``causal``, itself and what came before, with ``window`` (causal only) the last ``window`` of these, itself
    counted.  ``key_mask`` bool [batch, seq], True where a key may be seen.  ``cu_seqlens`` int32 [N + 1], rising: documents packed in
    one row (batch 1) that do not see one another; rows outside all of them give 0.  No document may be longer than ``max_seqlen``.
    Scores: ``softcap`` > 0 bounds them by tanh; then ``bias`` [H or 1, seq, seq], floating, is added (it has no gradient).
    Rotary positions: ``cos`` and ``sin`` [P, W / 2], floating, W <= E, turn the first W columns of q and k: column i with i + W / 2, or if
    ``interleaved`` 2i with 2i + 1.  Row r takes the table's row positions[r] (int64 [seq * batch], below P), without ``positions`` its s.
    Dropout: p, rng and ``site``; ``first_head`` is the global number of the first query head here.

    ValueError for what does not fit; on a CPU also for cu_seqlens that do not rise and documents longer than max_seqlen.
    """
    check(qkv.dim() == 4 and qkv.shape[2] >= 3, f"attention: qkv must be [M, G, Q + 2, E], got {tuple(qkv.shape)}")
    options = Options(
        key_mask, cu_seqlens, bias, cos, sin, positions, rng, batch, seq, max_seqlen, causal, window, scale, softcap, interleaved, p, site,
        first_head,
    )  # fmt: skip
    options = checked_options(qkv.shape, options)
    (qkv,) = autocast(qkv)
    return _Attention.apply(qkv.contiguous(), *options)


def checked_options(shape: tuple[int, int, int, int], options: Options) -> Options:
    """Those of :func:`attention` on qkv of ``shape`` [M, G, Q + 2, E], None replaced by what it stands for."""
    key_mask, cu_seqlens, bias, cos, sin, positions, rng, batch, seq, max_seqlen, causal, window, scale, softcap, _, p, *_ = options
    M, G, slots, E = shape
    check(batch >= 1, f"attention: batch must be at least 1, got {batch}")
    seq = M // batch if seq is None else seq
    check(seq * batch <= M, f"attention: seq x batch = {seq} x {batch} rows are more than qkv's {M}")
    scale = E**-0.5 if scale is None else scale
    check(scale > 0, f"attention: scale must be positive, got {scale}")
    check(softcap is None or softcap > 0, f"attention: softcap must be positive, got {softcap}")
    check(window is None or (causal and window >= 1), f"attention: window needs causal and must be at least 1, got {window}, {causal=}")
    if key_mask is not None:
        _check("key_mask", key_mask, torch.bool, (batch, seq))
    if cu_seqlens is not None:
        check(batch == 1, f"attention: cu_seqlens needs batch = 1, got {batch}")
        _check("cu_seqlens", cu_seqlens, torch.int32, (max(cu_seqlens.numel(), 1),))
    check(max_seqlen is None or cu_seqlens is not None, "attention: max_seqlen needs cu_seqlens")
    if bias is not None:
        check(not bias.requires_grad, "attention: bias is not differentiated; give it detached")
        check(bias.is_floating_point(), f"attention: bias must be floating, got {bias.dtype}")
        _check("bias", bias, bias.dtype, (1 if bias.dim() and len(bias) == 1 else G * (slots - 2), seq, seq))
    _check_turns(E, batch, seq, cos, sin, positions)
    return options._replace(seq=seq, scale=scale, rng=active_rng("attention", p, rng))


def _check(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    fits = t.shape == shape and t.dtype == dtype
    check(fits, f"attention: {name} must be {str(dtype)[6:]} {shape}, got {t.dtype} {tuple(t.shape)}")


def _check_turns(E: int, batch: int, seq: int, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None) -> None:
    check((cos is None) == (sin is None), "attention: cos and sin go together")
    if positions is not None:
        check(cos is not None, "attention: positions need cos and sin")
        _check("positions", positions, torch.int64, (seq * batch,))
    if cos is not None:
        fits = cos.dim() == 2 and cos.shape == sin.shape and cos.is_floating_point() and cos.dtype == sin.dtype
        got = f"{cos.dtype} {tuple(cos.shape)} and {sin.dtype} {tuple(sin.shape)}"
        check(fits, f"attention: cos and sin must be floating [positions, W / 2], alike, got {got}")
        check(2 * cos.shape[1] <= E, f"attention: cos turns {2 * cos.shape[1]} columns, a head has {E}")
        enough = positions is not None or len(cos) >= seq
        check(enough, f"attention: cos has {len(cos)} rows for {seq} positions; give at least {seq}, or positions")
