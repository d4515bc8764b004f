"""Cuts of layers into stages, against every cut."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.plan import fake
from tpfuse.tools.plan.layers import cut
from tpfuse.tools.plan.spans import Spans
from tpfuse.tools.plan.split import Split


def every(layers, stages):
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(np.diff([0, *inner, layers]).tolist())


def slowest(costs, sizes):
    begins = np.cumsum([0, *sizes])
    return max(cost[i, j] for cost, i, j in zip(costs, begins, begins[1:], strict=False))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cut_is_the_best_of_all(data):
    layers = data.draw(st.integers(1, 7))
    stages = data.draw(st.integers(1, layers))
    time = st.one_of(st.floats(0, 9), st.just(np.inf))
    matrix = st.lists(time, min_size=(layers + 1) ** 2, max_size=(layers + 1) ** 2)
    costs = [np.reshape(data.draw(matrix), (layers + 1, layers + 1)) for _ in range(stages)]
    best = min(slowest(costs, sizes) for sizes in every(layers, stages))
    found = cut(costs)
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert sum(found) == layers and min(found) >= 1 and slowest(costs, found) == best


def test_a_heavy_head_leaves_its_stage_fewer_blocks():
    costs = fake.Costs((1.0,) * 8, embedding=0.0, head=2.1)
    spans = Spans(costs(fake.job(8), Split()), split=False)
    assert cut([spans.windows(s, 4).both for s in range(4)]) == (3, 2, 2, 1)


@pytest.mark.parametrize("layers", [(1, 3), (2, 2), (1, 1, 2)])
def test_windows_and_cuts_are_the_same_stages(layers):
    spans = Spans(fake.Costs((1.0, 2.0, 0.5, 1.5))(fake.job(), Split()), split=True)
    begins = np.cumsum([0, *layers])
    stages = spans.cut(layers)
    for s, (i, j) in enumerate(zip(begins, begins[1:], strict=False)):
        window = spans.windows(s, len(layers))
        assert window.both[i, j] == pytest.approx(stages.both[s])
        assert window.parameters[i, j] == pytest.approx(stages.parameters[s])
    whole = spans.total(len(layers))
    assert whole.both[0] == pytest.approx(stages.both.sum()) and whole.saved[0] == pytest.approx(stages.saved.sum())
