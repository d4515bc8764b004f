"""All-reduce by six algorithms: what each sends, and how long it takes on links of a latency and a bandwidth.

The model is LogGP's (Alexandrov, Ionescu, Schauser & Scheiman 1995): a node sends and receives at once, through one
port; each message keeps it busy for an overhead, its bytes pass at the link's bandwidth, and it arrives a latency
later.  What n ranks take, with a buffer of one byte each, is therefore three numbers: the rounds (messages that wait
for one another), the most messages a node sends or receives in them, and the volume (bytes through the busiest port):

    algorithm           rounds           messages         volume           source
    ring                2 (n - 1)        2 (n - 1)        2 (n - 1) / n    Patarasuk & Yuan 2009
    halving-doubling    2 log2 n         2 log2 n         2 (n - 1) / n    Thakur, Rabenseifner & Gropp 2005, 4.5
    tree                2 ceil(log2 n)   2 ceil(log2 n)   2 ceil(log2 n)   binomial: to rank 0 and back
    direct              2                2 (n - 1)        2 (n - 1) / n    each rank sums one n-th
    parameter server    2                2 max(n, k)      2 max(n / k, 1)  k servers, each of one k-th of the buffer
    in-network          2 levels         2                1                switches add what passes: SHARP, Flare

Where n is no power of two, halving-doubling first folds the n - 2^k last ranks into others: 2 rounds, messages and
buffers of volume more, beside those of 2^k ranks.  The messages themselves are in ``messages``; what they count is held
to the table, and run, they are an all-reduce (tests/tools/plan/test_collectives.py).
"""

from collections.abc import Callable
from typing import NamedTuple

from ...kernels.runtime.errors import check

RADIX = 32  # ports of a switch to the ranks or switches below it


class Link(NamedTuple):
    """A node's port."""

    latency: float  # seconds from a message's last byte leaving until it has arrived
    bandwidth: float  # bytes a second, each way
    overhead: float = 0.0  # seconds that a message keeps its sender, and its receiver, from the next


class Message(NamedTuple):
    """Parts ``begin`` to ``end`` (excluded) of a buffer; the receiver adds them to its own, or takes them in its
    place."""

    source: int
    to: int
    begin: int
    end: int
    adds: bool


Round = tuple[Message, ...]  # which do not wait for one another


class Messages(NamedTuple):
    """What is sent, round by round.  Nodes from n on are servers or switches, whose buffers are 0 at first."""

    nodes: int
    parts: int  # that the buffer is cut into
    rounds: tuple[Round, ...]


class Algorithm(NamedTuple):
    """Functions of the number of ranks n; ``busiest`` in messages, ``volume`` in buffers."""

    rounds: Callable[[int], int]
    busiest: Callable[[int], int]
    volume: Callable[[int], float]
    messages: Callable[[int], Messages]


# ---- what is sent ----


def _ring(n: int) -> Messages:
    """Rank r ends the first half with the sum of part r + 1."""
    first = [
        tuple(Message(r, (r + 1) % n, part := (r - i) % n, part + 1, adds=True) for r in range(n)) for i in range(n - 1)
    ]
    second = [
        tuple(Message(r, (r + 1) % n, part := (r + 1 - i) % n, part + 1, adds=False) for r in range(n))
        for i in range(n - 1)
    ]
    return Messages(n, n, (*first, *second))


def _halving_doubling(n: int) -> Messages:
    m = 1 << (n.bit_length() - 1)
    fold = tuple(Message(r, r - m, 0, m, adds=True) for r in range(m, n))
    halving: list[Round] = []
    distance = m // 2
    while distance:
        block = lambda r, d=distance: (r ^ d) // d * d  # the parts that the partner goes on with
        halving.append(tuple(Message(r, r ^ distance, block(r), block(r) + distance, adds=True) for r in range(m)))
        distance //= 2
    doubling = [
        tuple(Message(x.to, x.source, x.begin, x.end, adds=False) for x in exchange) for exchange in reversed(halving)
    ]
    back = tuple(Message(x.to, x.source, 0, m, adds=False) for x in fold)
    return Messages(n, m, tuple(x for x in (fold, *halving, *doubling, back) if x))


def _tree(n: int) -> Messages:
    up: list[Round] = []
    distance = 1
    while distance < n:
        up.append(tuple(Message(r, r - distance, 0, 1, adds=True) for r in range(distance, n, 2 * distance)))
        distance *= 2
    down = [tuple(Message(x.to, x.source, 0, 1, adds=False) for x in exchange) for exchange in reversed(up)]
    return Messages(n, 1, (*up, *down))


def _direct(n: int) -> Messages:
    pairs = [(r, (r + i) % n) for i in range(1, n) for r in range(n)]  # at no time do two ranks send to the same
    scatter = tuple(Message(r, to, to, to + 1, adds=True) for r, to in pairs)
    gather = tuple(Message(r, to, r, r + 1, adds=False) for r, to in pairs)
    return Messages(n, n, (scatter, gather))


def servers(k: int) -> Algorithm:
    """Returns the parameter server of k machines beside the ranks."""
    check(k >= 1, f"plan: a parameter server needs at least one machine, got {k}")

    def messages(n: int) -> Messages:
        push = tuple(Message(r, n + s, s, s + 1, adds=True) for s in range(k) for r in range(n))
        pull = tuple(Message(x.to, x.source, x.begin, x.end, adds=False) for x in push)
        return Messages(n + k, k, (push, pull))

    return Algorithm(lambda n: 2, lambda n: 2 * max(n, k), lambda n: 2 * max(n / k, 1.0), messages)


def _levels(n: int) -> int:
    """Returns the levels of switches above n ranks, of which one at least."""
    levels, reached = 1, RADIX
    while reached < n:
        levels, reached = levels + 1, reached * RADIX
    return levels


def _in_network(n: int) -> Messages:
    below, nodes, up = list(range(n)), n, []
    for _ in range(_levels(n)):
        switches = list(range(nodes, nodes - (-len(below) // RADIX)))
        up.append(tuple(Message(x, switches[i // RADIX], 0, 1, adds=True) for i, x in enumerate(below)))
        below, nodes = switches, nodes + len(switches)
    down = [tuple(Message(x.to, x.source, 0, 1, adds=False) for x in exchange) for exchange in reversed(up)]
    return Messages(nodes, 1, (*up, *down))


# ---- the table ----


def _spread(n: int) -> float:
    return 2 * (n - 1) / n


def _folds(n: int) -> int:
    """Returns the rounds before and after that ranks beyond a power of two take."""
    return 0 if n & (n - 1) == 0 else 2


def _around(n: int) -> int:
    return 2 * (n - 1)


def _there_and_back(n: int) -> int:
    return 2 * (n - 1).bit_length()


def _exchanges(n: int) -> int:
    return 2 * (n.bit_length() - 1) + _folds(n)


ALL_REDUCE: dict[str, Algorithm] = {
    "ring": Algorithm(_around, _around, _spread, _ring),
    "halving-doubling": Algorithm(
        _exchanges, _exchanges, lambda n: _spread(1 << (n.bit_length() - 1)) + _folds(n), _halving_doubling
    ),
    "tree": Algorithm(_there_and_back, _there_and_back, _there_and_back, _tree),
    "direct": Algorithm(lambda n: 2, _around, _spread, _direct),
    "parameter server": servers(1),
    "in-network": Algorithm(lambda n: 2 * _levels(n), lambda n: 2, lambda n: 1.0, _in_network),
}
OWN = "ring", "halving-doubling", "tree", "direct"  # need nothing but the ranks


def seconds(algorithm: Algorithm, ranks: int, size: float, link: Link) -> float:
    """Returns how long ``size`` bytes on each of ``ranks`` take to be summed."""
    check(ranks >= 1, f"plan: ranks must be a positive integer, got {ranks}")
    check(size >= 0, f"plan: a buffer's size must not be negative, got {size}")
    check(
        link.latency >= 0 and link.overhead >= 0 and link.bandwidth > 0,
        f"plan: a link needs latency >= 0, overhead >= 0 and bandwidth > 0, got {link}",
    )
    if ranks == 1:
        return 0.0
    waits, busy = algorithm.rounds(ranks) * link.latency, algorithm.busiest(ranks) * link.overhead
    return waits + busy + algorithm.volume(ranks) * size / link.bandwidth


def cheapest(ranks: int, size: float, link: Link) -> tuple[str, float]:
    """Returns the algorithm of OWN that takes least, and its seconds."""
    took = {name: seconds(ALL_REDUCE[name], ranks, size, link) for name in OWN}
    best = min(took, key=lambda name: took[name])
    return best, took[best]
