"""What a change of layout costs: forward for the tensor, backward for its gradient.

STEPS holds what one axis of n ranks can do at once; what a rank sends of a tensor of T bytes is

    all-reduce      2 (n - 1) / n T       all-gather, reduce-scatter   (n - 1) / n T       all-to-all   (n - 1) / n^2 T

where T shrinks to the shard that the other axes leave.  A rank keeps whatever it has of what it needs, so slices are
free.  Longer conversions are the cheapest sequence of steps (all pairs by Floyd 1962 and Warshall 1962).  Where two
axes shard one dimension the earlier axis is the outer one, as in DTensor: it changes only while the inner does not
shard that dimension.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....kernels.runtime.errors import check
from ..collectives import ALL_REDUCE, Link
from .graph import Tensor
from .signatures import FORKED, PARTIAL, REPLICATE, SHARDS, TYPES, Layout, fits


class Mesh(NamedTuple):
    """``sizes``: ranks along each axis; ``links``: what a rank's messages along it pass through."""

    sizes: tuple[int, ...]
    links: tuple[Link, ...]

    def checked(self) -> "Mesh":
        """Returns itself; ValueError for a mesh that is not one or two axes of two ranks at least."""
        fine = 1 <= len(self.sizes) <= 2 and min(self.sizes) >= 2
        check(fine, f"plan: a mesh has one or two axes of at least 2 ranks, got {'x'.join(map(str, self.sizes))}")
        check(
            len(self.links) == len(self.sizes),
            f"plan: a mesh of {len(self.sizes)} axes needs a link for each, got {len(self.links)}",
        )
        for link in self.links:
            check(
                link.latency >= 0 and link.overhead >= 0 and link.bandwidth > 0,
                f"plan: a link needs latency >= 0, overhead >= 0 and bandwidth > 0, got {link}",
            )
        return self


class Collective(NamedTuple):
    """Of n ranks: rounds that wait for one another, messages that a rank sends, bytes of them for a tensor of one."""

    rounds: Callable[[int], int]
    messages: Callable[[int], int]
    volume: Callable[[int], float]

    def seconds(self, ranks: int, size: float, link: Link) -> float:
        """Returns how long ``size`` bytes take."""
        waits, busy = self.rounds(ranks) * link.latency, self.messages(ranks) * link.overhead
        return waits + busy + self.volume(ranks) * size / link.bandwidth


_RING = ALL_REDUCE["ring"]
_HALF_A_RING = Collective(lambda n: n - 1, lambda n: n - 1, lambda n: (n - 1) / n)
COLLECTIVES = {
    "all-reduce": Collective(_RING.rounds, _RING.busiest, _RING.volume),
    "all-gather": _HALF_A_RING,
    "reduce-scatter": _HALF_A_RING,
    "all-to-all": Collective(lambda n: 1, lambda n: n - 1, lambda n: (n - 1) / n**2),
}


class Step(NamedTuple):
    """What one axis does; None: nothing is sent."""

    forward: str | None
    backward: str | None

    @property
    def collectives(self) -> tuple[str, ...]:
        return tuple(name for name in self if name is not None)


STEPS: dict[tuple[str, str], Step] = {
    (PARTIAL, REPLICATE): Step("all-reduce", None),
    (REPLICATE, FORKED): Step(None, "all-reduce"),
    **{(PARTIAL, shard): Step("reduce-scatter", "all-gather") for shard in SHARDS},
    **{(REPLICATE, shard): Step(None, "all-gather") for shard in SHARDS},
    **{(shard, REPLICATE): Step("all-gather", None) for shard in SHARDS},
    **{(shard, FORKED): Step("all-gather", "reduce-scatter") for shard in SHARDS},
    **{(a, b): Step("all-to-all", "all-to-all") for a, b in itertools.permutations(SHARDS, 2)},
}


class Taken(NamedTuple):
    """One step of a conversion, on one axis, with the bytes that a rank sends and the seconds."""

    axis: int
    start: Layout
    end: Layout
    step: Step
    sent: float
    seconds: float


class Conversions:
    """All of one tensor on one mesh.  ``layouts``: those that the mesh cuts evenly; ``seconds[a, b]``, ``sent[a, b]``:
    of the fastest way from the a-th to the b-th of them, inf where there is none."""

    def __init__(self, mesh: Mesh, tensor: Tensor):
        every = itertools.product(TYPES, repeat=len(mesh.sizes))
        self.layouts = [layout for layout in every if fits(tensor, layout, mesh.sizes)]
        self.place = {layout: i for i, layout in enumerate(self.layouts)}
        n = len(self.layouts)
        self.seconds: NDArray[np.float64] = np.full((n, n), np.inf)
        self.sent: NDArray[np.float64] = np.full((n, n), np.inf)
        self._next: NDArray[Any] = np.full((n, n), -1)
        self._steps: dict[tuple[int, int], Taken] = {}
        for a, start in enumerate(self.layouts):
            self._add(a, start, mesh, tensor)
            self.seconds[a, a] = self.sent[a, a] = 0.0
        self._shorten()

    def _add(self, a: int, start: Layout, mesh: Mesh, tensor: Tensor) -> None:
        """Notes the steps from ``start``, the a-th layout."""
        for (was, becomes), step in STEPS.items():
            for axis in (k for k, kind in enumerate(start) if kind == was):
                end = (*start[:axis], becomes, *start[axis + 1 :])
                inner = set(start[axis + 1 :]) & set(SHARDS)
                if end not in self.place or inner & {was, becomes}:
                    continue
                others = math.prod(n for k, n in enumerate(mesh.sizes) if k != axis and start[k] in SHARDS)
                n, size, link = mesh.sizes[axis], tensor.size / others, mesh.links[axis]
                chosen = [COLLECTIVES[name] for name in step.collectives]
                sent = sum(c.volume(n) for c in chosen) * size
                taken = Taken(axis, start, end, step, sent=sent, seconds=sum(c.seconds(n, size, link) for c in chosen))
                b = self.place[end]
                self._steps[a, b], self._next[a, b] = taken, b
                self.seconds[a, b], self.sent[a, b] = taken.seconds, taken.sent

    def _shorten(self) -> None:
        for via in range(len(self.layouts)):
            longer = self.seconds[:, via, None] + self.seconds[None, via]
            better = longer < self.seconds * (1 - 1e-12)
            self.sent[better] = (self.sent[:, via, None] + self.sent[None, via])[better]
            self._next[better] = np.broadcast_to(self._next[:, via, None], better.shape)[better]
            self.seconds[better] = longer[better]

    def way(self, start: Layout, end: Layout) -> list[Taken]:
        """Returns the steps of the fastest way; ValueError where there is none."""
        a, b = self.place[start], self.place[end]
        check(bool(np.isfinite(self.seconds[a, b])), f"plan: no tensor goes from {start} to {end}")
        taken = []
        while a != b:
            taken.append(self._steps[a, int(self._next[a, b])])
            a = int(self._next[a, b])
        return taken
