"""Spans of blocks: partitions into stages against all partitions, spans against stages, and what searches share."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.plan import fake
from tpfuse.pipeline.placement import partition
from tpfuse.tools.plan.search import search
from tpfuse.tools.plan.spans import SpanCache, Spans
from tpfuse.tools.plan.split import Split


def partitions(layers, stages):
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(np.diff([0, *inner, layers]).tolist())


def slowest(costs, sizes):
    begins = np.cumsum([0, *sizes])
    return max(cost[i, j] for cost, i, j in zip(costs, begins, begins[1:], strict=False))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_partition_is_the_best_of_all(data):
    layers = data.draw(st.integers(1, 7))
    stages = data.draw(st.integers(1, layers))
    time = st.one_of(st.floats(0, 9), st.just(np.inf))
    matrix = st.lists(time, min_size=(layers + 1) ** 2, max_size=(layers + 1) ** 2)
    costs = [np.reshape(data.draw(matrix), (layers + 1, layers + 1)) for _ in range(stages)]
    best = min(slowest(costs, sizes) for sizes in partitions(layers, stages))
    sizes = partition(costs)
    assert (sizes is None) == np.isinf(best)
    if sizes is not None:
        assert sum(sizes) == layers and min(sizes) >= 1 and slowest(costs, sizes) == best


def test_a_heavy_head_leaves_its_stage_fewer_blocks():
    pieces = fake.PieceCosts((1.0,) * 8, embedding=0.0, head=2.1)
    assert Spans(pieces(fake.job(8), Split()), split=False).fastest(4) == (3, 2, 2, 1)


@pytest.mark.parametrize("layers", [(1, 3), (2, 2), (1, 1, 2)])
def test_spans_and_stages_agree(layers):
    spans = Spans(fake.PieceCosts((1.0, 2.0, 0.5, 1.5))(fake.job(), Split()), split=True)
    begins = np.cumsum([0, *layers])
    stages = spans.cut(layers)
    for s, (i, j) in enumerate(zip(begins, begins[1:], strict=False)):
        span = spans.span_costs(s, len(layers))
        assert span.both[i, j] == pytest.approx(stages.both[s])
        assert span.parameters[i, j] == pytest.approx(stages.parameters[s])
    total = spans.total(len(layers))
    assert total.both[0] == pytest.approx(stages.both.sum()) and total.saved[0] == pytest.approx(stages.saved.sum())


def test_a_second_search_costs_only_new_pieces():
    pieces, cache = fake.PieceCosts(), SpanCache()
    one = search(fake.job(), 4, fake.costs(pieces), cache=cache)
    calls = len(pieces.keys)
    two = search(fake.job(), 4, fake.costs(pieces, hop=0.1), cache=cache)
    assert len(pieces.keys) == calls and two.steps
    alone = search(fake.job(), 4, fake.costs(pieces, hop=0.1))
    assert [s.seconds for s in two.steps] == [s.seconds for s in alone.steps] != [s.seconds for s in one.steps]
    assert len(pieces.keys) > calls


def test_an_impossible_split_is_costed_once():
    pieces, cache = fake.PieceCosts(), SpanCache()
    for _ in range(2):
        with pytest.raises(ValueError, match="four heads cannot be split"):
            cache.spans(fake.job(), Split(tp=8), pieces)
    assert len(pieces.keys) == 1
