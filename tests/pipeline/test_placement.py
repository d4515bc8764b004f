"""Which layers a stage has: the cheapest cut, found by trying all."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpfuse.pipeline.placement import PartCosts, Stage, balanced, chunks_of, stage_of


def costliest(costs, sizes):
    begins = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    stages = [sum(costs.blocks[a:b]) for a, b in itertools.pairwise(begins)]
    stages[0] += costs.embedding
    stages[-1] += costs.head
    return max(stages)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 20), st.integers(0, 20), st.integers(1, 4))
def test_no_cut_is_cheaper(blocks, embedding, head, count):
    costs, n = PartCosts(embedding, blocks, head), len(blocks)
    count = min(count, n)
    sizes = balanced(costs, count)
    assert len(sizes) == count and sum(sizes) == n and min(sizes) > 0
    cuts = itertools.combinations(range(1, n), count - 1)
    every = [[b - a for a, b in itertools.pairwise((0, *cut, n))] for cut in cuts]
    assert costliest(costs, sizes) == min(costliest(costs, cut) for cut in every)


def test_a_heavy_head_takes_layers_from_the_last_stage():
    assert balanced(PartCosts(0, [1.0] * 8, 3.0), 2) == [5, 3]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv", "chimera"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layer_has_a_place(schedule, ranks):
    costs = PartCosts(0, [1.0] * 8, 0)
    held = [chunks_of("GPT", Stage(r, ranks, schedule), costs) for r in range(ranks)]
    copies = 2 if schedule == "chimera" else 1
    assert sorted(layer for chunks in held for c in chunks for layer in c.layers) == sorted(list(range(8)) * copies)
    assert all((c.layers[0] == 0) == c.is_first and (c.layers[-1] == 7) == c.is_last for chunks in held for c in chunks)


@pytest.mark.parametrize("given", [(0,), (0, 0), (-1, 2), (2, 2), (0, 2, "x"), (0, 2, "zbv", 3), [0, 2], 1, ("0", 2)])
def test_what_is_no_stage_is_refused(given):
    with pytest.raises(ValueError, match="^GPT: "):
        stage_of("GPT", given)
