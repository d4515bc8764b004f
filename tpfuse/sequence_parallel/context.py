"""Attention over sequences of which each context-parallel rank holds one piece.

    qkv  [m, G, Q + 2, E]    this rank's piece, all heads that its tensor-parallel rank has
         --exchange-->  [C m, G/C, Q + 2, E]    whole sequences, 1/C of the heads
    o    [C m, G/C Q E]  --exchange-->  [m, G Q E]

Jacobs et al. 2023 (arXiv:2309.14509).  Between the exchanges stands the same attention as on one rank: every mask,
window and document works as there, causal work is balanced, and a head's bits do not depend on C.  Pieces are
contiguous, so that their rows, s * batch + b, are contiguous in the whole too and come back in order.

Where C does not divide G, each group of query heads is cut in ``copies``, and k and v are sent with each; their
gradients are then summed.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.attn.op import attend
from ..kernels.attn.options import Options
from ..kernels.runtime.errors import check
from ..parallel import TensorParallel
from .crossings import exchange


class HeadSplit(NamedTuple):
    """``groups`` of kv heads of one tensor-parallel rank, each with ``heads`` query heads, over ``ranks``."""

    groups: int
    heads: int
    ranks: int

    @property
    def copies(self) -> int:
        """The number of ranks that are sent k and v of one head."""
        return self.ranks // math.gcd(self.groups, self.ranks)

    @property
    def query_heads(self) -> int:
        """The number of query heads of a rank."""
        return self.groups * self.heads // self.ranks

    def check(self, caller: str) -> None:
        """Raises the ValueError of ``caller`` for heads that cannot be divided."""
        total = self.groups * self.heads
        works = [n for n in range(1, total + 1) if self._replace(ranks=n).divides]
        check(
            self.divides,
            f"{caller}: {total} query heads in {self.groups} groups a tensor-parallel rank are not divisible by"
            f" context-parallel size {self.ranks}; use size {', '.join(map(str, works))}",
        )

    @property
    def divides(self) -> bool:
        """True if every rank gets as many query heads of one group as every other."""
        return self.heads % self.copies == 0


def attend_pieces(qkv: Tensor, options: Options, tp: TensorParallel) -> Tensor:
    """Computes attention of this rank's piece of each sequence: qkv [M, G, Q + 2, E] -> o [M, G Q E].

    ``options`` are those of whole sequences and of the tensor-parallel rank's heads.  Rows beyond its piece are
    padding, whose o is 0.  Without context parallelism it is :func:`..kernels.attn.op.attend`.
    """
    if tp.cp is None:
        return attend(qkv, options)
    cp, (M, G, slots, _) = tp.cp, qkv.shape
    split, rows = HeadSplit(G, slots - 2, cp.size), tp.piece(options.seq) * options.batch
    split.check("attention")
    whole = to_heads(_with_copies(qkv, split.copies), rows, cp)
    o = attend(whole, options._replace(first_head=options.first_head + cp.rank * split.query_heads))
    return to_pieces(o, M, cp)


def to_heads(x: Tensor, rows: int, cp: TensorParallel) -> Tensor:
    """x [M, n, ...], whose first ``rows`` are this rank's piece -> [C rows, n / C, ...]: whole sequences, with 1 / C of
    the n heads."""
    sent = x[:rows].unflatten(1, (cp.size, -1)).transpose(0, 1)
    return exchange(sent.flatten(2), cp).view(-1, *sent.shape[2:])


def to_pieces(o: Tensor, rows: int, cp: TensorParallel) -> Tensor:
    """o [C m, n], whole sequences -> [rows, C n], this rank's piece m of all heads, and zeros beyond."""
    piece = exchange(o.view(cp.size, -1, o.shape[1]), cp).transpose(0, 1).flatten(1)
    return nn.functional.pad(piece, (0, 0, 0, rows - len(piece))) if rows > len(piece) else piece


def _with_copies(qkv: Tensor, copies: int) -> Tensor:
    """qkv [m, G, Q + 2, E] -> [m, G copies, Q / copies + 2, E]: each group's query heads in pieces, with k and v."""
    if copies == 1:
        return qkv
    q, kv = qkv.split([qkv.shape[2] - 2, 2], 2)
    return torch.cat([q.unflatten(2, (copies, -1)).flatten(1, 2), copied(kv, copies)], 2)


def copied(kv: Tensor, copies: int) -> Tensor:
    """kv [m, G, ...] -> [m, G copies, ...], each head as often in a row; the gradients of its copies are added."""
    return kv if copies == 1 else kv[:, :, None].expand(-1, -1, copies, *kv.shape[2:]).flatten(1, 2)
