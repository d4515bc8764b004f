"""Attention of a piece of each sequence as opaque ops, by exchanged heads, whose messages travel under attention.

    forward     kv heads are attended in rounds: q, k and v of a round land while the rounds before it are computed, and
                its o leaves under those behind it
    backward    do and dqkv alike

What stays exposed is the arrival of the first round and the departure of the last.  Of S positions causal attention
computes S / 4 flops forward for each byte of bf16 heads that is exchanged, S / 2 where kv heads are few, and the
projections beside it as many as the model is wide, D: attention hides more from S = 4 D on, which is what sequences are
divided for.  A head's bits depend on no other head, so they do not depend on the rounds.

Letters: C ranks with m rows each; G kv heads, each with Q query heads; n rounds of g = G / (C n) kv heads a rank.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ...kernels.attn.op import attention_bwd, attention_fwd
from ...kernels.attn.options import Options, scores
from ...kernels.runtime.op import ATTENTION, Cost, acc_dtype, least, op
from ..flight import Flight


class HeadRounds(NamedTuple):
    """The rounds in which kv heads are exchanged among the ranks of a group."""

    rounds: int
    ranks: int
    group_name: str


class HeadsSaved(NamedTuple):
    """What attention in rounds keeps: whole sequences with the heads of this rank."""

    qkv: Tensor  # [n, C m, g, Q + 2, E]
    o: Tensor  # [n, C m, g Q E]
    lse: Tensor  # [n, B, g Q, S]


def _by_round(x: Tensor, split: HeadRounds) -> Tensor:
    """x [m, C n g, ...], heads in the order of ranks and then of rounds -> [n, C, m, k], what each rank gets."""
    x = x.unflatten(1, (split.ranks, split.rounds, -1))
    return x.permute(2, 1, 0, *range(3, x.dim())).flatten(3)


def _by_head(x: Tensor) -> Tensor:
    """[n, C, m, k], what came from each rank -> [m, C n k]: the adjoint of :func:`_by_round`."""
    return x.permute(2, 1, 0, 3).flatten(1)


def _flights(label: str, x: Tensor, group_name: str) -> tuple[list[Flight], Tensor]:
    """Returns an exchange of each round of x [n, C, m, k], not yet posted, and where the rounds arrive."""
    received = x.new_empty(x.shape)
    cut = [slice(0, x.shape[2])] if x.shape[2] else []
    rounds = zip(x, received, strict=True)
    return [Flight(label, *tiles, group_name, cut=cut, copy_own=True) for tiles in rounds], received


def _of_round(options: Options, index: int, heads: int) -> Options:
    return options._replace(first_head=options.first_head + index * heads)


def attention_of_heads_fwd_ref(
    qkv: Tensor, options: Options, split: HeadRounds
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv [m, G, Q + 2, E] of this rank's piece -> o [m, G Q E], and the tensors of HeadsSaved.

    ``options`` are those of whole sequences, with this rank's first head.
    """
    label, (_, whole, o, lse) = "attention_of_heads forward", _fwd_fake(qkv, options, split)
    arriving, tiles = _flights(f"{label} (qkv)", _by_round(qkv, split), split.group_name)
    leaving, returned = _flights(f"{label} (o)", o.unflatten(1, (split.ranks, -1)), split.group_name)
    for flight in arriving:
        flight.post_all()
    for i, flight in enumerate(arriving):
        o[i], lse[i] = attention_fwd(flight.finish().view_as(whole[i]), _of_round(options, i, lse.shape[2]))
        leaving[i].post_all()
    for flight in leaving:
        flight.finish()
    return _by_head(returned), tiles.view_as(whole), o, lse


def attention_of_heads_bwd_ref(do: Tensor, saved: HeadsSaved, options: Options, split: HeadRounds) -> Tensor:
    """do [m, G Q E] -> dqkv [m, G, Q + 2, E]."""
    label, (qkv, o, lse), (_, _, _, slots, E) = "attention_of_heads backward", saved, saved.qkv.shape
    dqkv = qkv.new_empty(qkv.shape)
    arriving, _ = _flights(f"{label} (do)", _by_round(do.unflatten(1, (-1, E)), split), split.group_name)
    leaving, returned = _flights(f"{label} (dqkv)", dqkv.flatten(2).unflatten(1, (split.ranks, -1)), split.group_name)
    for flight in arriving:
        flight.post_all()
    for i, flight in enumerate(arriving):
        options_i = _of_round(options, i, lse.shape[2])
        dqkv[i] = attention_bwd(flight.finish().flatten(0, 1), qkv[i], o[i], lse[i], options=options_i)
        leaving[i].post_all()
    for flight in leaving:
        flight.finish()
    return _by_head(returned).unflatten(1, (-1, slots, E))


def _fwd_fake(qkv: Tensor, options: Options, split: HeadRounds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (rounds, ranks, _), (m, G, slots, E) = split, qkv.shape
    g, Q = G // (ranks * rounds), slots - 2
    whole, o = qkv.new_empty(rounds, ranks * m, g, slots, E), qkv.new_empty(rounds, ranks * m, g * Q * E)
    lse = qkv.new_empty(rounds, options.batch, g * Q, options.seq, dtype=acc_dtype(qkv))
    return qkv.new_empty(m, G * Q * E), whole, o, lse


def _bwd_fake(do: Tensor, saved: HeadsSaved, options: Options, split: HeadRounds) -> Tensor:
    rounds, rows, g, slots, E = saved.qkv.shape
    return do.new_empty(rows // split.ranks, split.ranks * rounds * g, slots, E)


def _cost(args: tuple[Any, ...], outputs: tuple[Any, ...], *, whole: Tensor, options: Options, products: int) -> Cost:
    """One pass over inputs and outputs, attention's ``products``, and an exchange of qkv and one of o."""
    rounds, _, _, slots, E = whole.shape
    (scored, computed), ranks = scores(whole[0], options), args[-1].ranks
    exchanged = whole.numel() // slots * 2 * (slots - 1) * whole.element_size()
    return least(args, outputs)._replace(
        flops=2 * products * E * rounds * scored, sent=exchanged * (ranks - 1) // ranks, scores=rounds * computed
    )


def _fwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    return _cost(args, outputs, whole=outputs[1], options=args[1], products=2)


def _bwd_cost(args: tuple[Any, ...], outputs: tuple[Any, ...]) -> Cost:
    return _cost(args, outputs, whole=args[1].qkv, options=args[2], products=5)


attention_of_heads_fwd = op(attention_of_heads_fwd_ref, kind=ATTENTION, fake=_fwd_fake, cost=_fwd_cost)
attention_of_heads_bwd = op(attention_of_heads_bwd_ref, kind=ATTENTION, fake=_bwd_fake, cost=_bwd_cost)
