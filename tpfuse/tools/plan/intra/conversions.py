"""Costs of a change of layout: forward for the tensor, backward for its gradient.

STEPS lists the changes that one axis of n ranks can make at once.  Of a tensor of T bytes a rank sends

    all-reduce      2 (n - 1) / n T       all-gather, reduce-scatter   (n - 1) / n T       all-to-all   (n - 1) / n^2 T

where T shrinks to the shard that the other axes leave.  A rank keeps what it already has of what it needs, so slices
are free.  Longer conversions are the cheapest sequence of steps (all pairs by Floyd 1962 and Warshall 1962).  Where two
axes shard one dimension the earlier axis is the outer one, as in DTensor: it changes only while the inner does not
shard that dimension.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....kernels.runtime.errors import check
from ..collectives import ALL_REDUCE, Algorithm, Link, seconds
from .graph import Tensor
from .signatures import FORKED, PARTIAL, REPLICATE, SHARDS, TYPES, Layout, fits


class Mesh(NamedTuple):
    """A mesh of ranks: the sizes of its axes, and a rank's link along each."""

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
            link.check()
        return self


_HALF_A_RING = Algorithm(lambda n: n - 1, lambda n: n - 1, lambda n: (n - 1) / n)
COLLECTIVES = {
    "all-reduce": ALL_REDUCE["ring"],
    "all-gather": _HALF_A_RING,
    "reduce-scatter": _HALF_A_RING,
    "all-to-all": Algorithm(lambda n: 1, lambda n: n - 1, lambda n: (n - 1) / n**2),
}


class AxisCollectives(NamedTuple):
    """The collectives of a step along its axis, forward and backward; None: nothing is sent."""

    forward: str | None
    backward: str | None


STEPS: dict[tuple[str, str], AxisCollectives] = {
    (PARTIAL, REPLICATE): AxisCollectives("all-reduce", None),
    (REPLICATE, FORKED): AxisCollectives(None, "all-reduce"),
    **{(PARTIAL, shard): AxisCollectives("reduce-scatter", "all-gather") for shard in SHARDS},
    **{(REPLICATE, shard): AxisCollectives(None, "all-gather") for shard in SHARDS},
    **{(shard, REPLICATE): AxisCollectives("all-gather", None) for shard in SHARDS},
    **{(shard, FORKED): AxisCollectives("all-gather", "reduce-scatter") for shard in SHARDS},
    **{(a, b): AxisCollectives("all-to-all", "all-to-all") for a, b in itertools.permutations(SHARDS, 2)},
}


class ConversionStep(NamedTuple):
    """One step of a conversion, along one axis, with the bytes that a rank sends and the seconds."""

    axis: int
    start: Layout
    end: Layout
    collectives: AxisCollectives
    sent: float
    seconds: float


class Conversions:
    """All conversions of one tensor on one mesh.

    ``layouts``: those that the mesh cuts evenly; ``index``: of each layout.  ``seconds[a, b]``, ``sent[a, b]``: of the
    fastest path from the a-th to the b-th layout, inf where there is none.
    """

    def __init__(self, mesh: Mesh, tensor: Tensor):
        layouts = itertools.product(TYPES, repeat=len(mesh.sizes))
        self.layouts = [layout for layout in layouts if fits(tensor, layout, mesh.sizes)]
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        n = len(self.layouts)
        self.seconds: NDArray[np.float64] = np.full((n, n), np.inf)
        self.sent: NDArray[np.float64] = np.full((n, n), np.inf)
        self._next: NDArray[Any] = np.full((n, n), -1)
        self._steps: dict[tuple[int, int], ConversionStep] = {}
        for a, start in enumerate(self.layouts):
            self._add(a, start, mesh, tensor)
            self.seconds[a, a] = self.sent[a, a] = 0.0
        self._shorten()

    def _add(self, a: int, start: Layout, mesh: Mesh, tensor: Tensor) -> None:
        """Adds the steps from ``start``, the a-th layout."""
        for (source, target), names in STEPS.items():
            for axis in (k for k, kind in enumerate(start) if kind == source):
                end = (*start[:axis], target, *start[axis + 1 :])
                inner = set(start[axis + 1 :]) & set(SHARDS)
                if end not in self.index or inner & {source, target}:
                    continue
                cut = math.prod(n for k, n in enumerate(mesh.sizes) if k != axis and start[k] in SHARDS)
                n, size, link = mesh.sizes[axis], tensor.size / cut, mesh.links[axis]
                collectives = [COLLECTIVES[name] for name in names if name is not None]
                sent = sum(c.volume(n) for c in collectives) * size
                time = sum(seconds(c, n, size, link) for c in collectives)
                step = ConversionStep(axis, start, end, names, sent=sent, seconds=time)
                b = self.index[end]
                self._steps[a, b], self._next[a, b] = step, b
                self.seconds[a, b], self.sent[a, b] = step.seconds, step.sent

    def _shorten(self) -> None:
        """Replaces steps by faster paths."""
        for via in range(len(self.layouts)):
            longer = self.seconds[:, via, None] + self.seconds[None, via]
            better = longer < self.seconds * (1 - 1e-12)
            self.sent[better] = (self.sent[:, via, None] + self.sent[None, via])[better]
            self._next[better] = np.broadcast_to(self._next[:, via, None], better.shape)[better]
            self.seconds[better] = longer[better]

    def path(self, start: Layout, end: Layout) -> list[ConversionStep]:
        """Returns the steps of the fastest path; ValueError where there is none."""
        a, b = self.index[start], self.index[end]
        check(bool(np.isfinite(self.seconds[a, b])), f"plan: no tensor goes from {start} to {end}")
        steps = []
        while a != b:
            steps.append(self._steps[a, int(self._next[a, b])])
            a = int(self._next[a, b])
        return steps
