"""The problem that a choice of layouts is: one strategy for each node of a graph, least seconds, within a memory limit.

Alpa's (Zheng et al. 2022, arXiv:2201.12023, section 4): the seconds of a node depend on its strategy, those of an edge
on the strategies of both its ends.  Nothing here knows what a strategy is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....kernels.runtime.errors import check

Floats = NDArray[np.float64]
Pick = tuple[int, ...]  # the place of the strategy of each node


class Edge(NamedTuple):
    """``seconds[i, j]`` with the i-th strategy of node ``source`` and the j-th of node ``to``; inf: they do not go
    together."""

    source: int
    to: int
    seconds: Floats


class Problem(NamedTuple):
    """``seconds`` and ``memory`` in bytes: for each node, of each of its strategies; ``limit``: bytes in all."""

    seconds: Sequence[Floats]
    memory: Sequence[Floats]
    edges: Sequence[Edge]
    limit: float = float("inf")

    def checked(self) -> "Problem":
        """Returns itself; ValueError for sizes that do not agree, or nodes without a strategy."""
        counts = [len(s) for s in self.seconds]
        check(counts == [len(m) for m in self.memory], "plan: seconds and memory must have the same strategies")
        check(bool(counts) and min(counts) > 0, f"plan: each node needs a strategy, got {counts} of them")
        for edge in self.edges:
            u, v, found = edge.source, edge.to, edge.seconds.shape
            check(u != v, f"plan: an edge joins two nodes, got {u} and {v}")
            check(
                found == (counts[u], counts[v]), f"plan: edge {u} to {v} needs {counts[u]} x {counts[v]}, got {found}"
            )
        return self

    @property
    def variables(self) -> int:
        """Those of the integer program: one a strategy, and one a pair of strategies of an edge."""
        return sum(map(len, self.seconds)) + sum(edge.seconds.size for edge in self.edges)

    def found(self, pick: Sequence[int]) -> "Found":
        """Returns what strategies cost together."""
        pick = tuple(int(p) for p in pick)
        seconds = sum(float(s[p]) for s, p in zip(self.seconds, pick))
        seconds += sum(float(edge.seconds[pick[edge.source], pick[edge.to]]) for edge in self.edges)
        return Found(pick, seconds, sum(float(m[p]) for m, p in zip(self.memory, pick)))

    def allows(self, found: "Found") -> bool:
        """Returns whether it is within the limit, to the ninth digit."""
        return found.memory <= self.limit * (1 + 1e-9)


class Found(NamedTuple):
    """Strategies, and what they cost together."""

    pick: Pick
    seconds: float
    memory: float
