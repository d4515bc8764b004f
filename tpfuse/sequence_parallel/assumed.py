"""Numbers of rows where nothing is computed: on meta tensors no router says which experts rows have.

with assumed_imbalance(1.3):
    model(ids, labels=ids)  # on the meta device: of the rank whose experts have the most rows
"""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

from ..parallel import TensorParallel
from .records import Traffic

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


def reach(share: float, k: int, experts: int) -> float:
    """Returns how many of the rows have one or more of a ``share`` of the ``experts``, if all choices of k are equally
    frequent (of a share that is no whole number of experts, the same product)."""
    elsewhere = experts * (1 - share)
    return 1 - math.prod(max(0.0, elsewhere - i) / (experts - i) for i in range(k))


def assumed_traffic(rows: int, k: int, experts: int, tp: TensorParallel) -> tuple[Traffic, Traffic]:
    """Returns the traffic of rows, each of which goes once to a rank that has one of its k experts, and that of the
    results for each of them."""
    busiest, peers = _imbalance.get() / tp.size, tp.size - 1
    mine = round(k * rows * busiest)
    left = k * rows - mine
    results = [left * (i + 1) // peers - left * i // peers for i in range(peers)]
    rows_here, rows_there = (round(rows * reach(s, k, experts)) for s in (busiest, (1 - busiest) / peers))
    of_all = lambda here, there: Traffic([*there[: tp.rank], here, *there[tp.rank :]], [here] * tp.size)
    return of_all(rows_here, [rows_there] * peers), of_all(mine, results)
