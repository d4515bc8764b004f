"""Attention on the fused qkv, and of a chunk of queries over all keys: causal, key-padding, window and document masks,
grouped heads, rotary positions, soft-capped scores, an additive bias, and dropout in global coordinates.

    q, k = rotate(q), rotate(k)     z = scale q k'     S = softcap tanh(z / softcap) + bias
    P = softmax(S)                  o = dropout(P) v
    dP = dropout'(do v')            dS = P (dP - delta), delta = rowsum(do o)    dz = dS (1 - tanh(z / softcap)^2)
    dq = rotate'(scale dz k)        dk = rotate'(scale dz' q)                    dv = dropout(P)' do

Dao 2023 (arXiv:2307.08691) for the recomputing backward, Su et al. 2021 (arXiv:2104.09864) for the rotation.  Letters:
B batch, S positions, G kv heads, Q query heads per kv head, H = G Q, E width, W <= E the columns that are rotated.  qkv
[M, G, Q + 2, E] with row s B + b (q heads, k, v of each group), M >= S B: rows beyond are padding, o and dqkv are zero
there.  o [M, G Q E], lse [B, H, S].

Scores and softmax are fp32 (fp64 for fp64), o and dqkv have qkv's dtype.  q and k are rotated in fp32 and rounded once,
to qkv's dtype, so that a cache of rotated keys holds what attention multiplies.  A row that sees no key gives 0, and
its lse is +inf, so that exp(S - lse) is 0 in backward too.  Query i sees key j where j <= i (causal), |i - j| < window
and both lie in one interval of cu_seqlens.  The mask of a probability is counted by (query position, site <<
16 | global query head, key position, sample), whatever the documents; nothing of it is saved.

A chunk of queries lies at n contiguous positions of every sample: q [m, G, Q, E] with row (s - first) B + b, and kv [M,
G, 2, E], k and v of all positions, not rotated.  It gives o [m, G Q E] and lse [B, H, n], and in backward dq in q's
dtype and dkv [M, G, 2, E] in fp32 (fp64 for fp64): its own part, rotated back and not rounded, which callers add up
over chunks.  o, lse and dq have the bits of a call over all positions, unless that is torch's own, wherever the chunk
begins and ends: its tiles, or on a CPU its blocks, are those of that call, with nothing in the rows of others.  dk and
dv are equal to rounding.
"""

from typing import Any

from torch import Tensor

from ..runtime.errors import check_floating
from ..runtime.function import Function, once_differentiable
from ..runtime.op import ATTENTION, acc_dtype, autocast, op
from ..runtime.philox import active_rng
from ..runtime.tiles import check_tiles_device
from . import torch_cpu
from .cpu import bwd_cpu, fwd_cpu, of_queries_bwd_cpu
from .cpu import decode as decode_cpu
from .decode import decode_cost, decode_launch
from .options import TENSORS, DecodeOptions, Options, QueryChunk, check_chunk, check_options, default_seq
from .reference import (
    attention_bwd_ref,
    attention_decode_ref,
    attention_fwd_ref,
    attention_of_queries_bwd_ref,
    attention_of_queries_fwd_ref,
)
from .tiles import fwd_tiles
from .triton_backward import bwd_cost, bwd_launch, of_queries_bwd_cost, of_queries_bwd_launch
from .triton_forward import fwd_cost, fwd_launch, of_queries_fwd_cost, of_queries_fwd_launch

# ---- ops ----


def _fwd_fake(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    M, G, slots, E = qkv.shape
    lse = qkv.new_empty(options.batch, G * (slots - 2), options.seq, dtype=acc_dtype(qkv))
    return qkv.new_empty(M, G * (slots - 2) * E), lse


def _bwd_fake(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, options: Options) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _decode_fake(q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1:].numel())


def _of_queries_fwd_fake(q: Tensor, chunk: QueryChunk, options: Options) -> tuple[Tensor, Tensor]:
    m, G, Q, E = q.shape
    return q.new_empty(m, G * Q * E), q.new_empty(options.batch, G * Q, chunk.queries, dtype=acc_dtype(q))


def _of_queries_bwd_fake(
    do: Tensor, q: Tensor, chunk: QueryChunk, o: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), chunk.kv.new_empty(chunk.kv.shape, dtype=acc_dtype(q))


def _fwd_cpu(qkv: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    if torch_cpu.is_plain(qkv, options):
        return torch_cpu.flash_fwd(qkv, options)
    return fwd_tiles(qkv, options) if options.tile else fwd_cpu(qkv, options)


def _bwd_cpu(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, options: Options) -> Tensor:
    return (torch_cpu.flash_bwd if torch_cpu.is_plain(qkv, options, backward=True) else bwd_cpu)(
        do, qkv, o, lse, options
    )


def _of_queries_fwd_cpu(q: Tensor, chunk: QueryChunk, options: Options) -> tuple[Tensor, Tensor]:
    return (fwd_tiles if options.tile else fwd_cpu)(q, options, chunk)


def _check_fwd(qkv: Tensor, options: Options) -> None:
    check_options(qkv.shape, options)
    if options.tile:
        check_tiles_device("attention", qkv)


def _check_of_queries(q: Tensor, chunk: QueryChunk, options: Options) -> None:
    check_chunk(q, chunk, options)
    if options.tile:
        check_tiles_device("attention_of_queries", q)


attention_fwd = op(
    attention_fwd_ref, kind=ATTENTION, launch=fwd_launch, cpu=_fwd_cpu, fake=_fwd_fake, check=_check_fwd, replay=True,
    cost=fwd_cost,
)  # fmt: skip
attention_bwd = op(
    attention_bwd_ref, kind=ATTENTION, launch=bwd_launch, cpu=_bwd_cpu, fake=_bwd_fake, replay=True, cost=bwd_cost
)
attention_of_queries_fwd = op(
    attention_of_queries_fwd_ref, kind=ATTENTION, launch=of_queries_fwd_launch, cpu=_of_queries_fwd_cpu,
    fake=_of_queries_fwd_fake, check=_check_of_queries, replay=True, cost=of_queries_fwd_cost,
)  # fmt: skip
attention_of_queries_bwd = op(
    attention_of_queries_bwd_ref, kind=ATTENTION, launch=of_queries_bwd_launch, cpu=of_queries_bwd_cpu,
    fake=_of_queries_bwd_fake, replay=True, cost=of_queries_bwd_cost,
)  # fmt: skip
attention_decode = op(
    attention_decode_ref, kind=ATTENTION, launch=decode_launch, cpu=decode_cpu, fake=_decode_fake, cost=decode_cost
)


# ---- autograd ----


class _Attention(Function):
    """Takes the options whole: none of their tensors is differentiated."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, options: Options) -> Tensor:
        o, lse = attention_fwd(qkv, options)
        ctx.save_for_backward(qkv, o, lse, *options[:TENSORS])
        ctx.numbers = options[TENSORS:]
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # qkv, o, lse, then the options' tensors
        return attention_bwd(do.contiguous(), *saved[:3], Options(*saved[3:], *ctx.numbers)), None


class _AttentionOfQueries(Function):
    """dkv is rounded to kv's dtype; who adds up those of several chunks calls attention_of_queries_bwd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, start: int, queries: int, options: Options) -> Tensor:
        o, lse = attention_of_queries_fwd(q, QueryChunk(kv, start, queries), options)
        ctx.save_for_backward(q, kv, o, lse, *options[:TENSORS])
        ctx.numbers = start, queries, options[TENSORS:]
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        (q, kv, o, lse, *tensors), (start, queries, constants) = ctx.saved_tensors, ctx.numbers
        chunk, options = QueryChunk(kv, start, queries), Options(*tensors, *constants)
        dq, dkv = attention_of_queries_bwd(do.contiguous(), q, chunk, o, lse=lse, options=options)
        return dq, dkv.to(kv.dtype), None, None, None


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
    """Computes softmax(scale q k') v for every head, with dropout on the probabilities.

    qkv [M, G, Q + 2, E]: row s * batch + b, per kv head its Q query heads, k and v; ``seq`` positions (default M /
    batch; rows beyond seq * batch are padding).  ``scale`` > 0 defaults to E ** -0.5.  Returns o [M, G Q E] in qkv's
    dtype (under autocast: in its dtype).

    Masks: with ``causal`` a query sees itself and what came before; with ``window`` keys at a distance below it, that
    is the last ``window``, itself counted, and without ``causal`` as many on the other side.  ``key_mask`` bool [batch,
    seq] is True where a key may be seen.  ``cu_seqlens`` int32 [N + 1], rising, are the ends of documents packed in one
    row (batch 1) that do not see one another; rows outside all of them give 0.  No document may be longer than
    ``max_seqlen``.

    Scores: ``softcap`` > 0 bounds them by tanh; then ``bias`` [H or 1, seq, seq], floating, is added (it has no
    gradient).

    Rotary positions: ``cos`` and ``sin`` [P, W / 2], floating, W <= E, rotate the first W columns of q and k: column i
    with i + W / 2, or if ``interleaved`` 2i with 2i + 1.  Row r takes the table's row positions[r] (int64 [seq *
    batch], below P), without ``positions`` its s.

    Dropout: with probability ``p``, drawn from ``rng`` at ``site``; ``first_head`` is the global number of the first
    query head here.

    Raises ValueError for shapes, dtypes and numbers that break these rules; on a GPU also for E > 256 (but in fp64), on
    a CPU for cu_seqlens that do not rise, documents longer than max_seqlen and positions beyond P.
    """
    if qkv.dim() != 4 or qkv.shape[2] < 3 or qkv.shape[3] < 1:
        raise ValueError(f"attention: qkv must be [M, G, Q + 2, E], got {tuple(qkv.shape)}")
    check_floating("attention", "qkv", qkv)
    options = Options(
        key_mask=key_mask, cu_seqlens=cu_seqlens, bias=bias, cos=cos, sin=sin, positions=positions,
        rng=active_rng("attention", p, rng, site), batch=batch, max_seqlen=max_seqlen, causal=causal,
        seq=default_seq(qkv.shape[0], batch) if seq is None else seq,
        window=window, scale=qkv.shape[3] ** -0.5 if scale is None else scale,
        softcap=softcap, interleaved=interleaved, p=p, site=site, first_head=first_head,
    )  # fmt: skip
    return attend(qkv, options)


def attend(qkv: Tensor, options: Options) -> Tensor:
    """Computes :func:`attention` of its arguments as one record."""
    (qkv,) = autocast(qkv)
    return _Attention.apply(qkv.contiguous(), options)


def attend_queries(q: Tensor, chunk: QueryChunk, options: Options) -> Tensor:
    """Computes :func:`attention` of the queries at some positions alone, over the keys of all: what a rank does that
    has a chunk of every sequence, and has gathered all keys and values.

    q [m, G, Q, E] holds the ``chunk.queries`` positions of every sample (perhaps 0) from ``chunk.start`` on: row (s -
    start) * batch + b is position s of sample b; rows beyond are padding.  ``chunk.kv`` [M, G, 2, E], of q's dtype,
    holds k and v of all positions in rows s * batch + b; neither is rotated.  ``options``, of all positions too, are
    :func:`attention`'s arguments.  Returns o [m, G Q E] in q's dtype, 0 in rows of padding.

    Bits: o and q's gradient are those of the matching rows of :func:`attention`, wherever chunks begin and end, of
    tpfuse's own implementations (plain calls of :func:`attention` may take torch's); so are masks.  kv's gradient is
    this call's part, in fp32 until it is rounded to kv's dtype; parts add up to that of all queries.

    Raises ValueError where :func:`attention` would, for q and kv that are not alike, and for positions beyond seq.
    """
    q, kv = autocast(q, chunk.kv)
    return _AttentionOfQueries.apply(q, kv, chunk.start, chunk.queries, options)
