"""What is kept at a time: few micro-batches say it of many."""

import numpy as np
import pytest

from tpfuse.pipeline import SCHEDULES, order
from tpfuse.pipeline.schedules import possible
from tpfuse.tools.plan.kept import enough, kept, kept_by


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
        for own, actions in zip(kept(name, ranks, count, chunks), made.actions, strict=True):
            whole = kept_by(actions)
            # GPipe's are their last alone, which is at least any.
            counts = whole.counts.max(0, keepdims=True) if name == "gpipe" else whole.counts
            np.testing.assert_array_equal(own.counts, counts, err_msg=f"{ranks}, {count}, {chunks}")
            np.testing.assert_array_equal(own.stages, whole.stages)
    assert shortened or name in ("gpipe", "chimera")
