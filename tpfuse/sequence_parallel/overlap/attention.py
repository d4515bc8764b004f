"""Attention between its two projections as opaque ops, whose messages travel under attention too.

    forward     n lands under the qkv GEMM; peers' queries pass attention and the out-projection first, and leave while
                this rank's own do
    backward    dp lands under the out-projection's dgrad and attention's backward, and n behind it; dn leaves under
                both wgrads

On a CPU attention goes tile by tile if a tile holds whole positions (m divisible by the batch), a peer's tile as its
rows land: the gradients of k and v are then added in that order, own rows first, and k and v of all samples are held in
attention's layout.  Where attention is torch's own (attn/torch_cpu.py), and on a GPU, whose kernel needs to be filled,
it takes all rows at once.  Everything else is bitwise equal to the three plain ops if tiles agree, see
:mod:`..overlap`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.attn import torch_cpu
from ...kernels.attn.cpu import BLOCK, Backward, Forward
from ...kernels.attn.op import attention_bwd, attention_fwd
from ...kernels.attn.options import Options, scores
from ...kernels.gemm.op import multiply_into
from ...kernels.runtime import matmul
from ...kernels.runtime.op import GEMM, Cost, acc_dtype, new_vector, op
from ..flight import Flight, pieces
from ..records import LinearWeights, Projections, Run, WeightGrad, run
from . import steps


class AttentionBackward(NamedTuple):
    """The tensors of backward: parts' gradient, n, attention's tensors; and the dtype of db, None without it."""

    dp: Tensor  # [R, m, D]
    n: Tensor  # [R, m, D]
    qkv: Tensor  # [M, G, Q + 2, E]
    o: Tensor  # [M, K]
    lse: Tensor  # [B, H, S]
    bias: torch.dtype | None


class Tiles:
    """Attention of the tiles' positions one after another, in whole blocks; ``work`` is Forward or Backward of
    kernels.attn.cpu."""

    def __init__(self, work: Any, m: int):
        self.work, self.m, self.batch, self.seq = work, m, work.options.batch, work.options.seq
        self.samples = list(work.samples())
        self._next: dict[int, int] = {}

    def attend(self, tile: int, row: int, ahead: bool) -> None:
        """Attends ``tile`` up to its ``row``: with ``ahead`` at least that far, else (later rows have not landed) at
        most."""
        start, end = (min(t * self.m // self.batch, self.seq) for t in (tile, tile + 1))
        position = -(-row // self.batch) if ahead else row // self.batch
        blocks = -(-position // BLOCK) if ahead else position // BLOCK
        begin, stop = self._next.get(tile, start), end if row == self.m else min(start + blocks * BLOCK, end)
        if stop > begin:
            for samples in self.samples:
                self.work.attend(samples, begin, stop)
            self._next[tile] = stop


def _by_tiles(qkv: Tensor, m: int, options: Options, *, backward: bool = False) -> bool:
    return qkv.is_cpu and m % options.batch == 0 and not torch_cpu.is_plain(qkv, options, backward=backward)


def gather_attention_exchange_fwd_ref(
    n: Tensor, weights: Projections, options: Options, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """n [R, m, D] -> parts [R, m, D], qkv [M, G, Q + 2, E], o [M, K], lse [B, H, S]."""
    label, (R, m, D) = "gather_attention_exchange forward", n.shape
    linear, w_out = LinearWeights(weights.w, weights.b, "none"), weights.w_out
    qkv, _ = steps.gather_and_multiply(f"{label} (n)", n, linear, group_name)
    qkv = qkv.unflatten(1, (-1, weights.heads_per_group, weights.head_width))
    if not _by_tiles(qkv, m, options):
        o, lse = attention_fwd(qkv, options)
        leaving = steps.outgoing(f"{label} (parts)", R * m, w_out, R, group_name=group_name)
        return steps.multiply_and_send(leaving, o, w_out).finish(), qkv, o, lse
    work = Forward(qkv, options)
    tiles, rows_of_o = Tiles(work, m), work.o.view(R, m, -1)
    flight = Flight(f"{label} (parts)", n.new_empty(R - 1, m, D), n.new_empty(n.shape), group_name, cut=pieces(m))
    for rows in flight.cut:
        for to in flight.after:
            tiles.attend(to, rows.stop, ahead=True)
            multiply_into(rows_of_o[to, rows], w_out, None, flight.outgoing(to, rows))
            flight.post(to, rows)
    tiles.attend(flight.rank, m, ahead=True)
    multiply_into(rows_of_o[flight.rank], w_out, None, flight.received[flight.rank])
    return flight.finish(), qkv, work.o, work.lse


def gather_attention_exchange_bwd_ref(
    inputs: AttentionBackward, weights: Projections, options: Options, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dn [R, m, D] unsummed, dw, db (empty unless asked for), dw_out."""
    dn, dw, db, dw_out = gather_attention_exchange_bwd_by(run, inputs, weights, options, group_name=group_name)
    return dn, steps.present(dw), steps.present(db, inputs.n), steps.present(dw_out)


def gather_attention_exchange_bwd_by(
    run: Run, inputs: AttentionBackward, weights: Projections, options: Options, group_name: str
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Computes ``gather_attention_exchange_bwd``; the gradients of the weights are handed to ``run``."""
    dp, n, qkv, o, lse, bias = inputs
    w, w_out = weights.w, weights.w_out
    label, (R, m, _) = "gather_attention_exchange backward", n.shape
    dy, do = dp.new_empty(dp.shape), dp.new_empty(R, m, w_out.shape[1])
    flight = Flight(f"{label} (dp)", dp, dy, group_name, cut=pieces(m), copy_own=True)
    rows_of_n = steps.gather_in_background(f"{label} (n)", n, group_name)
    flight.post_all()
    rows_of_n.post_all()
    by_tiles = _by_tiles(qkv, m, options, backward=True)
    work = Backward(do.flatten(0, 1), qkv, o, options) if by_tiles else None
    tiles = None if work is None else Tiles(work, m)
    for dy_rows, tile, rows in flight.arriving(dy[flight.rank]):
        matmul.mm(dy_rows, w_out, place=do[tile, rows])
        if tiles is not None:
            tiles.attend(tile, rows.stop, ahead=False)
    dy = flight.finish().flatten(0, 1)
    if work is None or tiles is None:
        dqkv = attention_bwd(do.flatten(0, 1), qkv, o, lse, options=options)
    else:
        for samples in tiles.samples:
            work.finish(samples)
        dqkv = work.dqkv
    dqkv = dqkv.flatten(1)
    leaving = steps.multiply_and_send(
        steps.outgoing(f"{label} (dn)", R * m, w.t(), R, group_name=group_name), dqkv, w.t()
    )
    dw_out, _ = run("out_weight", WeightGrad(dy, o, w_out.dtype, None))
    dw, db = run("weight", WeightGrad(dqkv, rows_of_n.finish().flatten(0, 1), w.dtype, bias))
    return leaving.finish(), dw, db, dw_out


def _fwd_fake(
    n: Tensor, weights: Projections, options: Options, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots, E = weights.heads_per_group, weights.head_width
    M, K = steps.row_count(n), weights.w_out.shape[1]
    qkv = n.new_empty(M, len(weights.w) // (slots * E), slots, E)
    lse = n.new_empty(options.batch, K // E, options.seq, dtype=acc_dtype(n))
    return n.new_empty(n.shape), qkv, n.new_empty(M, K), lse


def _bwd_fake(
    inputs: AttentionBackward, weights: Projections, options: Options, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, w, w_out = inputs.n, weights.w, weights.w_out
    return n.new_empty(n.shape), w.new_empty(w.shape), new_vector(n, len(w), inputs.bias), w_out.new_empty(w_out.shape)


def _fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """The GEMMs and attention's two products, 4 E flops a score."""
    (n, weights, options, _), (_, qkv, _, _) = args, outputs
    scored, computed = scores(qkv, options)
    cost = steps.message_cost(args, outputs, tiles=n, messages=2, products=_products(qkv, weights))
    return cost._replace(flops=cost.flops + 4 * qkv.shape[-1] * scored, scores=computed)


def _bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    """The GEMMs twice, and attention's five products, 10 E flops a score."""
    (_, n, qkv, *_), weights, options, _ = args
    scored, computed = scores(qkv, options)
    cost = steps.message_cost(args, outputs, tiles=n, messages=3, products=2 * _products(qkv, weights))
    return cost._replace(flops=cost.flops + 10 * qkv.shape[-1] * scored, scores=computed)


def _products(qkv: Tensor, weights: Projections) -> int:
    """The multiplications of both projections, once."""
    return len(qkv) * (weights.w.numel() + weights.w_out.numel())


gather_attention_exchange_fwd = op(gather_attention_exchange_fwd_ref, kind=GEMM, fake=_fwd_fake, cost=_fwd_cost)
gather_attention_exchange_bwd = op(gather_attention_exchange_bwd_ref, kind=GEMM, fake=_bwd_fake, cost=_bwd_cost)
