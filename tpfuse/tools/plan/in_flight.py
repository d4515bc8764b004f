"""Micro-batches in flight: how many a rank keeps activations of at a time, by the schedule's own list of actions."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...pipeline.action import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, Action
from ...pipeline.schedules import EVERY, Order, begun, order

Array = np.ndarray[Any, Any]
_ROUNDS = 3  # rounds of micro-batches after which every schedule repeats (tests/tools/plan/test_in_flight.py)
# Effect of an action on the micro-batches whose activations are saved, and on those whose weight gradients wait.
_CHANGE = {FORWARD: (1, 0), BACKWARD: (-1, 0), INPUT: (-1, 1), WEIGHT: (0, -1)}
assert set(_CHANGE) == set(KINDS)


class InFlight(NamedTuple):
    """Micro-batches in flight on a rank.

    ``stages`` [p]: stages that it holds, chain by chain.  ``counts`` [times, p, 2]: micro-batches whose activations are
    saved and those whose weight gradients wait, each distinct moment once.
    """

    stages: Array
    counts: Array

    def peak(self, sizes: Array) -> float:
        """Returns the most bytes at a time; ``sizes`` [all stages, 2]: bytes of a saved micro-batch, and of one that
        waits."""
        return float((self.counts * sizes[self.stages]).sum((1, 2)).max())


def equivalent_count(schedule: str, ranks: int, micro_batches: int, chunks: int) -> int:
    """Returns a smaller number of micro-batches with the same counts in flight; ``micro_batches`` where none is
    known."""
    if schedule in ("gpipe", "chimera"):  # GPipe keeps all; Chimera's greedy order does not repeat soon
        return micro_batches
    if len(EVERY[schedule].chunks) > 1:  # the warm-up depends on the length of a round
        rounds = max(1, micro_batches // ranks)
        return micro_batches // rounds * min(rounds, _ROUNDS)
    return min(micro_batches, _ROUNDS * ranks * chunks)


def in_flight(schedule: str, ranks: int, micro_batches: int, chunks: int) -> tuple[InFlight, ...]:
    """Returns the micro-batches in flight on each rank.  ValueError as :func:`order`."""
    if schedule == "gpipe":  # all of them: no need for a list of as many actions
        counts = np.array([[[micro_batches, 0.0]]])
        return tuple(InFlight(np.array([rank]), counts) for rank in range(ranks))
    return _of_order(schedule, ranks, equivalent_count(schedule, ranks, micro_batches, chunks), chunks)


@cache
def _of_order(schedule: str, ranks: int, count: int, chunks: int) -> tuple[InFlight, ...]:
    return tuple(map(of_actions, ordered(schedule, ranks, count, chunks).actions))


def ordered(schedule: str, ranks: int, micro_batches: int, chunks: int) -> Order:
    """Returns the order of a split; ``chunks`` counts where the schedule leaves a choice.  ValueError as
    :func:`order`."""
    open_ = len(EVERY[schedule].chunks) > 1
    return order(schedule, ranks, micro_batches, chunks=chunks if open_ else None)


def of_actions(actions: Sequence[Action]) -> InFlight:
    """Returns the micro-batches in flight on a rank that does these actions."""
    positions = sorted({(a.chain, a.stage) for a in actions})
    number = {position: i for i, position in enumerate(positions)}
    change = np.zeros((len(actions) + 1, len(positions), 2), dtype=np.int32)  # the first: of the step before
    for a in begun(actions):
        change[0, number[a.chain, a.stage]] += _CHANGE[FORWARD]
    for i, a in enumerate(actions, 1):
        change[i, number[a.chain, a.stage]] = _CHANGE[a.kind]
    return InFlight(np.array([stage for _, stage in positions]), np.unique(change.cumsum(0), axis=0))
