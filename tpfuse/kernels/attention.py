"""Attention on the fused qkv, with causal and key-padding masks, grouped heads and dropout in global coordinates.

    S = scale q k'        P = softmax(S)        o = dropout(P) v
    dP = dropout'(do v')  dS = P (dP - delta), delta = rowsum(do o)      dq = scale dS k     dk = scale dS' q     dv = dropout(P)' do

Dao 2023 (arXiv:2307.08691) for the recomputing backward.  Letters: B batch, S positions, G kv heads, Q query heads a kv head, E width.
qkv [M, G, Q + 2, E] with row s B + b (q heads, k, v of each group), M >= S B: rows beyond are padding, o and dqkv are zero there.
o [M, G Q E], lse [B, G Q, S].  Scores and softmax are fp32 (fp64 for fp64), o and dqkv have qkv's dtype.  A row whose keys are all
masked gives 0, and its lse is +inf, so that exp(S - lse) is 0 in backward too.  The mask of a probability is counted by (query position,
site << 16 | global query head, key position, sample); nothing of it is saved.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._op import Cost, acc_dtype, autocast, check, least, op
from ._philox import keep, mask_key, scale
from .reduce_bias_dropout_add_norm import active_rng

_INF = float("inf")
_LOG2E = 1.4426950408889634


# ---- reference ----


def _heads(qkv: Tensor, batch: int, seq: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, G, Q, S, E], k and v [B, G, 1, S, E], as views."""
    t = qkv[: seq * batch].unflatten(0, (seq, batch)).permute(1, 2, 3, 0, 4)
    return t[:, :, :-2], t[:, :, -2:-1], t[:, :, -1:]


def _dropout_mask(
    rng: Tensor, rows: Tensor, keys: int, samples: Tensor, heads: int, p: float, site: int, first_head: int, dtype: torch.dtype
) -> Tensor:
    """0/1 [samples, heads, rows, keys]"""
    *key, first_sample = mask_key(rng)
    site_head = (site << 16) + first_head + torch.arange(heads, device=rng.device)[:, None, None]
    return keep(key, rows[:, None], site_head, keys, first_sample + samples[:, None, None, None], p, dtype)


def _scores(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """[B, G, Q, S, S] in fp32, -inf where masked."""
    acc = acc_dtype(q)
    s = (q.to(acc) @ k.to(acc).transpose(-1, -2)) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -_INF)
    return s if key_mask is None else s.masked_fill(~key_mask[:, None, None, None], -_INF)


def attention_fwd_ref(
    qkv: Tensor,
    key_mask: Tensor | None,
    rng: Tensor | None,
    batch: int,
    seq: int,
    causal: bool,
    scale: float,
    p: float,
    site: int,
    first_head: int,
) -> tuple[Tensor, Tensor]:
    q, k, v = _heads(qkv, batch, seq)
    s = _scores(q, k, key_mask, causal, scale)
    lse = torch.logsumexp(s, -1)
    lse = torch.where(lse == -_INF, _INF, lse)
    probs = torch.exp(s - lse[..., None])
    if rng is not None:
        probs = probs * _probability_mask(rng, probs, p, site, first_head)
    o = (probs @ v.to(s.dtype)).to(qkv.dtype).permute(3, 0, 1, 2, 4).flatten(2).flatten(0, 1)
    return _pad(o, len(qkv)), lse.flatten(1, 2).clone()


def attention_bwd_ref(
    do: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    key_mask: Tensor | None,
    rng: Tensor | None,
    batch: int,
    seq: int,
    causal: bool,
    scale: float,
    p: float,
    site: int,
    first_head: int,
) -> Tensor:
    q, k, v = _heads(qkv, batch, seq)
    s = _scores(q, k, key_mask, causal, scale)
    probs = torch.exp(s - lse.unflatten(1, q.shape[1:3])[..., None])
    dof, of = (t[: seq * batch].view(seq, batch, *q.shape[1:3], q.shape[-1]).permute(1, 2, 3, 0, 4).to(s.dtype) for t in (do, o))
    mask = 1.0 if rng is None else _probability_mask(rng, probs, p, site, first_head)
    ds = probs * (dof @ v.to(s.dtype).transpose(-1, -2) * mask - (dof * of).sum(-1, keepdim=True)) * scale
    dq, dk = ds @ k.to(s.dtype), (ds.transpose(-1, -2) @ q.to(s.dtype)).sum(2, keepdim=True)
    dv = ((probs * mask).transpose(-1, -2) @ dof).sum(2, keepdim=True)
    dqkv = torch.cat([dq, dk, dv], 2).to(qkv.dtype).permute(3, 0, 1, 2, 4).reshape(seq * batch, *qkv.shape[1:])
    return _pad(dqkv, len(qkv))


def _probability_mask(rng: Tensor, probs: Tensor, p: float, site: int, first_head: int) -> Tensor:
    B, G, Q, S, _ = probs.shape
    positions = torch.arange(S, device=probs.device)
    mask = _dropout_mask(rng, positions, S, torch.arange(B, device=probs.device), G * Q, p, site, first_head, probs.dtype)
    return mask.unflatten(1, (G, Q)) * scale(p)


def _pad(x: Tensor, rows: int) -> Tensor:
    """x [S B, ...] -> [rows, ...], zero beyond."""
    return x.contiguous() if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


# ---- CPU: sample by sample, blocks of query rows as batched GEMMs, so that the scores stay in the cache; none above the diagonal.
# Scores are in units of log 2: exp2 costs a quarter of exp here.  bench/kernels/cpu.py compares it with ATen's flash attention. ----

_BLOCK = 128


class _Sample:
    """One sample's q [G, Q, S, E], k and v [G, S, E], and its blocks of query rows."""

    def __init__(self, b, qkv, key_mask, rng, batch, seq, causal, p, site, first_head):
        q, k, v = _heads(qkv, batch, seq)
        self.q, self.k, self.v = q[b], k[b, :, 0].contiguous(), v[b, :, 0].contiguous()
        self.G, self.Q, self.S, self.E = self.q.shape
        self.key_mask = None if key_mask is None else key_mask[b]
        self.b, self.rng, self.causal, self.acc = b, rng, causal, acc_dtype(qkv)
        self.dropout = p, site, first_head

    def __iter__(self):
        """(rows a to e, keys that they see)"""
        for a in range(0, self.S, _BLOCK):
            e = min(a + _BLOCK, self.S)
            yield a, e, e if self.causal else self.S

    def rows(self, x: Tensor, a: int, e: int) -> Tensor:
        """[G, Q, S, ...] -> [G, Q rows, ...]"""
        return x[:, :, a:e].reshape(self.G, self.Q * (e - a), *x.shape[3:])

    def scores(self, q: Tensor, kt: Tensor, a: int, e: int, keys: int) -> Tensor:
        """[G, Q rows, keys], -inf where masked; q is scaled already."""
        s = torch.bmm(q, kt[:, :, :keys])
        if self.causal:
            above = torch.full((e - a, e - a), -_INF, dtype=s.dtype, device=s.device).triu_(1)
            s.view(self.G * self.Q, e - a, keys)[..., a:] += above
        if self.key_mask is not None:
            s.masked_fill_(~self.key_mask[:keys], -_INF)
        return s

    def mask(self, a: int, e: int, keys: int) -> Tensor:
        """0/1 [G, Q rows, keys]"""
        rows, sample = torch.arange(a, e, device=self.rng.device), torch.tensor([self.b], device=self.rng.device)
        return _dropout_mask(self.rng, rows, keys, sample, self.G * self.Q, *self.dropout, self.acc).view(self.G, -1, keys)


def _attention_fwd_cpu(qkv, key_mask, rng, batch, seq, causal, sm_scale, p, site, first_head):
    M, G, heads, E = qkv.shape
    Q = heads - 2
    o = qkv.new_zeros(M, G * Q * E) if M > seq * batch else qkv.new_empty(M, G * Q * E)
    out = o[: seq * batch].view(seq, batch, G, Q, E).permute(1, 2, 3, 0, 4)
    lse = qkv.new_empty(batch, G, Q, seq, dtype=acc_dtype(qkv))
    for b in range(batch):
        sample = _Sample(b, qkv, key_mask, rng, batch, seq, causal, p, site, first_head)
        kt = sample.k.to(sample.acc).transpose(1, 2)
        for a, e, keys in sample:
            s = sample.scores(sample.rows(sample.q, a, e).to(sample.acc) * (sm_scale * _LOG2E), kt, a, e, keys)
            top = s.amax(-1, keepdim=True)
            if key_mask is not None:
                top.masked_fill_(top == -_INF, 0)
            s.sub_(top).exp2_()
            total = s.sum(-1, keepdim=True)
            row_lse = total.log2().add_(top).div_(_LOG2E)
            if key_mask is not None:
                row_lse.masked_fill_(total == 0, _INF)
                total.masked_fill_(total == 0, 1)
            if rng is not None:
                s *= sample.mask(a, e, keys)
                total /= scale(p)
            out[b, :, :, a:e] = torch.bmm(s.to(qkv.dtype), sample.v[:, :keys]).div_(total).view(G, Q, e - a, E)
            lse[b, :, :, a:e] = row_lse.view(G, Q, e - a)
    return o, lse.flatten(1, 2)


def _attention_bwd_cpu(do, qkv, o, lse, key_mask, rng, batch, seq, causal, sm_scale, p, site, first_head):
    M, G, heads, E = qkv.shape
    Q, acc, dtype = heads - 2, acc_dtype(qkv), qkv.dtype
    by_head = lambda t: t[: seq * batch].view(seq, batch, G, Q, E).permute(1, 2, 3, 0, 4)  # noqa: E731
    do, o, lse = by_head(do), by_head(o), lse.view(batch, G, Q, seq)
    dqkv = qkv.new_zeros(qkv.shape) if M > seq * batch else torch.empty_like(qkv)
    dq, dk_out, dv_out = _heads(dqkv, batch, seq)
    for b in range(batch):
        sample = _Sample(b, qkv, key_mask, rng, batch, seq, causal, p, site, first_head)
        kt, vt = sample.k.to(acc).transpose(1, 2), sample.v.to(acc).transpose(1, 2)
        delta, lse2 = (do[b].to(acc) * o[b]).sum(-1), lse[b] * _LOG2E
        dk, dv = (torch.zeros(G, seq, E, dtype=acc, device=qkv.device) for _ in range(2))
        for a, e, keys in sample:
            qb, dob = sample.rows(sample.q, a, e), sample.rows(do[b], a, e)
            s = sample.scores(qb.to(acc) * (sm_scale * _LOG2E), kt, a, e, keys)
            probs = s.sub_(sample.rows(lse2, a, e)[..., None]).exp2_()
            dp = torch.bmm(dob.to(acc), vt[:, :, :keys])
            dropped = probs
            if rng is not None:
                mask = sample.mask(a, e, keys).mul_(scale(p))
                dp *= mask
                dropped = mask.mul_(probs)
            dv[:, :keys] += torch.bmm(dropped.to(dtype).transpose(1, 2), dob)
            ds = dp.sub_(sample.rows(delta, a, e)[..., None]).mul_(probs).to(dtype)
            dq[b, :, :, a:e] = torch.bmm(ds, sample.k[:, :keys]).mul_(sm_scale).view(G, Q, e - a, E)
            dk[:, :keys] += torch.bmm(ds.transpose(1, 2), qb)
        dk_out[b, :, 0] = dk.mul_(sm_scale)
        dv_out[b, :, 0] = dv
    return dqkv


def _fwd_fake(qkv, key_mask, rng, batch, seq, causal, scale, p, site, first_head):
    M, G, heads, E = qkv.shape
    return qkv.new_empty(M, G * (heads - 2) * E), qkv.new_empty(batch, G * (heads - 2), seq, dtype=acc_dtype(qkv))


def _cost(products: int, first: int) -> Callable[[tuple, tuple], Cost]:
    """So many products over the scores (half of them where causal); qkv and what follows it begin at argument ``first``."""

    def cost(args: tuple, outputs: tuple) -> Cost:
        qkv, (batch, seq, causal) = args[first], args[-7:-4]
        heads = qkv.shape[1] * (qkv.shape[2] - 2)
        scores = seq * (seq + 1) // 2 if causal else seq * seq
        return least(args, outputs)._replace(flops=2 * products * batch * heads * scores * qkv.shape[-1])

    return cost


attention_fwd = op(attention_fwd_ref, cpu=_attention_fwd_cpu, fake=_fwd_fake, cost=_cost(2, 0))
attention_bwd = op(attention_bwd_ref, cpu=_attention_bwd_cpu, fake=lambda do, qkv, *_: qkv.new_empty(qkv.shape), cost=_cost(5, 1))


def attention_decode_ref(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """One new token against a cache.  q [B, G, Q, E], k and v [B, L, G, E], key_mask [B, L] -> o [B, G Q E].  No gradient."""
    acc = acc_dtype(q)
    s = torch.einsum("bgqe,blge->bgql", q.to(acc), k.to(acc)) * scale
    if key_mask is not None:
        s = s.masked_fill(~key_mask[:, None, None], -_INF)
    return torch.einsum("bgql,blge->bgqe", torch.softmax(s, -1).nan_to_num(0), v.to(acc)).to(q.dtype).flatten(1)


attention_decode = op(attention_decode_ref, fake=lambda q, *_: q.new_empty(len(q), q[0].numel()))


# ---- autograd ----


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, key_mask, rng, *args):
        o, lse = attention_fwd(qkv, key_mask, rng, *args)
        ctx.save_for_backward(qkv, o, lse, key_mask, rng)
        ctx.args = args
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        return attention_bwd(do.contiguous(), *ctx.saved_tensors, *ctx.args), *[None] * 9


# ---- public ----


def attention(
    qkv: Tensor,
    *,
    batch: int,
    seq: int | None = None,
    causal: bool,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    p: float = 0.0,
    rng: Tensor | None = None,
    site: int = 0,
    first_head: int = 0,
) -> Tensor:
    """softmax(scale q k') v for every head, with dropout on the probabilities.

    qkv [M, G, Q + 2, E]: row s * batch + b, per kv head its Q query heads, k and v; ``seq`` positions (default M / batch; rows beyond
    seq * batch are padding).  key_mask bool [batch, seq], True where a key may be seen.  ``scale`` defaults to E ** -0.5.
    ``first_head`` is the global number of the first query head here.  Returns o [M, G Q E] in qkv's dtype (under autocast: in its
    dtype).  ValueError for shapes that do not fit, p outside [0, 1), or p > 0 without rng.
    """
    check(qkv.dim() == 4 and qkv.shape[2] >= 3, f"attention: qkv must be [M, G, Q + 2, E], got {tuple(qkv.shape)}")
    check(batch >= 1, f"attention: batch must be at least 1, got {batch}")
    seq = len(qkv) // batch if seq is None else seq
    check(seq * batch <= len(qkv), f"attention: seq x batch = {seq} x {batch} rows are more than qkv's {len(qkv)}")
    if key_mask is not None:
        fits = key_mask.shape == (batch, seq) and key_mask.dtype == torch.bool
        check(fits, f"attention: key_mask must be bool {(batch, seq)}, got {key_mask.dtype} {tuple(key_mask.shape)}")
    rng = active_rng("attention", p, rng)
    (qkv,) = autocast(qkv)
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    return _Attention.apply(qkv.contiguous(), key_mask, rng, batch, seq, causal, scale, p, site, first_head)
