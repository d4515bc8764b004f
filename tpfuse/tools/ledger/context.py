"""A block over context-parallel ranks in closed form: the bytes and messages that a rank sends to the others that hold
pieces of its sequences, forward and backward, and what attention saves.

    m rows of a rank's piece, over C ranks; h query heads and g kv heads of a tensor-parallel rank, E wide; e bytes an
    element, a bytes of an accumulator (4, or 8); q = h + 2 g copies

    "heads"      forward    m (q + h) E e (C - 1) / C       an exchange of q, k, v and one of o
                 backward   the same                        of their gradients
    "keys"       forward    m 2 g E e (C - 1)               all keys and values are gathered
                 backward   m 2 g E (e + a) (C - 1)         again, and their gradients are exchanged in fp32
    gradients               reduced_bytes of each matrix and bias that tensor-parallel ranks divide, and of all vectors
                            that they do not, packed into one tensor of accumulators
    saved        as of one rank with m rows, and of "heads" o once more, as one GEMM reads it, and the copies of k and v
    gathered     "keys": m 2 g E e C for a while, forward and backward
"""

from typing import NamedTuple

from ...collectives import reduce_messages, reduced_bytes
from ...kernels.norm import KINDS
from ...models.config.model import ModelConfig
from ...sequence_parallel.context import HeadSplit
from .memory import Wired
from .shapes import Shape


class PieceExchange(NamedTuple):
    """Attention of ``rows`` of a piece, by ``kind``, "heads" or "keys"; ``split``: the heads of one tensor-parallel
    rank over the context-parallel ranks; ``width`` of a head; ``element``: bytes of one."""

    split: HeadSplit
    width: int
    rows: int
    kind: str
    element: int

    @property
    def wire(self) -> tuple[int, int]:
        """Bytes that a rank sends in forward and in backward."""
        (groups, heads, C), e = self.split, self.element
        others, query_heads = self.rows * self.width * (C - 1), groups * heads
        if self.kind == "keys":
            return 2 * groups * e * others, 2 * groups * (e + max(4, e)) * others
        exchanged = (2 * query_heads + 2 * groups * self.split.copies) * e * others // C
        return exchanged, exchanged

    @property
    def saved(self) -> int:
        """Bytes that are saved beside those of one rank that has as many rows."""
        groups, heads, _ = self.split
        slots = 0 if self.kind == "keys" else groups * (heads + 2 * (self.split.copies - 1))
        return self.rows * slots * self.width * self.element

    @property
    def gathered(self) -> int:
        """Bytes of the keys and values of whole sequences that a rank has while it attends, of "keys"."""
        return 2 * self.split.groups * self.width * self.element * self.rows * self.split.ranks * (self.kind == "keys")

    @property
    def messages(self) -> tuple[int, int]:
        """Messages that a rank sends in forward and in backward."""
        others = self.split.ranks - 1
        return (others, 2 * others) if self.kind == "keys" else (2 * others, 2 * others)


class PieceBlock(NamedTuple):
    """A block like ``layer`` of a model: attention of a piece, and gradients that are summed over the pieces; ``tp``:
    tensor-parallel ranks."""

    config: ModelConfig
    tp: int
    attention: PieceExchange
    layer: int | None = None

    @classmethod
    def of(
        cls, config: ModelConfig, *, rows: int, ranks: int, kind: str, element: int, tp: int = 1,
        layer: int | None = None,
    ) -> "PieceBlock":  # fmt: skip
        """Takes ``rows`` of a piece on each of ``ranks``, context-parallel ones."""
        split = HeadSplit.of(config.num_heads, config.kv_heads, tp=tp, ranks=ranks)
        return cls(config, tp, PieceExchange(split, config.head_size, rows, kind, element=element), layer)

    @property
    def gradients(self) -> list[tuple[int, int]]:
        """(elements, bytes of one) of each sum over the pieces."""
        c, t, s, wired = self.config, self.tp, Shape.of(self.config, self.layer), Wired.of(self.config)
        (groups, heads, _), E, e = self.attention.split, self.attention.width, self.attention.element
        o, kv, accumulator = groups * heads * E, 2 * groups * E, max(4, e)
        projections = [o + kv] if c.kv_heads >= t else [o, kv]  # apart where several ranks have the same kv head
        norm = 2 if KINDS[c.norm].centred and c.norm_bias else 1
        vectors = (wired.norms + wired.branch_norms) * norm + c.out_bias + c.mlp_bias
        divided = [n * size for n in projections for size in (s.D, c.qkv_bias)] + [o * s.D]
        if getattr(c, "qk_norm", False):
            divided += [o, groups * E] if getattr(c, "qk_norm_all", False) else [E, E]
        mlps = [(1 if s.experts is None else s.experts.num_experts, s.F)]
        if s.experts is not None:
            mlps.append((1, s.experts.shared_width))
        for n, width in mlps:
            columns_in = width * (2 if s.gated else 1)
            divided += [n * columns_in * s.D // t, c.mlp_bias * columns_in // t, n * width * s.D // t]
        sums = [(n, e) for n in divided] + [(s.router, accumulator), (vectors * s.D, accumulator)]
        return [(n, size) for n, size in sums if n]

    def wire(self, *, recomputed: bool = False) -> int:
        """Returns the bytes that a rank sends, with ``recomputed`` those of forward twice."""
        forward, backward = self.attention.wire
        sums = sum(reduced_bytes(n, size, self.attention.split.ranks) for n, size in self.gradients)
        return forward * (2 if recomputed else 1) + backward + sums

    def messages(self, *, recomputed: bool = False) -> int:
        """Returns the messages that a rank sends, with ``recomputed`` those of forward twice."""
        forward, backward = self.attention.messages
        sums = sum(reduce_messages(n, self.attention.split.ranks) for n, _ in self.gradients)
        return forward * (2 if recomputed else 1) + backward + sums
