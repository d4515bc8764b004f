"""What is kept at a time: few micro-batches say it of many."""

import numpy as np
import pytest

from tpfuse.pipeline import SCHEDULES, order
from tpfuse.pipeline.order import possible
from tpfuse.plan.kept import enough, kept, rows_of


def cases(name):
    for ranks, chunks in ((2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (3, 2), (4, 2), (2, 3), (4, 3)):
        for count in (1, 2, 4, 6, 10, 16, 21, 24, 28, 40, 66):
            if chunks in SCHEDULES[name].chunks:
                try:
                    possible(name, ranks, count, chunks)
                except ValueError:
                    continue
                yield ranks, count, chunks


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_of_a_whole_list(name):
    shortened = 0
    for ranks, count, chunks in cases(name):
        made = order(name, ranks, count, chunks=chunks)
        shortened += enough(name, ranks, count, chunks) < count
        for rows, actions in zip(kept(name, ranks, count, chunks), made.actions, strict=True):
            whole = rows_of(actions, len(made.ranks), made.stages)
            # GPipe's are their last alone, which is at least any.
            assert {r.tobytes() for r in (whole.max(0, keepdims=True) if name == "gpipe" else whole)} == {
                r.tobytes() for r in np.unique(rows, axis=0)
            }, (ranks, count, chunks)
    assert shortened or name in ("gpipe", "chimera")
