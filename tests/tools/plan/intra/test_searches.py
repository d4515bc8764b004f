"""The searches on problems of any kind: integer programming against all choices, coordinate descent against it.

Spans: tpfuse/tools/plan/intra/milp.py, coordinate_descent.py and problem.py, which solve the same problems.
"""

import builtins
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpfuse.tools.plan.intra.coordinate_descent import descent
from tpfuse.tools.plan.intra.milp import exact, least_memory
from tpfuse.tools.plan.intra.problem import Edge, Problem

INF = float("inf")


def brute(problem):
    """All choices within the limit, the fastest at the front."""
    picks = itertools.product(*(range(len(s)) for s in problem.seconds))
    choices = [f for f in map(problem.solution, picks) if problem.allows(f.memory) and f.seconds < INF]
    return sorted(choices, key=lambda solution: solution.seconds)


@st.composite
def problems(draw):
    """Up to six nodes with up to four strategies, edges between any two, and some impossible pairs of strategies."""
    n = draw(st.integers(2, 6))
    counts = [draw(st.integers(1, 4)) for _ in range(n)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pairs = [pair[:: int(rng.choice([1, -1]))] for pair in itertools.combinations(range(n), 2) if rng.random() < 0.6]
    impossible = draw(st.sampled_from([0.0, 0.2]))
    edges = []
    for u, v in pairs:
        seconds = rng.integers(0, 50, (counts[u], counts[v])) * 1e-4
        edges.append(Edge(u, v, np.where(rng.random(seconds.shape) < impossible, INF, seconds)))
    seconds = [rng.integers(0, 100, c) * 1e-4 for c in counts]
    memory = [rng.integers(1, 9, c) * 1e9 for c in counts]
    low, high = (sum(f(m) for m in memory) for f in (np.min, np.max))
    limit = draw(st.sampled_from([INF, low, (low + high) / 2]))
    return Problem(seconds, memory, edges, limit)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_exact_is_the_best_of_all(problem):
    choices = brute(problem)
    if not choices:
        with pytest.raises(ValueError, match="no layout"):
            exact(problem)
        return
    best = exact(problem)
    assert best == problem.solution(best.pick) and problem.allows(best.memory)
    assert best.seconds == pytest.approx(choices[0].seconds, abs=1e-12)
    if len(choices) > 1:
        second = exact(problem, [best.pick])
        assert second.pick != best.pick and second.seconds == pytest.approx(choices[1].seconds, abs=1e-12)
    else:
        with pytest.raises(ValueError, match="no layout is left but those that are excluded"):
            exact(problem, [best.pick])


@settings(max_examples=25, deadline=None)
@given(problems(), st.integers(0, 9))
def test_descent_is_never_better(problem, seed):
    """It ends where no single node can move to a faster strategy."""
    choices = brute(problem)
    starts = [tuple(0 for _ in problem.seconds), tuple(len(s) - 1 for s in problem.seconds)]
    try:
        solution = descent(problem, starts, seed)
    except ValueError:
        return
    assert problem.allows(solution.memory) and solution.seconds >= choices[0].seconds - 1e-12
    near = [
        choice
        for choice in choices
        if choice.seconds < solution.seconds - 1e-9 and sum(a != b for a, b in zip(choice.pick, solution.pick)) == 1
    ]
    assert near == []
    assert descent(problem, starts, seed) == solution


def test_two_neighbours_move_together():
    """Each alone would take longer: (0, 0) to (1, 1) is by a pair or not at all."""
    edge = Edge(0, 1, np.array([[2.0, 9.0], [9.0, 1.0]]))
    problem = Problem([np.zeros(2)] * 2, [np.zeros(2)] * 2, [edge])
    assert descent(problem, [(0, 0)]).pick == (1, 1) == exact(problem).pick


def test_a_weight_pays_for_another():
    """Under a limit of one large weight: the descent that begins with the wrong one changes both."""
    edge = Edge(0, 1, np.zeros((2, 2)))
    problem = Problem([np.array([5.0, 1.0]), np.array([3.0, 2.0])], [np.array([1.0, 4.0])] * 2, [edge], 5.0)
    assert descent(problem, [(0, 1)]).pick == (1, 0) == exact(problem).pick


def test_the_least_memory():
    edge = Edge(0, 1, np.array([[INF, 1.0], [1.0, 1.0]]))
    problem = Problem([np.zeros(2)] * 2, [np.array([1.0, 4.0]), np.array([2.0, 3.0])], [edge], 3.5)
    assert least_memory(problem) == 4.0
    with pytest.raises(ValueError, match="no layout fits in 4 bytes; the least that would do is 4"):
        exact(problem)
    assert exact(problem._replace(limit=4.0)).pick == (0, 1)
    nothing = problem._replace(edges=[Edge(0, 1, np.full((2, 2), INF))])
    with pytest.raises(ValueError, match="no layout is possible, whatever the memory"):
        exact(nothing)
    with pytest.raises(ValueError, match="no descent of 1 fits"):
        descent(problem, [(0, 0)])


@pytest.mark.parametrize(
    "problem, message",
    [
        (Problem([np.zeros(2)], [np.zeros(1)], []), "the same strategies"),
        (Problem([np.zeros(0)], [np.zeros(0)], []), "each node needs a strategy"),
        (Problem([np.zeros(1)] * 2, [np.zeros(1)] * 2, [Edge(0, 0, np.zeros((1, 1)))]), "an edge joins two nodes"),
        (Problem([np.zeros(1)] * 2, [np.zeros(1)] * 2, [Edge(0, 1, np.zeros((1, 2)))]), "edge 0 to 1 needs 1 x 1"),
    ],
)
def test_problems_that_are_none(problem, message):
    for search in (exact, lambda p: descent(p, [(0,) * len(p.seconds)])):
        with pytest.raises(ValueError, match=message):
            search(problem)
    with pytest.raises(ValueError, match="a descent needs a start, got none"):
        descent(Problem([np.zeros(1)], [np.zeros(1)], []), [])


def test_without_scipy(monkeypatch):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("scipy"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'tpfuse\[plan\]'"):
        exact(Problem([np.zeros(1)], [np.zeros(1)], []))
