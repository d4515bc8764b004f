"""Micro-batches in flight: few micro-batches stand for many."""

import numpy as np
import pytest

from tpfuse.pipeline import order
from tpfuse.pipeline.schedules import EVERY, TRAINED, possible
from tpfuse.tools.plan.in_flight import equivalent_count, in_flight, of_actions


def cases(name):
    for ranks, chunks in ((2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (3, 2), (4, 2), (2, 3), (4, 3)):
        for count in (1, 2, 4, 6, 10, 16, 21, 24, 28, 40, 66):
            if chunks in EVERY[name].chunks:
                try:
                    possible(name, ranks, count, chunks)
                except ValueError:
                    continue
                yield ranks, count, chunks


@pytest.mark.parametrize("name", TRAINED)
def test_counts_of_a_full_list(name):
    shortened = 0
    for ranks, count, chunks in cases(name):
        actions_of = order(name, ranks, count, chunks=chunks).actions
        shortened += equivalent_count(name, ranks, count, chunks) < count
        for rank, actions in zip(in_flight(name, ranks, count, chunks), actions_of, strict=True):
            full = of_actions(actions)
            # GPipe's is the largest moment alone
            counts = full.counts.max(0, keepdims=True) if name == "gpipe" else full.counts
            np.testing.assert_array_equal(rank.counts, counts, err_msg=f"{ranks}, {count}, {chunks}")
            np.testing.assert_array_equal(rank.stages, full.stages)
    assert shortened or name in ("gpipe", "chimera")
