"""Attention between its two projections: with nothing between them but rotary positions one op, whose messages travel under attention too.

    forward     n lands under the qkv GEMM; peers' queries pass attention and the out-projection first, and leave while this rank's own do
    backward    dp lands under the out-projection's dgrad and attention's backward, and n behind it; dn leaves under both wgrads

On a CPU attention goes tile by tile where a tile holds whole positions (m divisible by the batch), a peer's as its rows land: the gradients
of k and v are then added in that order, own rows first, and k and v of all samples are held as attention multiplies them.  Elsewhere
attention takes all rows at once: a GPU's kernel needs them to be filled.  All else is bitwise what the three ops of ``plain`` give, where
tiles agree as said in ``overlap``.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels._attention import TENSORS, Options, scores
from ..kernels._attention_cpu import BLOCK, Backward, Forward
from ..kernels._op import Cost, acc_dtype, autocast, check, least, op
from ..kernels.attention import attention, attention_bwd, attention_fwd, checked_options
from ..kernels.linear import check_linear, column_sum, linear_dgrad, linear_wgrad
from ..kernels.norm import Remake
from ..parallel import TensorParallel
from ._choice import pairwise
from ._flight import Flight, pieces
from .overlap import _empty_bias, _enter, _gemm, _leave, _leaving, _regather
from .plain import _expanded, _GatherLinear, _LinearExchange, _restored, _saved, enter, leave


class _Tiles:
    """Attention of the tiles' positions one after another, in whole blocks; ``work`` is Forward or Backward of kernels/_attention_cpu."""

    def __init__(self, work: Forward | Backward, m: int):
        self.work, self.m, self.batch, self.seq = work, m, work.options.batch, work.options.seq
        self.samples = [work.sample(b) for b in range(self.batch)]
        self._next: dict[int, int] = {}

    def attend(self, tile: int, row: int, ahead: bool) -> None:
        """Goes on in ``tile`` to its ``row``: with ``ahead`` at least as far, without (what lies beyond has not landed) at most."""
        start, end = (min(t * self.m // self.batch, self.seq) for t in (tile, tile + 1))
        position = -(-row // self.batch) if ahead else row // self.batch
        blocks = -(-position // BLOCK) if ahead else position // BLOCK
        first, last = self._next.get(tile, start), end if row == self.m else min(start + blocks * BLOCK, end)
        if last > first:
            for sample in self.samples:
                self.work.attend(sample, first, last)
            self._next[tile] = last


def _by_tiles(x: Tensor, m: int, batch: int) -> bool:
    return x.is_cpu and m % batch == 0


def gather_attention_exchange_fwd_ref(
    n: Tensor, w: Tensor, b: Tensor | None, w_out: Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, rng: Tensor | None, batch: int, seq: int, max_seqlen: int | None, causal: bool, window: int | None,
    scale: float, softcap: float | None, interleaved: bool, p: float, site: int, first_head: int,
    slots: int, head_width: int, group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """n [R, m, D], w [N, D], w_out [D, K] -> parts [R, m, D], qkv [M, G, Q + 2, E], o [M, K], lse [B, H, S]; slots = Q + 2."""
    options = Options(
        key_mask, cu_seqlens, bias, cos, sin, positions, rng, batch, seq, max_seqlen, causal, window, scale, softcap, interleaved, p, site,
        first_head,
    )  # fmt: skip
    what, (R, m, D) = "gather_attention_exchange forward", n.shape
    qkv = _enter(f"{what} (n)", n, w, b, "none", group_name)[0].view(R * m, -1, slots, head_width)
    if not _by_tiles(qkv, m, batch):
        o, lse = attention_fwd(qkv, *options)
        return _leave(_leaving(f"{what} (parts)", R * m, w_out, R, group_name), o, w_out).finish(), qkv, o, lse
    work = Forward(qkv, options)
    tiles, rows_of_o = _Tiles(work, m), work.o.view(R, m, -1)
    flight = Flight(f"{what} (parts)", n.new_empty(R - 1, m, D), n.new_empty(n.shape), group_name, pieces(m))
    for rows in flight.cut:
        for to in flight.after:
            tiles.attend(to, rows.stop, ahead=True)
            _gemm(rows_of_o[to, rows], w_out, None, flight.outgoing(to, rows))
            flight.post(to, rows)
    tiles.attend(flight.rank, m, ahead=True)
    _gemm(rows_of_o[flight.rank], w_out, None, flight.into[flight.rank])
    return flight.finish(), qkv, work.o, work.lse


def gather_attention_exchange_bwd_ref(
    dp: Tensor, n: Tensor, w: Tensor, w_out: Tensor, qkv: Tensor, o: Tensor, lse: Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, rng: Tensor | None, batch: int, seq: int, max_seqlen: int | None, causal: bool, window: int | None,
    scale: float, softcap: float | None, interleaved: bool, p: float, site: int, first_head: int,
    has_bias: bool, group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dn [R, m, D] unsummed, dw, db fp32 (empty without a bias), dw_out."""
    options = Options(
        key_mask, cu_seqlens, bias, cos, sin, positions, rng, batch, seq, max_seqlen, causal, window, scale, softcap, interleaved, p, site,
        first_head,
    )  # fmt: skip
    what, (R, m, _) = "gather_attention_exchange backward", n.shape
    dy, do = dp.new_empty(dp.shape), dp.new_empty(R, m, w_out.shape[1])
    flight = Flight(f"{what} (dp)", dp, dy, group_name, pieces(m), own=True)
    rows_of_n = _regather(f"{what} (n)", n, group_name)
    flight.post_all()
    rows_of_n.post_all()
    work = Backward(do.flatten(0, 1), qkv, o, lse, options) if _by_tiles(qkv, m, batch) else None
    tiles = None if work is None else _Tiles(work, m)

    def multiply(dy: Tensor, tile: int, rows: slice) -> None:
        torch.mm(dy, w_out, out=do[tile, rows])
        if tiles is not None:
            tiles.attend(tile, rows.stop, ahead=False)

    multiply(dy[flight.rank], flight.rank, slice(0, m))
    for rows in flight.cut:
        for source in flight.before:
            multiply(flight.arrived(source, rows), source, rows)
    dy = flight.finish().flatten(0, 1)
    if work is None:
        dqkv = attention_bwd(do.flatten(0, 1), qkv, o, lse, *options)
    else:
        for sample in tiles.samples:
            work.finish(sample)
        dqkv = work.dqkv
    dqkv = dqkv.flatten(1)
    leaving = _leave(_leaving(f"{what} (dn)", R * m, w.t(), R, group_name), dqkv, w.t())
    dw_out, _ = linear_wgrad(dy, o, w_out.dtype, False)
    dw, db = linear_wgrad(dqkv, rows_of_n.finish().flatten(0, 1), w.dtype, has_bias)
    return leaving.finish(), dw, db, dw_out


def _fwd_fake(n, w, b, w_out, *args):
    options, (slots, E, _) = Options(*args[:-3]), args[-3:]
    M, H = n.shape[0] * n.shape[1], w_out.shape[1] // E
    lse = n.new_empty(options.batch, H, options.seq, dtype=acc_dtype(n))
    return n.new_empty(n.shape), n.new_empty(M, len(w) // (slots * E), slots, E), n.new_empty(M, w_out.shape[1]), lse


def _bwd_fake(dp, n, w, w_out, qkv, o, lse, *args):
    return n.new_empty(n.shape), w.new_empty(w.shape), _empty_bias(n, len(w), args[-2]), w_out.new_empty(w_out.shape)


def _cost(args: tuple, outputs: tuple, n: Tensor, qkv: Tensor, weights: int, options: Options, times: int, crossings: int) -> Cost:
    """GEMMs ``times`` over, attention's two products once forward and, made again, 5 / 2 times backward; ``crossings`` of n's size."""
    seen, made = scores(qkv, options)
    flops = times * 2 * len(qkv) * weights + (4 if times == 1 else 10) * qkv.shape[-1] * seen
    sent = crossings * (n.shape[0] - 1) * n[0].numel() * n.element_size()
    return least(args, outputs)._replace(flops=flops, sent=sent, scores=made)


def _fwd_cost(args: tuple, outputs: tuple) -> Cost:
    n, w, _, w_out, *rest = args
    return _cost(args, outputs, n, outputs[1], w.numel() + w_out.numel(), Options(*rest[:-3]), 1, 2)


def _bwd_cost(args: tuple, outputs: tuple) -> Cost:
    _, n, w, w_out, qkv, _, _, *rest = args
    return _cost(args, outputs, n, qkv, w.numel() + w_out.numel(), Options(*rest[:-2]), 2, 3)


gather_attention_exchange_fwd = op(gather_attention_exchange_fwd_ref, fake=_fwd_fake, cost=_fwd_cost)
gather_attention_exchange_bwd = op(gather_attention_exchange_bwd_ref, fake=_bwd_fake, cost=_bwd_cost)


# ---- autograd ----


class _GatherAttentionExchange(torch.autograd.Function):
    """The overlapped form alone: the plain one is three ops."""

    @staticmethod
    def forward(ctx, n, w, b, w_out, tp, remake, slots, head_width, *options):
        parts, qkv, o, lse = gather_attention_exchange_fwd(n, w, b, w_out, *options, slots, head_width, tp.group_name)
        ctx.save_for_backward(w, w_out, qkv, o, lse, *options[:TENSORS], *_saved(n, remake))
        ctx.args = tp, None if remake is None else remake[5:], b is not None, options[TENSORS:]
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx, dp):
        w, w_out, qkv, o, lse, *saved = ctx.saved_tensors
        options, saved = saved[:TENSORS], tuple(saved[TENSORS:])
        tp, constants, has_bias, numbers = ctx.args
        options = *options, *numbers
        _, wants, wants_bias, wants_out = ctx.needs_input_grad[:4]
        dw = db = dw_out = None
        if wants and wants_out:
            n = _restored(saved, constants, tp)
            dn, dw, db, dw_out = gather_attention_exchange_bwd(dp, n, w, w_out, qkv, o, lse, *options, has_bias, tp.group_name)
        else:  # without wgrads there is little to hide behind
            dy = enter(dp, tp)
            dqkv = attention_bwd(linear_dgrad(dy, w_out), qkv, o, lse, *options).flatten(1)
            dn = leave(linear_dgrad(dqkv, w), tp)
            if wants_out:
                dw_out, _ = linear_wgrad(dy, o, w_out.dtype, False)
            if wants:
                dw, db = linear_wgrad(dqkv, enter(_restored(saved, constants, tp), tp), w.dtype, has_bias)
            elif wants_bias:
                db = column_sum(dqkv)
        return dn, dw, db if has_bias else None, dw_out, *[None] * (4 + len(Options._fields))


# ---- public ----


def gather_attention_exchange(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    out_weight: Tensor,
    *,
    heads_a_group: int,
    head_width: int,
    tp: TensorParallel,
    remake: Remake | None = None,
    batch: int,
    causal: bool,
    **options,
) -> Tensor:
    """gather_linear, attention and linear_exchange: as one op where their messages overlap.

    x as in gather_linear, qkv_weight [G (Q + 2) E, D] and its bias with Q + 2 = ``heads_a_group`` and E = ``head_width``, out_weight
    [D, G Q E], G this rank's -> parts [R, m, D].  ``batch``, ``causal`` and ``options`` are those of kernels.attention.  ValueError for
    shapes or dtypes that do not fit.
    """
    name, K = "gather_attention_exchange", heads_a_group * head_width
    check_linear(name, x, qkv_weight, qkv_bias, "none")
    check(heads_a_group > 2 and len(qkv_weight) % K == 0, f"{name}: qkv_weight must have a multiple of {K} rows, got {len(qkv_weight)}")
    shape = qkv_weight.shape[1], len(qkv_weight) // heads_a_group * (heads_a_group - 2)
    check(out_weight.shape == shape, f"{name}: out_weight must be {shape}, got {tuple(out_weight.shape)}")
    x, qkv_weight, qkv_bias, out_weight = autocast(x, qkv_weight, qkv_bias, out_weight)
    x, columns = _expanded(name, x, tp), len(qkv_weight) + out_weight.shape[1]
    if not tp.sequence_parallel or not pairwise(name, x, qkv_weight, tp, columns):
        overlapped = not tp.sequence_parallel and pairwise("gather_linear", x, qkv_weight, tp)
        qkv = _GatherLinear.apply(x, qkv_weight, qkv_bias, "none", tp, remake, overlapped)
        o = attention(qkv.view(len(qkv), -1, heads_a_group, head_width), batch=batch, causal=causal, **options)
        return _LinearExchange.apply(o, out_weight, tp, False)
    heads = x.shape[0] * x.shape[1], len(qkv_weight) // K, heads_a_group, head_width
    options = checked_options(heads, Options(batch=batch, causal=causal, **dict(seq=None, scale=None) | options))
    return _GatherAttentionExchange.apply(x, qkv_weight, qkv_bias, out_weight, tp, remake, heads_a_group, head_width, *options)
