"""The optimization problem of layouts: one strategy for each node of a graph, least seconds, within a memory limit.

Alpa's (Zheng et al. 2022, arXiv:2201.12023, section 4): the seconds of a node depend on its strategy, those of an edge
on the strategies of both its ends.  Strategies are only indices here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....kernels.runtime.errors import check

Floats = NDArray[np.float64]
Pick = tuple[int, ...]  # the index of the strategy of each node


class Edge(NamedTuple):
    """An edge between nodes: ``seconds[i, j]`` with the i-th strategy of ``source`` and the j-th of ``to``; inf: they
    cannot be combined."""

    source: int
    to: int
    seconds: Floats


class Problem(NamedTuple):
    """Seconds and memory in bytes of each strategy of each node; ``limit``: bytes in all."""

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
            u, v, shape = edge.source, edge.to, edge.seconds.shape
            check(u != v, f"plan: an edge joins two nodes, got {u} and {v}")
            right = shape == (counts[u], counts[v])
            check(right, f"plan: edge {u} to {v} needs {counts[u]} x {counts[v]}, got {shape}")
        return self

    @property
    def variables(self) -> int:
        """The number of variables of the integer program: one a strategy, and one a pair of strategies of an edge."""
        return sum(map(len, self.seconds)) + sum(edge.seconds.size for edge in self.edges)

    def solution(self, pick: Sequence[int]) -> "Solution":
        """Returns the strategies with their total cost."""
        pick = tuple(int(p) for p in pick)
        seconds = sum(float(s[p]) for s, p in zip(self.seconds, pick))
        seconds += sum(float(edge.seconds[pick[edge.source], pick[edge.to]]) for edge in self.edges)
        return Solution(pick, seconds, sum(float(m[p]) for m, p in zip(self.memory, pick)))

    def allows(self, memory: float) -> bool:
        """Returns whether so many bytes are within the limit, to the ninth digit."""
        return memory <= self.limit * (1 + 1e-9)


class Solution(NamedTuple):
    """A choice of strategies, and their total cost."""

    pick: Pick
    seconds: float
    memory: float
