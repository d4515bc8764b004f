"""Coordinate descent, the search of AutoDDL (Chen et al. 2023, arXiv:2301.06813): needs no solver, proves nothing.

From each start one node after another takes the strategy that is best while the rest stay, until none changes.  Then
two neighbours move together: under a memory limit one weight may have to shrink for another to grow, and a change of
layout often pays only where both ends of an edge change.
"""

from collections.abc import Sequence

import numpy as np

from ....kernels.runtime.errors import check
from .problem import Floats, Pick, Problem, Solution


def descent(problem: Problem, starts: Sequence[Pick], seed: int = 0) -> Solution:
    """Returns the fastest of the solutions that the descents from ``starts`` end in; ``seed`` shuffles the nodes for
    each.

    ValueError where none of them ends within the limit, with the nearest.
    """
    problem.checked()
    check(len(starts) > 0, "plan: a descent needs a start, got none")
    rng = np.random.default_rng(seed)
    ends = [problem.solution(_Descent(problem, pick).run(rng)) for pick in starts]
    fitting = [end for end in ends if problem.allows(end.memory) and np.isfinite(end.seconds)]
    if not fitting:
        raise ValueError(
            f"plan: no descent of {len(starts)} fits in {problem.limit:,.0f} bytes; the nearest holds"
            f" {min(end.memory for end in ends):,.0f}"
        )
    return min(fitting, key=lambda end: end.seconds)


class _Descent:
    """One descent.  It minimizes (bytes beyond the limit, seconds), in that order; impossible combinations of
    strategies count as slower than any possible ones."""

    def __init__(self, problem: Problem, pick: Pick):
        self.problem, self.pick = problem, list(pick)
        self.most = sum(float(m.max()) for m in problem.memory) or 1.0
        finite = sum(float(np.abs(s).max()) for s in problem.seconds)
        finite += sum(float(np.abs(e.seconds[np.isfinite(e.seconds)]).max(initial=0.0)) for e in problem.edges)
        impossible = 2 * finite + 1.0
        self.pairs: dict[tuple[int, int], Floats] = {}  # (u, v) -> seconds, both ways of each edge
        for edge in problem.edges:
            seconds = np.where(np.isfinite(edge.seconds), edge.seconds, impossible)
            for u, v, matrix in ((edge.source, edge.to, seconds), (edge.to, edge.source, seconds.T)):
                self.pairs[u, v] = self.pairs[u, v] + matrix if (u, v) in self.pairs else matrix
        self.neighbours: list[list[int]] = [[] for _ in problem.seconds]
        for u, v in self.pairs:
            self.neighbours[u].append(v)

    def run(self, rng: np.random.Generator) -> Pick:
        """Moves until nothing improves."""
        nodes = rng.permutation(len(self.pick)).tolist()
        edges = rng.permutation([pair for pair in self.pairs if pair[0] < pair[1]]).tolist()
        while any([self._one(u) for u in nodes]) or any([self._two(u, v) for u, v in edges]):
            pass
        return tuple(self.pick)

    def _seconds(self, u: int, without: int | None = None) -> Floats:
        """Returns the seconds of each strategy of a node, with those of its edges except the one to ``without``."""
        edges = (self.pairs[u, v][:, self.pick[v]] for v in self.neighbours[u] if v != without)
        return self.problem.seconds[u] + sum(edges, np.zeros(len(self.problem.seconds[u])))

    def _one(self, u: int) -> bool:
        best = self._better(self._seconds(u), self.problem.memory[u], [u])
        if best is not None:
            self.pick[u] = best
        return best is not None

    def _two(self, u: int, v: int) -> bool:
        seconds = self._seconds(u, v)[:, None] + self._seconds(v, u)[None] + self.pairs[u, v]
        memory = self.problem.memory[u][:, None] + self.problem.memory[v][None]
        best = self._better(seconds.ravel(), memory.ravel(), [u, v])
        if best is not None:
            self.pick[u], self.pick[v] = divmod(best, seconds.shape[1])
        return best is not None

    def _better(self, seconds: Floats, memory: Floats, moving: Sequence[int]) -> int | None:
        """Returns the index of the best strategy, or pair of strategies row by row; None where the current one is as
        good."""
        m, pick = self.problem.memory, self.pick
        fixed = sum(float(m[w][p]) for w, p in enumerate(pick) if w not in moving)
        beyond = np.maximum(fixed + memory - self.problem.limit * (1 + 1e-9), 0.0)
        beyond = np.round(beyond / self.most, 12)  # equal strategies must compare as equal, or it might not end
        best = int(np.lexsort((seconds, beyond))[0])
        current = 0
        for w in moving:
            current = current * len(m[w]) + pick[w]
        faster = seconds[best] < seconds[current] - 1e-12 * abs(seconds[current])
        return best if beyond[best] < beyond[current] or (beyond[best] == beyond[current] and faster) else None
