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

BLOCK = 128  # positions


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

    def blocks(self, spans: list[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """(rows a to e, keys lo to hi that any of them sees), of positions ``first`` to ``last``"""
        window = self.options.window
        for start, end in spans:
            for a in range(max(start, first), min(end, last), BLOCK):
                e = min(a + BLOCK, end, last)
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


class Forward:
    """o [M, G Q E] and lse [B, H, S], filled position by position: ``attend`` of every sample and every range, in any order."""

    def __init__(self, qkv: Tensor, options: Options):
        batch, seq, (M, G, slots, E) = options.batch, options.seq, qkv.shape
        self.qkv, self.options, self.spans, self.turns = qkv, options, documents(options), angles(options, acc_dtype(qkv))
        whole = M == seq * batch and options.cu_seqlens is None
        self.o = (qkv.new_empty if whole else qkv.new_zeros)(M, G * (slots - 2) * E)
        self.lse = qkv.new_full((batch, G * (slots - 2), seq), INF, dtype=acc_dtype(qkv))
        self._out = by_head(self.o, batch, seq, G, slots - 2)
        self._lse = self.lse.unflatten(1, (G, slots - 2))

    def sample(self, b: int) -> _Sample:
        return _Sample(b, self.qkv, self.options, self.turns)

    def attend(self, sample: _Sample, first: int, last: int) -> None:
        """Of the queries at positions ``first`` to ``last``."""
        b, options = sample.b, self.options
        for a, e, lo, hi in sample.blocks(self.spans, first, last):
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
            by_row = sample.G, sample.Q, e - a
            self._out[b, :, :, a:e] = torch.bmm(s.to(self.o.dtype), sample.v[:, lo:hi]).div_(total).view(*by_row, sample.E)
            self._lse[b, :, :, a:e] = row_lse.view(by_row)


class Backward:
    """dqkv [M, G, Q + 2, E]: ``attend`` of every sample and every range, whose rows of do must be there, then ``finish`` of every sample.

    Gradients of keys and values are added in the order of the ranges.
    """

    def __init__(self, do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, options: Options):
        batch, seq, (M, G, slots, _) = options.batch, options.seq, qkv.shape
        self.qkv, self.options, self.spans, self.turns = qkv, options, documents(options), angles(options, acc_dtype(qkv))
        self.do, self.o = (by_head(t, batch, seq, G, slots - 2) for t in (do, o))
        self.lse = lse.view(batch, G, slots - 2, seq)
        whole = M == seq * batch and options.cu_seqlens is None
        self.dqkv = (qkv.new_empty if whole else qkv.new_zeros)(qkv.shape)
        self._dq, self._dk, self._dv = heads(self.dqkv, batch, seq)

    def sample(self, b: int) -> _Sample:
        sample = _Sample(b, self.qkv, self.options, self.turns)
        sample.vt = sample.v.to(sample.acc).transpose(1, 2)
        sample.dk, sample.dv = (torch.zeros_like(sample.k, dtype=sample.acc) for _ in range(2))
        sample.dq = self._dq[b] if self.turns is None else torch.zeros_like(sample.q, dtype=sample.acc)
        return sample

    def attend(self, sample: _Sample, first: int, last: int) -> None:
        b, options, dtype, acc = sample.b, self.options, self.qkv.dtype, sample.acc
        for a, e, lo, hi in sample.blocks(self.spans, first, last):
            qb, dob, ob = (sample.rows(t, a, e) for t in (sample.q, self.do[b], self.o[b]))
            s, tanh = sample.scores(qb, a, e, lo, hi)
            probs = s.sub_((sample.rows(self.lse[b], a, e) * LOG2E)[..., None]).exp2_()
            dp = torch.bmm(dob.to(acc), sample.vt[:, :, lo:hi])
            dropped = probs
            if options.rng is not None:
                mask = sample.mask(a, e, lo, hi).mul_(scale(options.p))
                dp *= mask
                dropped = mask.mul_(probs)
            sample.dv[:, lo:hi] += torch.bmm(dropped.to(dtype).transpose(1, 2), dob)
            ds = dp.sub_((dob.to(acc) * ob).sum(-1, keepdim=True)).mul_(probs)
            if tanh is not None:
                ds.mul_(tanh.square_().neg_().add_(1))
            ds = ds.to(dtype)
            dq = torch.bmm(ds, sample.k[:, lo:hi]).mul_(options.scale)
            sample.dq[:, :, a:e] = dq.view(sample.G, sample.Q, e - a, sample.E)
            sample.dk[:, lo:hi] += torch.bmm(ds.transpose(1, 2), qb)

    def finish(self, sample: _Sample) -> None:
        if self.turns is not None:
            self._dq[sample.b] = sample.turned(sample.dq, back=True)
        self._dk[sample.b] = sample.turned(sample.dk.mul_(self.options.scale)[:, None], back=True)
        self._dv[sample.b, :, 0] = sample.dv


def fwd_cpu(qkv: Tensor, *args) -> tuple[Tensor, Tensor]:
    forward = Forward(qkv, Options(*args))
    for b in range(forward.options.batch):
        forward.attend(forward.sample(b), 0, forward.options.seq)
    return forward.o, forward.lse


def bwd_cpu(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, *args) -> Tensor:
    backward = Backward(do, qkv, o, lse, Options(*args))
    for b in range(backward.options.batch):
        sample = backward.sample(b)
        backward.attend(sample, 0, backward.options.seq)
        backward.finish(sample)
    return backward.dqkv
