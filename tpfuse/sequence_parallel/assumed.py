"""Numbers of rows where nothing is computed: on meta tensors no router says which experts rows have.

with assumed_imbalance(1.3):
    model(ids, labels=ids)  # on the meta device: of the rank whose experts have the most rows
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from ..parallel import TensorParallel

_imbalance = ContextVar("imbalance", default=1.0)


@contextlib.contextmanager
def assumed_imbalance(imbalance: float) -> Iterator[None]:
    """Takes this rank's experts for the busiest ones for a while, with ``imbalance`` times the mean of the ranks' rows.

    Each rank sends it as many, and the rest evenly to the others.  1: all ranks have the same number.
    """
    token = _imbalance.set(imbalance)
    try:
        yield
    finally:
        _imbalance.reset(token)


def assumed_rows(rows: int, tp: TensorParallel) -> tuple[list[int], list[int]]:
    """Returns how many of its ``rows``, a row once for each of its experts, this rank sends to each rank, and how many
    it receives from each."""
    mine = round(rows * _imbalance.get() / tp.size)
    left, others = rows - mine, tp.size - 1
    sent = [left * (i + 1) // others - left * i // others for i in range(others)]
    return [*sent[: tp.rank], mine, *sent[tp.rank :]], [mine] * tp.size
