"""A mixture of experts in closed form: what one of t ranks computes, saves and sends in a layer.

    m rows of a rank, n = k m imbalance rows of its experts, e bytes an element, a bytes of an accumulator (4, or 8)
    u of its rows go to a rank, its own or another: distinct ones, by sequence_parallel/assumed.py

    flops      n 6 D F + m 2 E D                                                  of a forward pass, twice of backward
    saved      n (2 e F + a + [t > 1] 16) + m ((E + k) a + 12 k)                  and some numbers an expert
               + [t > 1] 8 (u own + (t - 1) u) + [t > 1, kept] t (u own) e D
    there      (t - 1) u rows                     x, dy, and x again unless kept, of D
               k m (1 - imbalance / t) rows       weights, and where their rows stand, 2 a
    back       n (1 - 1 / t) rows                 y, dx of D; gradients of weights of 1
    counts     E + t integers to each rank
    router     its gradient is summed over the ranks

A shared expert of width S adds, where the gate is a row more of the router:

    flops      m 6 D S                                                            of a forward pass, twice of backward
    saved      m (2 e S + t a), and of the gate m (2 a + 4)
    rows       m (t - 1) of D: x and dy, x again, y and dx; of 1: the gate, and with one its gradient

``imbalance`` is 1 where all ranks have as many rows.  ``kept``: rows that arrive are saved, as a block with
saving="fastest" does (of one rank n itself is saved, or not).  Where the t ranks are those of several replicas, the
router and the shared expert are of the ranks of one alone.
"""

from typing import NamedTuple

from ..collectives import reduce_messages, reduced_bytes
from ..sequence_parallel.assumed import reach
from .shapes import MoEShape


class ExpertSizes(NamedTuple):
    """Sizes of a layer on one of ``ranks``, each with ``rows`` of its own, of which the experts here have ``imbalance``
    times the mean; ``element``: bytes of one; ``replicas``: how many the ranks are those of."""

    shape: MoEShape
    rows: float
    ranks: int
    element: int
    imbalance: float = 1.0
    replicas: int = 1

    @property
    def tp(self) -> int:
        """Ranks of a replica."""
        return self.ranks // self.replicas

    @property
    def local_rows(self) -> float:
        """Rows of this rank's experts."""
        return self.shape.routing.k * self.rows * self.imbalance

    @property
    def accumulator(self) -> int:
        """Bytes of one."""
        return max(4, self.element)

    @property
    def router(self) -> int:
        """Elements of the router's weight."""
        return self.shape.router_rows * self.shape.hidden_size

    @property
    def peers(self) -> float:
        """Rows that this rank sends where it sends all its rows to every other of its replica; 0 without a shared
        expert."""
        return 0 if self.shape.shared_size is None else self.rows * (self.tp - 1)

    def distinct(self, *, own: bool) -> int:
        """Returns how many of its rows a rank sends to the one counted, its ``own``, or to another."""
        busiest = self.imbalance / self.ranks
        share = busiest if own else (1 - busiest) / (self.ranks - 1)
        return round(self.rows * reach(share, self.shape.routing.k, self.shape.num_experts))

    def flops(self) -> float:
        """Returns those of a forward pass, of which backward has twice as many."""
        columns = self.local_rows * self.shape.ffn_size + self.rows * self.shape.shared_width
        return 6 * columns * self.shape.hidden_size + 2 * self.rows * self.router

    def saved(self, *, kept: bool) -> float:
        """Returns the bytes that are saved for backward beside n."""
        D, F, E, (k, *_), _, S, gate = self.shape
        e, a, several = self.element, self.accumulator, self.ranks > 1
        of_experts = 2 * e * F + a + several * 16
        exchanged = 0
        if several:
            own, others = self.distinct(own=True), (self.ranks - 1) * self.distinct(own=False)
            exchanged = 8 * (own + others) + kept * self.ranks * own * e * D
        of_rows = (E + k) * a + 12 * k
        if S is not None:
            of_rows += 2 * e * S + self.tp * a + gate * (2 * a + 4)
        offsets = 8 * (E + 1 + several * (E // self.ranks + 1))
        widened = a * self.router if a > e or gate else 0
        return self.local_rows * of_experts + self.rows * of_rows + exchanged + offsets + widened

    def wire(self, *, kept: bool = True, recomputed: bool = False) -> float:
        """Returns the bytes that are sent in forward and backward, with ``recomputed`` in a second forward too."""
        D, _, E, (k, *_), _, _, gate = self.shape
        e, a, t = self.element, self.accumulator, self.ranks
        if t == 1:
            return 0
        there, back = (t - 1) * self.distinct(own=False), self.local_rows * (1 - 1 / t)
        weights = 2 * k * self.rows * (1 - self.imbalance / t)
        forward = (there + back) * e * D + weights * a + 8 * (E + t) * (t - 1)
        forward += self.peers * (2 * e * D + a)
        backward = (there * (1 if kept else 2) + back) * e * D + back * a + reduced_bytes(self.router, a, self.tp)
        backward += self.peers * (3 * e * D + gate * a)
        return forward * (2 if recomputed else 1) + backward

    def messages(self) -> int:
        """Returns how many messages that is where rows are kept: counts, weights, x, y, dy, dx, gradients of weights,
        and those of the router's gradient; of a shared expert x twice, gates, y, dy, dx and the gate's gradient."""
        shared = 0 if self.shape.shared_size is None else 6 + self.shape.shared_gate
        return 7 * (self.ranks - 1) + shared * (self.tp - 1) + reduce_messages(self.router, self.tp)
