"""Attention over sequences of which each of C context-parallel ranks holds a piece, in two kinds.

    "heads"    qkv  [m, G, Q + 2, E]    this rank's piece, all heads that its tensor-parallel rank has
                    --exchange-->  [C m, G/C, Q + 2, E]    whole sequences, 1/C of the heads
               o    [C m, G/C Q E]  --exchange-->  [m, G Q E]

    "keys"     kv   [m, G, 2, E]    --all-gather-->  [C m, G, 2, E], in backward once more
               o    of this rank's queries over all keys;  dkv [C m, G, 2, E] in fp32  --exchange, sum-->  [m, G, 2, E]

Jacobs et al. 2023 (arXiv:2309.14509) for the first; the second is the all-gather of Llama 3 (arXiv:2407.21783, section
3.3.2).  Of "heads" pieces are contiguous.  Between its exchanges stands the same attention as on one rank: causal work
is balanced, and a head's bits do not depend on C.  Heads that wait for none of the others may travel while these are
attended (:mod:`.overlap.heads`).  Where C does not divide G, each group of query heads is cut in
``copies``, and k and v are sent with each; their gradients are then summed.  Of "keys" a piece is the chunks r and 2 C
- 1 - r of 2 C, which have as many pairs of a query and an earlier key on every rank.  o and dq have the bits of one
rank.  dk and dv have the same bits at every C that divides 8, 1 too where "keys" are asked of one rank: what the
queries of a chunk i and a chunk 15 - i of 16 leave in them is a leaf of one tree, whose top is of the ranks.

Elements that a rank sends for a row, forward and backward, dk and dv counted twice as they are fp32:

    "heads"    2 (2 H + 2 G copies) E (C - 1) / C          "keys"    8 G E (C - 1)
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..collectives import all_gather, all_to_all, gather
from ..kernels.attn.op import attend, attention_of_queries_bwd, attention_of_queries_fwd
from ..kernels.attn.options import TENSORS, Options, QueryChunk
from ..kernels.runtime.function import Function, once_differentiable
from ..kernels.runtime.leaves import TreeSum, tree
from ..kernels.runtime.op import autocast
from ..kernels.runtime.philox import global_rows
from ..parallel import TensorParallel, pairs_of
from .choice import rounds_of_heads
from .crossings import exchange
from .overlap.heads import HeadRounds, HeadsSaved, attention_of_heads_bwd, attention_of_heads_fwd


class HeadSplit(NamedTuple):
    """``groups`` of kv heads of one tensor-parallel rank, each with ``heads`` query heads, over ``ranks``."""

    groups: int
    heads: int
    ranks: int

    @classmethod
    def of(cls, heads: int, groups: int, *, tp: int, ranks: int) -> "HeadSplit":
        """Returns the split of a model's ``heads`` query heads in ``groups``, of which a tensor-parallel rank of ``tp``
        has a part, and one kv head at least."""
        here = max(1, groups // tp)
        return cls(here, max(1, heads // tp // here), ranks)

    @property
    def copies(self) -> int:
        """The number of parts that each group's query heads are cut in, with k and v sent beside each."""
        return self.ranks // math.gcd(self.groups, self.ranks)

    @property
    def query_heads(self) -> int:
        return self.groups * self.heads // self.ranks

    def check(self, caller: str) -> None:
        """Raises the ValueError of ``caller`` for heads that cannot be divided."""
        if self.divides:
            return
        total = self.groups * self.heads
        works = [n for n in range(1, min(total, 4 * self.ranks) + 1) if self._replace(ranks=n).divides]
        raise ValueError(
            f"{caller}: {total} query heads in {self.groups} groups a tensor-parallel rank are not divisible by"
            f" context-parallel size {self.ranks}; use size {', '.join(map(str, works))}, or cp_kind='keys'"
        )

    @property
    def divides(self) -> bool:
        """True if every rank gets as many query heads of one group as every other."""
        return self.heads % self.copies == 0

    @property
    def cheaper(self) -> str:
        """The kind that sends less, of two that send as much "heads"; "keys" where heads cannot be divided."""
        return "heads" if self.divides and self.heads + self.copies <= 2 * self.ranks else "keys"


def settled(tp: TensorParallel, heads: int, groups: int) -> TensorParallel:
    """Returns ranks whose "auto" kind is the cheaper one for a model's ``heads`` query heads in ``groups``."""
    if tp.cp is None or tp.cp_kind != "auto":
        return tp
    return tp.of_kind(HeadSplit.of(heads, groups, tp=tp.size, ranks=tp.cp.size).cheaper)


# ---- the order of rows ----


def by_rank(x: Tensor, tp: TensorParallel) -> Tensor:
    """Rows [M, ...] of whole sequences, padded, in the order of positions -> in the order of ranks' pieces."""
    return _chunks_at(x, tp.cp_chunks)


def by_position(x: Tensor, tp: TensorParallel) -> Tensor:
    """Rows [M, ...] of whole sequences in the order of ranks' pieces -> in the order of positions."""
    chunks = tp.cp_chunks
    return _chunks_at(x, [chunks.index(i) for i in range(len(chunks))])


def _chunks_at(x: Tensor, order: list[int]) -> Tensor:
    if order == [*range(len(order))]:
        return x
    chunks = x.chunk(len(order))
    return torch.cat([chunks[i] for i in order])


# ---- attention ----


def attend_pieces(qkv: Tensor, options: Options, tp: TensorParallel) -> Tensor:
    """Computes attention of this rank's piece of each sequence: qkv [M, G, Q + 2, E] -> o [M, G Q E].

    ``options`` are those of whole sequences and of the tensor-parallel rank's heads.  Rows beyond its piece are
    padding, whose o is 0.  Without context parallelism it is :func:`..kernels.attn.op.attend`.
    """
    if tp.cp is None:
        return attend(qkv, options)
    cp, (M, G, slots, _) = tp.cp, qkv.shape
    rows = tp.piece(options.seq) * options.batch
    if tp.cp_kind == "keys":
        (qkv,) = autocast(qkv)
        return _padded(_OverKeys.apply(qkv[:rows], options, tp), M)
    split = HeadSplit(G, slots - 2, cp.size)
    split.check("attention")
    heads = _with_copies(qkv, split.copies)
    options = options._replace(first_head=options.first_head + cp.rank * split.query_heads)
    if (rounds := rounds_of_heads(heads[:rows], options, cp)) == 1:
        return to_pieces(attend(to_heads(heads, rows, cp), options), M, cp)
    (heads,) = autocast(heads)
    return _padded(_InRounds.apply(heads[:rows], options, HeadRounds(rounds, cp.size, cp.group_name or "")), M)


def _padded(x: Tensor, rows: int) -> Tensor:
    """x [m, n] -> [rows, n], with zeros beyond."""
    return nn.functional.pad(x, (0, 0, 0, rows - x.shape[0])) if rows > x.shape[0] else x


class _InRounds(Function):
    """Exchanged heads, whose messages travel under attention."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, options: Options, split: HeadRounds) -> Tensor:
        o, *saved = attention_of_heads_fwd(heads, options, split)
        ctx.save_for_backward(*saved, *options[:TENSORS])
        ctx.args = options[TENSORS:], split
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, o, lse, *tensors), (constants, split) = ctx.saved_tensors, ctx.args
        saved, options = HeadsSaved(qkv, o, lse), Options(*tensors, *constants)
        return attention_of_heads_bwd(do, saved, options, split), None, None


class _OverKeys(Function):
    """This rank's queries over all keys.  Saved is its piece alone: keys are gathered again in backward."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, options: Options, tp: TensorParallel) -> Tensor:
        q, kv = _queries_and_keys(qkv, tp)
        front, end = (attention_of_queries_fwd(q_i, chunk, options) for q_i, chunk in _chunked(q, kv, options, tp))
        o, lse = torch.cat([front[0], end[0]]), torch.cat([front[1], end[1]], -1)
        ctx.save_for_backward(qkv, o, lse, *options[:TENSORS])
        ctx.args = options[TENSORS:], tp
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, o, lse, *tensors), (constants, tp) = ctx.saved_tensors, ctx.args
        q, kv = _queries_and_keys(qkv, tp)
        options, cp = Options(*tensors, *constants), tp.cp
        pairs = pairs_of(cp.size) // cp.size
        chunks = _chunked(q, kv, options, tp, parts=pairs)

        do_by_chunk, o_by_chunk = (t.chunk(len(chunks)) for t in (do.contiguous(), o))
        lse_by_chunk = lse.split([place.queries for _, place in chunks], -1)

        def gradients(i: int) -> tuple[Tensor, Tensor]:
            """Returns dq of the queries of chunk i, and what they leave in dk and dv."""
            q_i, place = chunks[i]
            lse_i = lse_by_chunk[i].contiguous()
            return attention_of_queries_bwd(do_by_chunk[i], q_i, place, o_by_chunk[i], lse=lse_i, options=options)

        dq, leaves = [q] * len(chunks), TreeSum()
        for i in range(pairs):
            (dq[i], front), (dq[-1 - i], end) = gradients(i), gradients(-1 - i)
            leaves.add(front.add_(end))
        sent = by_rank(leaves.total(), tp).view(cp.size, len(q), *kv.shape[1:])
        dkv = tree(all_to_all(sent, cp.group_name).unbind())
        return torch.cat([torch.cat(dq), dkv.to(qkv.dtype)], 2), None, None


def _queries_and_keys(qkv: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """qkv [m, G, Q + 2, E] of a piece -> its q [m, G, Q, E], and kv [C m, G, 2, E] of whole sequences."""
    cp = tp.cp
    assert cp is not None
    q, kv = qkv.split([qkv.shape[2] - 2, 2], 2)
    return q, by_position(all_gather(kv.contiguous(), cp.size, cp.group_name).flatten(0, 1), tp)


def _chunked(
    q: Tensor, kv: Tensor, options: Options, tp: TensorParallel, parts: int = 1
) -> list[tuple[Tensor, QueryChunk]]:
    """Returns the rows of q and the place of each chunk, in so many ``parts``; what is no position is padding."""
    chunks = tp.chunks(options.seq, parts)
    places = [QueryChunk(kv, chunk.start, chunk.stop - chunk.start) for chunk in chunks]
    return [*zip(q.chunk(len(chunks)), places, strict=True)]


def to_heads(x: Tensor, rows: int, cp: TensorParallel) -> Tensor:
    """x [M, n, ...], whose first ``rows`` are this rank's piece -> [C rows, n / C, ...]: whole sequences, with 1 / C of
    the n heads."""
    sent = x[:rows].unflatten(1, (cp.size, -1)).transpose(0, 1)
    return exchange(sent.flatten(2), cp).view(-1, *sent.shape[2:])


def to_pieces(o: Tensor, rows: int, cp: TensorParallel) -> Tensor:
    """o [C m, n], whole sequences -> [rows, C n], this rank's piece m of all heads, and zeros beyond."""
    piece = exchange(o.view(cp.size, -1, o.shape[1]), cp).transpose(0, 1).flatten(1)
    return _padded(piece, rows)


def _with_copies(qkv: Tensor, copies: int) -> Tensor:
    """qkv [m, G, Q + 2, E] -> [m, G copies, Q / copies + 2, E]: each group's query heads in pieces, with k and v."""
    if copies == 1:
        return qkv
    q, kv = qkv.split([qkv.shape[2] - 2, 2], 2)
    return torch.cat([q.unflatten(2, (copies, -1)).flatten(1, 2), copied(kv, copies)], 2)


def copied(kv: Tensor, copies: int) -> Tensor:
    """kv [m, G, ...] -> [m, G copies, ...], each head as often in a row; the gradients of its copies are added."""
    return kv if copies == 1 else kv[:, :, None].expand(-1, -1, copies, *kv.shape[2:]).flatten(1, 2)


# ---- attention to another sequence ----


class CrossRows(NamedTuple):
    """What a rank attends from and to: q [n B, h, E] at ``positions`` int64 [n], and kv [T B, g, 2, E] of whole
    sequences; ``skipped`` query heads of its tensor-parallel rank lie before the h."""

    q: Tensor
    kv: Tensor
    positions: Tensor
    skipped: int = 0


def cross_rows(q: Tensor, kv: Tensor, lengths: tuple[int, int], *, batch: int, tp: TensorParallel) -> CrossRows:
    """Takes q [M, H, E] and kv [N, G, 2, E] of this rank's pieces of two sequences of ``lengths`` positions."""
    (seq, memory_seq), cp = lengths, tp.cp
    m, n = (tp.piece(length) * batch for length in lengths)
    positions = torch.arange(seq, device=q.device)
    if cp is None:
        return CrossRows(q[: seq * batch], kv[: memory_seq * batch], positions)
    if tp.cp_kind == "keys":
        kv = by_position(gather(kv[:n], cp), tp)[: memory_seq * batch]
        place = tp.first_row(seq, 1, start=0, rows=tp.piece(seq))
        return CrossRows(q[:m], kv, global_rows(place, tp.piece(seq), q.device))
    split = HeadSplit(kv.shape[1], q.shape[1] // kv.shape[1], cp.size)
    q, kv = to_heads(q, m, cp)[: seq * batch], to_heads(copied(kv, split.copies), n, cp)[: memory_seq * batch]
    return CrossRows(q, kv, positions, cp.rank * split.query_heads)


def cross_back(o: Tensor, rows: int, piece: int, tp: TensorParallel) -> Tensor:
    """o of :func:`cross_rows`, rows beyond the positions left out -> [rows, H E] of this rank's piece, zeros beyond."""
    if tp.cp is None or tp.cp_kind == "keys":
        return _padded(o, rows)
    return to_pieces(_padded(o, tp.cp.size * piece), rows, tp.cp)
