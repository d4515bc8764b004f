"""The fastest strategies by integer programming: scipy's milp, which is HiGHS (Huangfu & Hall 2018).

Variables: s[i], 1 for the strategy of a node that is taken; e[i, j] for each edge, the product of its ends'.  A sum of
e over j is s[i] and one over i is s[j]: where s is integer, e is too, so e is left continuous.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .problem import Edge, Floats, Pick, Problem, Solution

_LARGEST = 1e3  # the objective is scaled to this largest coefficient: HiGHS's gap is absolute, 1e-6


class _Constraints(NamedTuple):
    """Linear constraints: rows of a sparse matrix, and the bounds of each row's product."""

    rows: list[int]
    columns: list[int]
    values: list[float]
    low: list[float]
    high: list[float]

    def add(self, columns: Sequence[int], values: Sequence[float], low: float, high: float) -> None:
        self.rows.extend([len(self.low)] * len(columns))
        self.columns.extend(columns)
        self.values.extend(values)
        self.low.append(low)
        self.high.append(high)


def exact(problem: Problem, excluded: Sequence[Pick] = ()) -> Solution:
    """Returns the fastest solution within the limit that is none of ``excluded`` (a no-good cut each).

    ValueError where there is none, with the least memory that would do, or where scipy is missing.
    """
    cuts = list(excluded)
    while (pick := _solve(problem.checked(), cuts)) is not None:
        solution = problem.solution(pick)
        if problem.allows(solution.memory):
            return solution
        cuts.append(pick)  # beyond the limit by less than HiGHS's tolerance
    least = least_memory(problem)
    if not problem.allows(least):
        raise ValueError(f"plan: no layout fits in {problem.limit:,.0f} bytes; the least that would do is {least:,.0f}")
    raise ValueError("plan: no layout is left but those that are excluded")


def least_memory(problem: Problem) -> float:
    """Returns the least memory of any possible solution; ValueError where there is none."""
    possible = [Edge(e.source, e.to, np.where(np.isfinite(e.seconds), 0.0, np.inf)) for e in problem.edges]
    pick = _solve(problem._replace(seconds=problem.memory, edges=possible, limit=float("inf")), ())
    if pick is None:
        raise ValueError("plan: no layout is possible, whatever the memory")
    return problem.solution(pick).memory


def _solve(problem: Problem, excluded: Sequence[Pick]) -> Pick | None:
    """Returns the strategies of least seconds; None where no solution exists."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix
    except ImportError:
        raise ValueError("plan: layouts are solved by scipy: pip install 'tpfuse[plan]'") from None
    counts = [len(s) for s in problem.seconds]
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    nodes = [range(a, b) for a, b in zip(starts, starts[1:])]
    constraints = _Constraints(rows=[], columns=[], values=[], low=[], high=[])
    for node in nodes:
        constraints.add(node, [1.0] * len(node), low=1.0, high=1.0)
    end = starts[-1]
    for edge in problem.edges:
        pairs = np.arange(end, end + edge.seconds.size).reshape(edge.seconds.shape)
        end += edge.seconds.size
        for lines, node in ((pairs, nodes[edge.source]), (pairs.T, nodes[edge.to])):
            for line, strategy in zip(lines.tolist(), node):
                constraints.add([*line, strategy], [*[1.0] * len(line), -1.0], low=0.0, high=0.0)
    if np.isfinite(problem.limit):
        # in units of the largest possible memory, so that HiGHS's tolerance is relative to it
        memory = np.concatenate(problem.memory)
        unit = max(sum(float(m.max()) for m in problem.memory), 1e-300)
        constraints.add(range(starts[-1]), (memory / unit).tolist(), low=-np.inf, high=problem.limit / unit)
    for pick in excluded:
        taken = [node[p] for node, p in zip(nodes, pick)]
        constraints.add(taken, [1.0] * len(taken), low=-np.inf, high=len(taken) - 1.0)
    costs: Floats = np.concatenate([*problem.seconds, *(edge.seconds.ravel() for edge in problem.edges)])
    possible = np.isfinite(costs)
    costs = np.where(possible, costs, 0.0)
    entries = constraints.values, (constraints.rows, constraints.columns)
    matrix = coo_matrix(entries, shape=(len(constraints.low), end)).tocsr()
    result = milp(
        costs * (_LARGEST / max(float(np.abs(costs).max()), 1e-300)),
        constraints=LinearConstraint(matrix, constraints.low, constraints.high),
        bounds=Bounds(0, possible.astype(float)),
        integrality=np.arange(end) < starts[-1],
        options=dict(mip_rel_gap=0.0),
    )
    if result.x is None:
        return None
    return tuple(int(np.argmax(result.x[a:b])) for a, b in zip(starts, starts[1:]))
