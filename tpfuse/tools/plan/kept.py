"""What a rank keeps for backward at a time, of how many micro-batches, by the order's own list of actions."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...pipeline.action import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Action
from ...pipeline.schedules import SCHEDULES, Order, order

Array = np.ndarray[Any, Any]
_ROUNDS = 3  # of micro-batches, behind which every schedule only goes on as before (tests/tools/plan/test_kept.py)
# What an action adds to the micro-batches whose activations are saved, and to those whose weight gradients wait.
_CHANGE = {FORWARD: (1, 0), BACKWARD: (-1, 0), INPUT: (-1, 1), WEIGHT: (0, -1)}
assert set(_CHANGE) == set(KINDS)


class Kept(NamedTuple):
    """What a rank keeps at a time.

    ``stages`` [p]: those that it holds, chain by chain.  ``counts`` [times, p, 2]: micro-batches whose activations are
    saved and those whose weight gradients wait, each time once.
    """

    stages: Array
    counts: Array

    def most(self, sizes: Array) -> float:
        """Returns the most bytes at a time; ``sizes`` [all stages, 2]: of a micro-batch that is saved, and of one that
        waits."""
        return float((self.counts * sizes[self.stages]).sum((1, 2)).max())


def enough(schedule: str, ranks: int, micro_batches: int, chunks: int) -> int:
    """Returns how many micro-batches keep as much at a time as ``micro_batches``, where that is fewer."""
    if schedule in ("gpipe", "chimera"):  # which keeps all; whose greedy order repeats nothing soon
        return micro_batches
    if len(SCHEDULES[schedule].chunks) > 1:  # whose warm-up depends on the length of a round
        rounds = max(1, micro_batches // ranks)
        return micro_batches // rounds * min(rounds, _ROUNDS)
    few = _ROUNDS * ranks * chunks
    return min(micro_batches, few)


def kept(schedule: str, ranks: int, micro_batches: int, chunks: int) -> tuple[Kept, ...]:
    """Returns what each rank keeps.  ValueError as :func:`order`."""
    if schedule == "gpipe":  # all of them, which is known without a list of as many actions
        all_of_them = np.array([[[micro_batches, 0.0]]])
        return tuple(Kept(np.array([rank]), all_of_them) for rank in range(ranks))
    return _kept(schedule, ranks, enough(schedule, ranks, micro_batches, chunks), chunks)


@cache
def _kept(schedule: str, ranks: int, few: int, chunks: int) -> tuple[Kept, ...]:
    return tuple(map(kept_by, ordered(schedule, ranks, few, chunks).actions))


def ordered(schedule: str, ranks: int, micro_batches: int, chunks: int) -> Order:
    """Returns the order of a split, whose chunks a schedule may leave no choice of.  ValueError as :func:`order`."""
    open_ = len(SCHEDULES[schedule].chunks) > 1
    return order(schedule, ranks, micro_batches, chunks=chunks if open_ else None)


def kept_by(actions: Sequence[Action]) -> Kept:
    """Returns what a rank keeps that does these actions."""
    places = sorted({(a.chain, a.stage) for a in actions})
    number = {place: i for i, place in enumerate(places)}
    change = np.zeros((len(actions), len(places), 2), dtype=np.int32)
    for i, a in enumerate(actions):
        change[i, number[a.chain, a.stage]] = _CHANGE[a.kind]
    return Kept(np.array([stage for _, stage in places]), np.unique(change.cumsum(0), axis=0))
