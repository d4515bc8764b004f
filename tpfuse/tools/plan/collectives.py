"""All-reduce by seven algorithms, and of sparse buffers by three: the messages of each, and its seconds on links of a
latency and a bandwidth.

The model is LogGP's (Alexandrov, Ionescu, Schauser & Scheiman 1995): a node sends and receives at once, through one
port; each message keeps it busy for an overhead, its bytes pass at the link's bandwidth, and it arrives a latency
later.  The cost for n ranks with a buffer of one byte each is therefore three numbers: the rounds (messages that wait
for one another), the most messages a node sends or receives in them, and the volume (bytes through the busiest port):

    algorithm           rounds           messages         volume           source
    ring                2 (n - 1)        2 (n - 1)        2 (n - 1) / n    Patarasuk & Yuan 2009
    halving-doubling    2 log2 n         2 log2 n         2 (n - 1) / n    Thakur, Rabenseifner & Gropp 2005, 4.5
    tree                2 ceil(log2 n)   2 ceil(log2 n)   2 ceil(log2 n)   binomial: to rank 0 and back
    direct              2                2 (n - 1)        2 (n - 1) / n    each rank sums one n-th
    all-to-all          1                n - 1            n - 1            each rank sums all buffers
    parameter server    2                2 max(n, k)      2 max(n / k, 1)  k servers, each of one k-th of the buffer
    in-network          2 levels         2                1                switches add what passes: SHARP, Flare

Flare's switches (De Sensi et al. 2021, arXiv:2106.15565) can also add in a fixed order, of as many messages, and add
sparse buffers.  Of those a rank sends a share d of the elements, two words each, and some rank u = 1 - (1 - d)^n of
them, where the ranks' are independent:

    gathered            1                n - 1            2 d (n - 1)      each rank sums all entries
    Ok-Topk             2                2 (n - 1)        4 d (n - 1) / n  Li & Hoefler 2022: of the sums the largest
    in-network, sparse  2 levels         2                min(2 u, 1)      Flare; whole buffers if these are fewer bytes

Where n is no power of two, halving-doubling first folds the n - 2^k last ranks into others: 2 rounds, messages and
buffers of volume more than those of 2^k ranks.  ``messages`` lists the messages themselves; a test counts them against
the table and runs them as an all-reduce (tests/tools/plan/test_collectives.py).
"""

from collections.abc import Callable
from typing import NamedTuple

from ...kernels.runtime.errors import check

RADIX = 32  # ports of a switch to the ranks or switches below it


class Link(NamedTuple):
    """A node's link, through one port."""

    latency: float  # seconds from a message's last byte leaving until it has arrived
    bandwidth: float  # bytes a second, each way
    overhead: float = 0.0  # seconds that a message keeps its sender, and its receiver, from the next

    def check(self) -> None:
        """Raises ValueError for values that no link has."""
        check(
            self.latency >= 0 and self.overhead >= 0 and self.bandwidth > 0,
            f"plan: a link needs latency >= 0, overhead >= 0 and bandwidth > 0, got {self}",
        )


class Message(NamedTuple):
    """A message of the parts ``begin`` to ``end`` (excluded) of a buffer, which the receiver adds to its own parts or
    copies over them."""

    source: int
    to: int
    begin: int
    end: int
    adds: bool


Round = tuple[Message, ...]  # messages that do not wait for one another


class Messages(NamedTuple):
    """All messages of an all-reduce, round by round.  Nodes from n on are servers or switches with buffers of zeros."""

    nodes: int
    parts: int  # of a buffer
    rounds: tuple[Round, ...]


class Algorithm(NamedTuple):
    """A collective's cost as functions of the number of ranks n, ``busiest`` in messages and ``volume`` in buffers, and
    of an all-reduce its messages."""

    rounds: Callable[[int], int]
    busiest: Callable[[int], int]
    volume: Callable[[int], float]
    messages: Callable[[int], Messages] | None = None


# ---- messages ----


def _ring(n: int) -> Messages:
    """Reduce-scatter, after which rank r has the sum of part r + 1, then all-gather."""

    def half(shift: int, adds: bool) -> list[Round]:
        parts = lambda i: [(r, (r + shift - i) % n) for r in range(n)]
        message = lambda r, part: Message(r, (r + 1) % n, part, part + 1, adds=adds)
        return [tuple(message(r, part) for r, part in parts(i)) for i in range(n - 1)]

    return Messages(n, n, (*half(0, adds=True), *half(1, adds=False)))


def _back(rounds: list[Round]) -> list[Round]:
    """Returns the messages sent back, the last round first, each copied over the parts it came from."""
    return [tuple(x._replace(source=x.to, to=x.source, adds=False) for x in exchange) for exchange in reversed(rounds)]


def _halving_doubling(n: int) -> Messages:
    m = 1 << (n.bit_length() - 1)
    halving: list[Round] = [tuple(Message(r, r - m, 0, m, adds=True) for r in range(m, n))] if n > m else []
    distance = m // 2
    while distance:
        block = lambda r, d=distance: (r ^ d) // d * d  # the parts that the partner continues with
        halving.append(tuple(Message(r, r ^ distance, block(r), block(r) + distance, adds=True) for r in range(m)))
        distance //= 2
    return Messages(n, m, (*halving, *_back(halving)))


def _tree(n: int) -> Messages:
    up: list[Round] = []
    distance = 1
    while distance < n:
        up.append(tuple(Message(r, r - distance, 0, 1, adds=True) for r in range(distance, n, 2 * distance)))
        distance *= 2
    return Messages(n, 1, (*up, *_back(up)))


def _direct(n: int) -> Messages:
    pairs = [(r, (r + i) % n) for i in range(1, n) for r in range(n)]  # at no time do two ranks send to the same
    scatter = tuple(Message(r, to, to, to + 1, adds=True) for r, to in pairs)
    gather = tuple(Message(r, to, r, r + 1, adds=False) for r, to in pairs)
    return Messages(n, n, (scatter, gather))


def _all_to_all(n: int) -> Messages:
    return Messages(n, 1, (tuple(Message(r, (r + i) % n, 0, 1, adds=True) for i in range(1, n) for r in range(n)),))


def servers(k: int) -> Algorithm:
    """Returns the parameter server of k machines that are not among the ranks."""
    check(k >= 1, f"plan: a parameter server needs at least one machine, got {k}")

    def messages(n: int) -> Messages:
        push = tuple(Message(r, n + s, s, s + 1, adds=True) for s in range(k) for r in range(n))
        return Messages(n + k, k, (push, *_back([push])))

    return Algorithm(lambda n: 2, lambda n: 2 * max(n, k), lambda n: 2 * max(n / k, 1.0), messages)


def _levels(n: int) -> int:
    """Returns the number of levels of switches above n ranks, at least one."""
    levels, reached = 1, RADIX
    while reached < n:
        levels, reached = levels + 1, reached * RADIX
    return levels


def _in_network(n: int) -> Messages:
    below, nodes, up = list(range(n)), n, list[Round]()
    for _ in range(_levels(n)):
        switches = list(range(nodes, nodes - (-len(below) // RADIX)))
        up.append(tuple(Message(x, switches[i // RADIX], 0, 1, adds=True) for i, x in enumerate(below)))
        below, nodes = switches, nodes + len(switches)
    return Messages(nodes, 1, (*up, *_back(up)))


# ---- the table ----


def _spread(n: int) -> float:
    return 2 * (n - 1) / n


def _folds(n: int) -> int:
    """Returns the extra rounds of ranks beyond a power of two."""
    return 0 if n & (n - 1) == 0 else 2


def _hops(n: int) -> int:
    return 2 * (n - 1)


def _depth(n: int) -> int:
    """Returns the rounds of a binomial tree, up and down."""
    return 2 * (n - 1).bit_length()


def _exchanges(n: int) -> int:
    return 2 * (n.bit_length() - 1) + _folds(n)


ALL_REDUCE: dict[str, Algorithm] = {
    "ring": Algorithm(_hops, _hops, _spread, _ring),
    "halving-doubling": Algorithm(
        _exchanges, _exchanges, lambda n: _spread(1 << (n.bit_length() - 1)) + _folds(n), _halving_doubling
    ),
    "tree": Algorithm(_depth, _depth, _depth, _tree),
    "direct": Algorithm(lambda n: 2, _hops, _spread, _direct),
    "all-to-all": Algorithm(lambda n: 1, lambda n: n - 1, lambda n: n - 1, _all_to_all),
    "parameter server": servers(1),
    "in-network": Algorithm(lambda n: 2 * _levels(n), lambda n: 2, lambda n: 1.0, _in_network),
}
OWN = "ring", "halving-doubling", "tree", "direct"  # algorithms that need nothing but the ranks


def sparse(density: float) -> dict[str, Algorithm]:
    """Returns the sums of buffers of which each rank sends a ``density`` from 0 to 1; without their messages."""
    check(0 <= density <= 1, f"plan: density must be from 0 to 1, got {density}")
    of_switches = ALL_REDUCE["in-network"]
    return {
        "gathered": Algorithm(lambda n: 1, lambda n: n - 1, lambda n: 2 * density * (n - 1)),
        "Ok-Topk": Algorithm(lambda n: 2, _hops, lambda n: 2 * density * _spread(n)),
        "in-network, sparse": of_switches._replace(volume=lambda n: min(2 * union(density, n), 1.0), messages=None),
    }


def union(density: float, ranks: int) -> float:
    """Returns the share of the elements that any rank has, of which each rank has a ``density``, independently."""
    return 1 - (1 - density) ** ranks


def seconds(algorithm: Algorithm, ranks: int, size: float, link: Link) -> float:
    """Returns the seconds of a collective of ``size`` bytes over ``ranks``."""
    check(ranks >= 1, f"plan: ranks must be a positive integer, got {ranks}")
    check(size >= 0, f"plan: a buffer's size must not be negative, got {size}")
    link.check()
    if ranks == 1:
        return 0.0
    waits, busy = algorithm.rounds(ranks) * link.latency, algorithm.busiest(ranks) * link.overhead
    return waits + busy + algorithm.volume(ranks) * size / link.bandwidth


def cheapest(ranks: int, size: float, link: Link) -> tuple[str, float]:
    """Returns the fastest algorithm of OWN, and its seconds."""
    return min(((name, seconds(ALL_REDUCE[name], ranks, size, link)) for name in OWN), key=lambda x: x[1])
