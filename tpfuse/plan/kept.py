"""What a rank keeps for backward at a time, of how many micro-batches, by the order's own list of actions."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from ..pipeline.action import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Action
from ..pipeline.order import SCHEDULES, order

Array = np.ndarray[Any, Any]
_ROUNDS = 3  # of micro-batches, behind which every schedule only goes on as before (tests/plan/test_kept.py)
# What an action adds to the micro-batches whose activations are saved, and to those whose weight gradients wait.
_CHANGE = {FORWARD: (1, 0), BACKWARD: (-1, 0), INPUT: (-1, 1), WEIGHT: (0, -1)}
assert set(_CHANGE) == set(KINDS)


def enough(schedule: str, ranks: int, micro_batches: int, chunks: int) -> int:
    """Returns how many micro-batches keep as much at a time as ``micro_batches``, where that is fewer."""
    if schedule in ("gpipe", "chimera"):  # which keeps all; whose greedy order repeats nothing soon
        return micro_batches
    if len(SCHEDULES[schedule].chunks) > 1:  # whose warm-up depends on the length of a round
        rounds = max(1, micro_batches // ranks)
        return micro_batches // rounds * min(rounds, _ROUNDS)
    few = _ROUNDS * ranks * chunks
    return min(micro_batches, few)


def kept(schedule: str, ranks: int, micro_batches: int, chunks: int) -> tuple[Array, ...]:
    """Returns, of each rank, what it keeps at a time: rows of counts [chains, stages, 2], saved and held, each row
    once.  ValueError as :func:`order`."""
    if schedule == "gpipe":  # all of them, which is known without a list of as many actions
        rows = np.zeros((ranks, 1, 1, ranks, 2))
        rows[range(ranks), 0, 0, range(ranks), 0] = micro_batches
        return tuple(rows)
    return _kept(schedule, ranks, enough(schedule, ranks, micro_batches, chunks), chunks)


@cache
def _kept(schedule: str, ranks: int, few: int, chunks: int) -> tuple[Array, ...]:
    open_ = len(SCHEDULES[schedule].chunks) > 1
    made = order(schedule, ranks, few, chunks=chunks if open_ else None)
    return tuple(rows_of(actions, len(made.ranks), made.stages) for actions in made.actions)


def rows_of(actions: Iterable[Action], chains: int, stages: int) -> Array:
    """Returns the different counts after a rank's actions."""
    every = list(actions)
    change = np.zeros((len(every), chains, stages, 2))
    for i, a in enumerate(every):
        change[i, a.chain, a.stage] = _CHANGE[a.kind]
    made: Array = np.unique(change.cumsum(0), axis=0)
    return made
