"""The time of a pipeline's step, and the activations each rank holds: its true action lists, run by a clock."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import check_number, number
from .action import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from .clock import Array, clock
from .schedules import WITHOUT_FLUSH, Order, begun

Seconds = float | Sequence[float]  # of every stage, or of each
Messages = float | Sequence[Sequence[float]]  # seconds between every two ranks, or from each rank to each
_TIME = number(0, 1e9)


class Event(NamedTuple):
    """An action with its time, in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """``events[r]`` are those of rank r, in their order."""

    order: Order
    events: tuple[tuple[Event, ...], ...]

    @property
    def seconds(self) -> float:
        """From the first action's start to the last one's end; without a flush, of the rank where this is longest."""
        if self.order.schedule in WITHOUT_FLUSH:
            return max(events[-1].end - events[0].start for events in self.events)
        return max(events[-1].end for events in self.events)

    @property
    def busy(self) -> tuple[float, ...]:
        """The seconds that each rank computes."""
        return tuple(sum(e.end - e.start for e in events) for events in self.events)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait, in [0, 1]."""
        total = len(self.events) * self.seconds
        return 1 - sum(self.busy) / total if total else 0.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The largest number of passes whose activations each rank holds at a time: from the start of F to the end of
        B, or of W if backward is split."""
        split = any(e.action.kind == WEIGHT for events in self.events for e in events)
        frees = WEIGHT if split else BACKWARD
        return tuple(_peak(events, frees) for events in self.events)


def simulate(
    order: Order, F: Seconds, I: Seconds, W: Seconds, *, communication: Messages = 0.0, overhead: float = 0.0
) -> Timeline:
    """Runs the actions of ``order`` by a clock: each as soon as its rank is free and its input has arrived.

    F, I and W: the seconds of a forward pass, of the gradient of a stage's input and of its weights; one number, or
    one a stage.  An action B takes I + W.  ``communication``: the seconds of a message between ranks, which occupies
    neither; one number, or ``communication[i][j]`` from rank i to rank j.  ``overhead``: seconds added to every action.
    ValueError for times that are not finite numbers of at least 0, lists that have not one time a stage or a pair of
    ranks, and an order that deadlocks.
    """
    times = _times(order, dict(F=F, I=I, W=W))
    check_number("simulate: overhead", overhead, _TIME)
    messages = _messages(len(order.actions), communication)
    starts, ends = (iter(x.tolist()) for x in clock(order, times, messages, overhead))
    events = (tuple(Event(a, next(starts), next(ends)) for a in actions) for actions in order.actions)
    return Timeline(order, tuple(events))


def _messages(ranks: int, communication: Messages) -> Array:
    """Returns the seconds of a message from each rank to each."""
    if not isinstance(communication, (Sequence, np.ndarray)):
        check_number("simulate: communication", communication, _TIME)
        return np.where(np.eye(ranks, dtype=bool), 0.0, communication)
    lengths = [len(row) if isinstance(row, (Sequence, np.ndarray)) else 1 for row in communication]
    check(
        lengths == [ranks] * ranks,
        f"simulate: communication must be a number, or {ranks} lists of {ranks}, got lengths {lengths}",
    )
    for value in (value for row in communication for value in row):
        check_number("simulate: communication", float(value), _TIME)
    return np.array(communication, dtype=np.float64)


def _times(order: Order, seconds_of: Mapping[str, Seconds]) -> dict[str, list[float]]:
    """Returns the seconds of each stage by kind of action."""
    times: dict[str, list[float]] = {}
    for kind, seconds in seconds_of.items():
        per_stage = list(seconds) if isinstance(seconds, Sequence) else [seconds] * order.stages
        check(
            len(per_stage) == order.stages,
            f"simulate: {kind} must be a number, or one for each of {order.stages} stages, got {len(per_stage)}",
        )
        for value in per_stage:
            check_number(f"simulate: {kind}", value, _TIME)
        times[kind] = per_stage
    times[BACKWARD] = [i + w for i, w in zip(times[INPUT], times[WEIGHT], strict=True)]
    return times


def _peak(events: Sequence[Event], frees: str) -> int:
    """Returns the largest number of passes whose activations are held at a time; a step may begin with some."""
    held = most = len(begun([e.action for e in events]))
    for event in events:
        # A pass that splits nothing of its own (the last stage of some schedules runs B whole) frees at its B.
        if event.action.kind == FORWARD:
            held += 1
        elif event.action.kind in (frees, BACKWARD):
            held -= 1
        most = max(most, held)
    return most
