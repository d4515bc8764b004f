"""Attention on a CPU: a few samples at a time and document by document, blocks of query rows as batched GEMMs, so that
the scores stay in the cache and short sequences take few calls; no block of keys that a causal mask, a window or a
document's end hides as a whole is computed.

Probabilities come from torch.softmax, which treats every row alike: torch's exp2, as its sigmoid, rounds the last
elements of a tensor in another way than the others, so that a head's bits would depend on the heads beside it.
bench/kernels/cpu.py compares this with ATen's flash attention.

A batched GEMM of another number of heads may add in another order.  With ``leaves`` it is made by as many calls, of so
many heads each at every number of ranks, or by one call where that has their bits (runtime/shortcut.py); all else
treats a head alike wherever it is.

So may one of another number of queries.  The first and the last block of a chunk of queries are therefore those of a
call over all positions, with zeros for the queries that are not here: o and dq have its bits, and dk and dv get nothing
from them.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rotary.reference import rotate
from ..runtime import matmul
from ..runtime.errors import check
from ..runtime.op import acc_dtype
from ..runtime.philox import scale
from ..runtime.shortcut import Shortcut
from .options import INF, DecodeOptions, Options, QueryChunk, keys_in_range, query_positions
from .reference import angles, attention_decode_ref, by_head, keep_mask, operands

BLOCK = 128  # positions
LONGEST = 8 * BLOCK
SCORES = 1 << 18  # of a block of query rows of some samples


def documents(options: Options) -> list[tuple[int, int]]:
    """Returns [start, end) of each document; of the whole sequence without cu_seqlens."""
    if options.cu_seqlens is None:
        return [(0, options.seq)]
    ends = options.cu_seqlens.tolist()
    rising = all(a <= b for a, b in zip([0, *ends], [*ends, options.seq]))
    check(rising, f"attention: cu_seqlens must rise from 0 or more to at most seq = {options.seq}, got {ends}")
    longest = max((b - a for a, b in zip(ends, ends[1:])), default=0)
    most = options.max_seqlen
    check(
        most is None or longest <= most,
        f"attention: max_seqlen={most}, but a document has {longest} positions; give at least {longest}",
    )
    return list(zip(ends, ends[1:]))


class _QueryBlock(NamedTuple):
    """Query rows [start, end), and the keys [first_key, last_key) that any of them sees."""

    start: int
    end: int
    first_key: int
    last_key: int


def _at_once(a: Tensor, b: Tensor, leaves: int) -> Tensor:
    return matmul.bmm(a, b)


def _by_leaves(a: Tensor, b: Tensor, leaves: int) -> Tensor:
    output = a.new_empty(len(a), a.shape[1], b.shape[2])
    for pieces in zip(a.chunk(leaves), b.chunk(leaves), output.chunk(leaves), strict=True):
        matmul.bmm(pieces[0], pieces[1], place=pieces[2])
    return output


_BMM = Shortcut(_by_leaves, _at_once, _at_once)


def _bmm(a: Tensor, b: Tensor, leaves: int) -> Tensor:
    """Returns a [G, M, K] times b [G, K, N], by leaves of the G unless 0.

    One call is tried for whole blocks of positions alone, up to LONGEST: documents' ends are of too many shapes, and
    calls of longer ones take no time beside their products.
    """
    if leaves < 2:
        return _at_once(a, b, leaves)
    sizes = a.shape[1], a.shape[2], b.shape[2]
    tried = max(sizes) <= LONGEST and sum(n % BLOCK == 0 for n in sizes) >= 2
    return (_BMM if tried else _by_leaves)(a, b, leaves)


def _blocks(options: Options, spans: list[tuple[int, int]], start_row: int, end_row: int) -> Iterator[_QueryBlock]:
    """Yields the blocks of the positions ``start_row`` to ``end_row``, none over the end of a span."""
    for start, end in spans:
        for a in range(max(start, start_row), min(end, end_row), BLOCK):
            e = min(a + BLOCK, end, end_row)
            begin, stop = keys_in_range(options, a, e)
            yield _QueryBlock(a, e, max(start, begin), min(end, stop))


def _whole_blocks(spans: list[tuple[int, int]], rows: slice) -> tuple[int, int]:
    """Returns the positions ``rows``, extended by the rest of the blocks that the first and the last one lie in."""
    begin, stop = rows.start, rows.stop
    for start, end in spans:
        if start < rows.start < end:
            begin -= (rows.start - start) % BLOCK
        if start < rows.stop < end:
            stop = min(stop + (start - stop) % BLOCK, end)
    return begin, stop


class _Problem:
    """The operands of a call by position, and what is the same for all of its samples.

    ``here`` are the positions that have queries, ``reach`` those of their blocks, ``keys`` those that a query may see.
    """

    def __init__(self, x: Tensor, options: Options, chunk: QueryChunk | None):
        self.options, self.acc = options, acc_dtype(x)
        self.q, self.k, self.v = operands(x, options, chunk)
        self.spans, self.rotation = documents(options), angles(options, self.acc)
        self.here, self.keys = query_positions(options, chunk), slice(0, options.seq)
        self.reach = self.here.start, self.here.stop
        if chunk is not None:
            self.reach = _whole_blocks(self.spans, self.here) if chunk.queries else self.reach
            blocks = list(_blocks(options, self.spans, *self.reach))
            begin = min((block.first_key for block in blocks), default=0)
            self.keys = slice(begin, max((block.last_key for block in blocks), default=begin))


class _Samples:
    """The q [n G, Q, rows, E], k and v [n G, keys, E] of n samples, q and k rotated: of the positions that have
    queries, and of those that a query may see."""

    def __init__(self, samples: range, problem: _Problem):
        options, self.here, self.keys = problem.options, problem.here, problem.keys
        self.samples, self.options, self.acc, self.rotation = samples, options, problem.acc, None
        self.places = slice(samples.start, samples.stop)
        q, k, v = problem.q[self.places], *(t[self.places, :, :, self.keys] for t in (problem.k, problem.v))
        if problem.rotation is not None:  # [n or 1, 1, 1, S, W / 2]
            self.rotation = tuple(t[self.places] if len(t) > 1 else t for t in problem.rotation)
        self.q = self.rotated(q, self.here).flatten(0, 1)
        self.k = self.rotated(k, self.keys).flatten(0, 2).contiguous()
        self.v = v.flatten(0, 2).contiguous()
        self.Q = q.shape[2]
        self.kt = self.k.to(self.acc).transpose(1, 2)
        self.key_mask = None if options.key_mask is None else options.key_mask[self.places, None]
        self.bias = None
        if options.bias is not None:
            self.bias = options.bias.unflatten(0, q.shape[1:3] if len(options.bias) > 1 else (1, 1))
        self.may_see_nothing = options.key_mask is not None or options.bias is not None

    def rotated(self, x: Tensor, positions: slice, back: bool = False) -> Tensor:
        """Returns x [n, G, Q or 1, positions, E] rotated, or with ``back`` rotated back."""
        if self.rotation is None:
            return x
        cos, sin = (t[..., positions, :] for t in self.rotation)
        return rotate(x, cos, -sin if back else sin, self.options.interleaved)

    def by_sample(self, x: Tensor) -> Tensor:
        """Returns x [n G, ...] as [n, G, ...], a view."""
        return x.unflatten(0, (len(self.samples), -1))

    def columns(self, block: _QueryBlock) -> slice:
        """Returns where the block's keys lie in k and v."""
        return slice(block.first_key - self.keys.start, block.last_key - self.keys.start)

    def queries(self, block: _QueryBlock) -> tuple[slice, slice]:
        """Returns where the block's queries lie in q, and where in the block."""
        start, stop = max(block.start, self.here.start), min(block.end, self.here.stop)
        return slice(start - self.here.start, stop - self.here.start), slice(start - block.start, stop - block.start)

    def rows(self, x: Tensor, block: _QueryBlock) -> Tensor:
        """Returns the block's rows of x [.., Q, rows, E] as [n G, Q rows, E], 0 where there is no query."""
        (queries, inside), count = self.queries(block), block.end - block.start
        x = x[..., queries, :]
        if inside != slice(0, count):
            x = F.pad(x, (0, 0, inside.start, count - inside.stop))
        return x.reshape(-1, self.Q * count, x.shape[-1])

    def by_row(self, x: Tensor, block: _QueryBlock) -> Tensor:
        """Returns x [n G, Q rows, ...] as [n, G, Q, rows, ...], a view."""
        return self.by_sample(x).unflatten(2, (self.Q, block.end - block.start))

    def put(self, x: Tensor, block: _QueryBlock, y: Tensor) -> None:
        """Writes the block's x [n G, Q rows, E] to its queries in y [n, G, Q, rows, E]."""
        queries, inside = self.queries(block)
        y[:, :, :, queries] = self.by_row(x, block)[:, :, :, inside]

    def scores(self, q: Tensor, block: _QueryBlock) -> tuple[Tensor, Tensor | None]:
        """Returns [n G, Q rows, keys], -inf where masked; and where scores are capped the tanh."""
        options, (a, e, lo, hi) = self.options, block
        window, softcap = options.window, options.softcap
        unit = options.scale if softcap is None else options.scale / softcap
        s, tanh = _bmm(q.to(self.acc) * unit, self.kt[:, :, self.columns(block)], options.leaves), None
        if softcap is not None:
            tanh = s.tanh_()
            s = tanh * softcap
        by_row = self.by_row(s, block)
        if self.bias is not None:
            by_row += self.bias[:, :, a:e, lo:hi].to(self.acc)
        if options.causal:
            by_row[..., a - lo :] += torch.full((e - a, e - a), -INF, dtype=s.dtype, device=s.device).triu_(1)
        if window is not None and lo <= e - 1 - window:
            by_row += torch.full((e - a, hi - lo), -INF, dtype=s.dtype, device=s.device).tril_(a - lo - window)
        if window is not None and not options.causal and hi > a + window:
            by_row += torch.full((e - a, hi - lo), -INF, dtype=s.dtype, device=s.device).triu_(a - lo + window)
        if self.key_mask is not None:
            self.by_sample(s).flatten(1, 2).masked_fill_(~self.key_mask[..., lo:hi], -INF)
        return s, tanh

    def keep_mask(self, block: _QueryBlock) -> Tensor:
        """Returns the 0/1 dropout mask [n G, Q rows, keys]."""
        rows = torch.arange(block.start, block.end, device=self.q.device)
        samples = torch.arange(self.samples.start, self.samples.stop, device=self.q.device)
        keys, count = range(block.first_key, block.last_key), len(self.q) // len(self.samples) * self.Q
        mask = keep_mask(self.options, rows, samples, heads=count, keys=keys, dtype=self.acc)
        return mask.view(len(self.q), -1, len(keys))


def _together(options: Options, heads: int) -> list[range]:
    """Returns the samples of a call in ranges that are computed together: by leaves one by one, so that a sample's bits
    do not depend on those beside it."""
    count = 1 if options.leaves else max(1, SCORES // max(heads * min(options.seq, BLOCK) * options.seq, 1))
    return [range(b, min(b + count, options.batch)) for b in range(0, options.batch, count)]


def _output(x: Tensor, shape: tuple[int, ...], rows: int, options: Options) -> Tensor:
    """Returns a tensor of ``shape`` of whose first ``rows`` ``attend`` fills those that lie in documents; the others
    are 0."""
    has_gaps = shape[0] > rows or options.cu_seqlens is not None
    return (x.new_zeros if has_gaps else x.new_empty)(shape)


class Forward:
    """Fills o [M, G Q E] and lse [B, H, S] position by position: ``attend`` to all of :meth:`samples` and every range,
    in any order.  x is qkv, or with a chunk its q, of whose positions alone there are rows then."""

    def __init__(self, x: Tensor, options: Options, chunk: QueryChunk | None = None):
        self.options, self.problem = options, _Problem(x, options, chunk)
        batch, G, Q, n, E = self.problem.q.shape
        self.o = _output(x, (len(x), G * Q * E), n * batch, options)
        self.lse = x.new_full((batch, G * Q, n), INF, dtype=acc_dtype(x))
        self._o = by_head(self.o, batch, n, (G, Q))
        self._lse = self.lse.unflatten(1, (G, Q))[..., None]

    def samples(self) -> Iterator[_Samples]:
        for together in _together(self.options, heads=self.lse.shape[1]):
            yield _Samples(together, self.problem)

    def attend(self, samples: _Samples, start_row: int, end_row: int) -> None:
        """Computes o and lse of the queries at positions ``start_row`` to ``end_row``."""
        for block in _blocks(self.options, self.problem.spans, start_row, end_row):
            s, _ = samples.scores(samples.rows(samples.q, block), block)
            top, probs = s.amax(-1, keepdim=True), torch.softmax(s, -1)
            lse = top - probs.amax(-1, keepdim=True).log()
            if samples.may_see_nothing:
                hidden = top == -INF
                lse.masked_fill_(hidden, INF)
                probs.masked_fill_(hidden, 0)
            if self.options.rng is not None:
                probs *= samples.keep_mask(block).mul_(scale(self.options.p))
            o = _bmm(probs.to(self.o.dtype), samples.v[:, samples.columns(block)], self.options.leaves)
            samples.put(o, block, self._o[samples.places])
            samples.put(lse, block, self._lse[samples.places])


class _Gradients(NamedTuple):
    """Some samples in backward: the gradients of their rotated q and k, and of v, as they are added up."""

    samples: _Samples
    vt: Tensor  # v' [n G, E, keys]
    dq: Tensor  # [n, G, Q, rows, E]
    dk: Tensor  # [n G, keys, E]
    dv: Tensor


class Backward:
    """Fills dqkv [M, G, Q + 2, E]: ``attend`` to all of :meth:`samples` and every range, whose rows of do must be
    there, then ``finish`` all of them.

    Gradients of keys and values are added in the order of the ranges.  With a chunk x is its q, and in dqkv's place
    ``dq`` [m, G, Q, E] and ``dkv`` [M, G, 2, E] are filled, the latter in the dtype of sums.
    """

    def __init__(self, do: Tensor, x: Tensor, o: Tensor, options: Options, chunk: QueryChunk | None = None):
        self.options, self.problem, self.dtype = options, _Problem(x, options, chunk), x.dtype
        batch, G, Q, n, _ = self.problem.q.shape
        self.do, self.o = (by_head(t, batch, n, (G, Q)) for t in (do, o))
        filled = _output(x, x.shape, n * batch, options)
        if chunk is None:
            self.dqkv = filled
        else:
            self.dq, self.dkv = filled, chunk.kv.new_zeros(chunk.kv.shape, dtype=acc_dtype(x))
            chunk = chunk._replace(kv=self.dkv)
        self._dq, self._dk, self._dv = operands(filled, options, chunk)

    def samples(self) -> Iterator[_Gradients]:
        G, Q = self._dq.shape[1:3]
        for together in _together(self.options, heads=G * Q):
            samples = _Samples(together, self.problem)
            zeros = functools.partial(torch.zeros_like, dtype=samples.acc)
            dq = self._dq[samples.places] if samples.rotation is None else samples.by_sample(zeros(samples.q))
            vt = samples.v.to(samples.acc).transpose(1, 2)
            yield _Gradients(samples, vt, dq, dk=zeros(samples.k), dv=zeros(samples.k))

    def attend(self, gradients: _Gradients, start_row: int, end_row: int) -> None:
        """Adds the gradients that come from the queries at positions ``start_row`` to ``end_row``."""
        (samples, vt, dq, dk, dv), options, dtype = gradients, self.options, self.dtype
        for block in _blocks(options, self.problem.spans, start_row, end_row):
            keys = samples.columns(block)
            q, do, o = (samples.rows(t, block) for t in (samples.q, self.do[samples.places], self.o[samples.places]))
            s, tanh = samples.scores(q, block)
            probs = torch.softmax(s, -1)
            if samples.may_see_nothing:
                probs.masked_fill_(s.amax(-1, keepdim=True) == -INF, 0)
            dp = _bmm(do.to(samples.acc), vt[:, :, keys], options.leaves)
            dropped = probs
            if options.rng is not None:
                mask = samples.keep_mask(block).mul_(scale(options.p))
                dp *= mask
                dropped = mask.mul_(probs)
            dv[:, keys] += _bmm(dropped.to(dtype).transpose(1, 2), do, options.leaves)
            ds = dp.sub_((do.to(samples.acc) * o).sum(-1, keepdim=True)).mul_(probs)
            if tanh is not None:
                ds.mul_(tanh.square_().neg_().add_(1))
            ds = ds.to(dtype)
            samples.put(_bmm(ds, samples.k[:, keys], options.leaves).mul_(options.scale), block, dq)
            dk[:, keys] += _bmm(ds.transpose(1, 2), q, options.leaves)

    def finish(self, gradients: _Gradients) -> None:
        samples = gradients.samples
        if samples.rotation is not None:
            self._dq[samples.places] = samples.rotated(gradients.dq, samples.here, back=True)
        dk, dv = (samples.by_sample(t)[:, :, None] for t in (gradients.dk.mul_(self.options.scale), gradients.dv))
        self._dk[samples.places, :, :, samples.keys] = samples.rotated(dk, samples.keys, back=True)
        self._dv[samples.places, :, :, samples.keys] = dv


def fwd_cpu(x: Tensor, options: Options, chunk: QueryChunk | None = None) -> tuple[Tensor, Tensor]:
    forward = Forward(x, options, chunk)
    for samples in forward.samples():
        forward.attend(samples, *forward.problem.reach)
    return forward.o, forward.lse


def _backward(do: Tensor, x: Tensor, o: Tensor, options: Options, chunk: QueryChunk | None) -> Backward:
    backward = Backward(do, x, o, options, chunk=chunk)
    for gradients in backward.samples():
        backward.attend(gradients, *backward.problem.reach)
        backward.finish(gradients)
    return backward


def bwd_cpu(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, options: Options) -> Tensor:
    return _backward(do, qkv, o, options=options, chunk=None).dqkv


def of_queries_bwd_cpu(
    do: Tensor, q: Tensor, chunk: QueryChunk, o: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    backward = _backward(do, q, o, options=options, chunk=chunk)
    return backward.dq, backward.dkv


def decode(q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions) -> Tensor:
    """attention_decode on a CPU: torch's, with a group's query heads as its positions; one with a softcap by the
    reference."""
    key_mask, lengths, window, scale, softcap = options
    if softcap is not None:
        return attention_decode_ref(q, k, v, options)
    if lengths is not None:
        key, end = torch.arange(k.shape[1], device=k.device), lengths[:, None]
        span = key < end if window is None else (key < end) & (key >= end - window)
        key_mask = span if key_mask is None else span & key_mask
    elif window is not None:
        k, v = k[:, -window:], v[:, -window:]
        key_mask = None if key_mask is None else key_mask[:, -window:]
    mask = None if key_mask is None else key_mask[:, None, None]
    o = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    if key_mask is not None:  # torch's is NaN where nothing is seen
        o = o.masked_fill(~key_mask.any(1)[:, None, None, None], 0)
    return o.flatten(1)
