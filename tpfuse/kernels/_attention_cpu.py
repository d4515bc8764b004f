"""Attention on a CPU: sample by sample and document by document, blocks of query rows as batched GEMMs, so that the scores stay in the
cache; no block of keys that a causal mask, a window or a document's end hides as a whole is computed.

Scores are in units of log 2: exp2 costs a quarter of exp here.  bench/kernels/cpu.py compares it with ATen's flash attention.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ._attention import INF, LOG2E, Options, angles, by_head, heads, kept, turn
from ._op import acc_dtype, check
from ._philox import scale

_BLOCK = 128


def documents(options: Options) -> list[tuple[int, int]]:
    """[start, end) of each; one, the whole sequence, without cu_seqlens."""
    if options.cu_seqlens is None:
        return [(0, options.seq)]
    ends = options.cu_seqlens.tolist()
    rising = all(a <= b for a, b in zip([0, *ends], [*ends, options.seq]))
    check(rising, f"attention: cu_seqlens must rise from 0 or more to at most seq = {options.seq}, got {ends}")
    longest = max((b - a for a, b in zip(ends, ends[1:])), default=0)
    most = options.max_seqlen
    check(most is None or longest <= most, f"attention: max_seqlen={most}, but a document has {longest} positions; give at least {longest}")
    return list(zip(ends, ends[1:]))


class _Sample:
    """One sample's q [G, Q, S, E], k and v [G, S, E], k turned, and its blocks of query rows."""

    def __init__(self, b: int, qkv: Tensor, options: Options, turns: tuple[Tensor, Tensor] | None):
        q, k, v = heads(qkv, options.batch, options.seq)
        self.b, self.options, self.acc, self.turns = b, options, acc_dtype(qkv), None
        if turns is not None:
            self.turns = tuple(t[b if len(t) > 1 else 0] for t in turns)  # [1, 1, S, W / 2]
        self.q, self.k, self.v = self.turned(q[b]), self.turned(k[b])[:, 0].contiguous(), v[b, :, 0].contiguous()
        self.G, self.Q, self.S, self.E = self.q.shape
        self.kt = self.k.to(self.acc).transpose(1, 2)
        self.key_mask = None if options.key_mask is None else options.key_mask[b]
        self.bias = None if options.bias is None else options.bias.view(-1, self.Q if len(options.bias) > 1 else 1, self.S, self.S)
        self.may_see_nothing = options.key_mask is not None or options.bias is not None

    def turned(self, x: Tensor, back: bool = False) -> Tensor:
        """x [G, Q or 1, S, E] rotated, or rotated back"""
        if self.turns is None:
            return x
        cos, sin = self.turns
        return turn(x, cos, -sin if back else sin, self.options.interleaved)

    def blocks(self, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
        """(rows a to e, keys lo to hi that any of them sees)"""
        window = self.options.window
        for start, end in spans:
            for a in range(start, end, _BLOCK):
                e = min(a + _BLOCK, end)
                yield a, e, start if window is None else max(start, a - window + 1), e if self.options.causal else end

    def rows(self, x: Tensor, a: int, e: int) -> Tensor:
        """[G, Q, S, ...] -> [G, Q rows, ...]"""
        return x[:, :, a:e].reshape(self.G, self.Q * (e - a), *x.shape[3:])

    def scores(self, q: Tensor, a: int, e: int, lo: int, hi: int) -> tuple[Tensor, Tensor | None]:
        """[G, Q rows, keys] in units of log 2, -inf where masked; and where they are capped the tanh."""
        o = self.options
        unit = o.scale * LOG2E if o.softcap is None else o.scale / o.softcap
        s, tanh = torch.bmm(q.to(self.acc) * unit, self.kt[:, :, lo:hi]), None
        if o.softcap is not None:
            tanh = s.tanh_()
            s = tanh * (o.softcap * LOG2E)
        by_row = s.view(self.G, self.Q, e - a, hi - lo)
        if self.bias is not None:
            by_row += self.bias[:, :, a:e, lo:hi].to(self.acc) * LOG2E
        if o.causal:
            by_row[..., a - lo :] += torch.full((e - a, e - a), -INF, dtype=s.dtype, device=s.device).triu_(1)
        if o.window is not None and lo <= e - 1 - o.window:
            by_row += torch.full((e - a, hi - lo), -INF, dtype=s.dtype, device=s.device).tril_(a - lo - o.window)
        if self.key_mask is not None:
            s.masked_fill_(~self.key_mask[lo:hi], -INF)
        return s, tanh

    def mask(self, a: int, e: int, lo: int, hi: int) -> Tensor:
        """0/1 [G, Q rows, keys]"""
        device = self.q.device
        rows, sample = torch.arange(a, e, device=device), torch.tensor([self.b], device=device)
        return kept(self.options, rows, hi - lo, sample, self.G * self.Q, self.acc, lo).view(self.G, -1, hi - lo)


def fwd_cpu(qkv: Tensor, *args) -> tuple[Tensor, Tensor]:
    options = Options(*args)
    batch, seq, (M, G, slots, E) = options.batch, options.seq, qkv.shape
    Q, spans, acc = slots - 2, documents(options), acc_dtype(qkv)
    whole = M == seq * batch and options.cu_seqlens is None
    o = (qkv.new_empty if whole else qkv.new_zeros)(M, G * Q * E)
    out = by_head(o, batch, seq, G, Q)
    lse = qkv.new_full((batch, G, Q, seq), INF, dtype=acc)
    turns = angles(options, acc)
    for b in range(batch):
        sample = _Sample(b, qkv, options, turns)
        for a, e, lo, hi in sample.blocks(spans):
            s, _ = sample.scores(sample.rows(sample.q, a, e), a, e, lo, hi)
            top = s.amax(-1, keepdim=True)
            if sample.may_see_nothing:
                top.masked_fill_(top == -INF, 0)
            s.sub_(top).exp2_()
            total = s.sum(-1, keepdim=True)
            row_lse = total.log2().add_(top).div_(LOG2E)
            if sample.may_see_nothing:
                row_lse.masked_fill_(total == 0, INF)
                total.masked_fill_(total == 0, 1)
            if options.rng is not None:
                s *= sample.mask(a, e, lo, hi)
                total /= scale(options.p)
            out[b, :, :, a:e] = torch.bmm(s.to(qkv.dtype), sample.v[:, lo:hi]).div_(total).view(G, Q, e - a, E)
            lse[b, :, :, a:e] = row_lse.view(G, Q, e - a)
    return o, lse.flatten(1, 2)


def bwd_cpu(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, *args) -> Tensor:
    options = Options(*args)
    batch, seq, (M, G, slots, E) = options.batch, options.seq, qkv.shape
    Q, spans, acc, dtype = slots - 2, documents(options), acc_dtype(qkv), qkv.dtype
    do, o, lse = by_head(do, batch, seq, G, Q), by_head(o, batch, seq, G, Q), lse.view(batch, G, Q, seq)
    whole = M == seq * batch and options.cu_seqlens is None
    dqkv = (qkv.new_empty if whole else qkv.new_zeros)(qkv.shape)
    dq_out, dk_out, dv_out = heads(dqkv, batch, seq)
    turns = angles(options, acc)
    for b in range(batch):
        sample = _Sample(b, qkv, options, turns)
        vt = sample.v.to(acc).transpose(1, 2)
        delta, lse2 = (do[b].to(acc) * o[b]).sum(-1), lse[b] * LOG2E
        dk, dv = (torch.zeros(G, seq, E, dtype=acc, device=qkv.device) for _ in range(2))
        dq = dq_out[b] if turns is None else torch.zeros(G, Q, seq, E, dtype=acc, device=qkv.device)
        for a, e, lo, hi in sample.blocks(spans):
            qb, dob = sample.rows(sample.q, a, e), sample.rows(do[b], a, e)
            s, tanh = sample.scores(qb, a, e, lo, hi)
            probs = s.sub_(sample.rows(lse2, a, e)[..., None]).exp2_()
            dp = torch.bmm(dob.to(acc), vt[:, :, lo:hi])
            dropped = probs
            if options.rng is not None:
                mask = sample.mask(a, e, lo, hi).mul_(scale(options.p))
                dp *= mask
                dropped = mask.mul_(probs)
            dv[:, lo:hi] += torch.bmm(dropped.to(dtype).transpose(1, 2), dob)
            ds = dp.sub_(sample.rows(delta, a, e)[..., None]).mul_(probs)
            if tanh is not None:
                ds.mul_(tanh.square_().neg_().add_(1))
            ds = ds.to(dtype)
            dq[:, :, a:e] = torch.bmm(ds, sample.k[:, lo:hi]).mul_(options.scale).view(G, Q, e - a, E)
            dk[:, lo:hi] += torch.bmm(ds.transpose(1, 2), qb)
        if turns is not None:
            dq_out[b] = sample.turned(dq, back=True)
        dk_out[b] = sample.turned(dk.mul_(options.scale)[:, None], back=True)
        dv_out[b, :, 0] = dv
    return dqkv
