"""How long a pipeline's step takes, and what each rank holds: its true action lists, run by a clock."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import check_number, number
from .action import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from .order import Order

Seconds = float | Sequence[float]  # of every stage, or of each
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
        """From the first action's start to the last one's end."""
        return max(events[-1].end for events in self.events)

    @property
    def busy(self) -> tuple[float, ...]:
        """The seconds that each rank computes."""
        return tuple(sum(e.end - e.start for e in events) for events in self.events)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait, in [0, 1]."""
        whole = len(self.events) * self.seconds
        return 1 - sum(self.busy) / whole if whole else 0.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most passes of each rank whose activations are kept at a time: from the start of F to the end of B, or of
        W where it is split."""
        split = any(e.action.kind == WEIGHT for events in self.events for e in events)
        last = WEIGHT if split else BACKWARD
        return tuple(_peak(events, last) for events in self.events)


def simulate(
    order: Order, F: Seconds, I: Seconds, W: Seconds, *, communication: float = 0.0, overhead: float = 0.0
) -> Timeline:
    """Runs the actions of ``order`` by a clock: each as soon as its rank is free and its input has arrived.

    F, I and W: the seconds of a forward pass, of the gradient of a stage's input and of its weights, of one number or
    one a stage; an action B takes I + W.  ``communication``: the seconds from a rank to another, which cost neither of
    them time.  ``overhead``: what every action takes beside.  ValueError for times that are not finite numbers of at
    least 0, another number of them than stages, and an order in which ranks wait for each other for ever.
    """
    cost = _costs(order, dict(F=F, I=I, W=W))
    for name, value in dict(communication=communication, overhead=overhead).items():
        check_number(f"simulate: {name}", value, _TIME)
    ends: dict[Action, float] = {}
    free = [0.0] * len(order.actions)
    todo = [list(reversed(actions)) for actions in order.actions]
    events: list[list[Event]] = [[] for _ in order.actions]
    while any(todo):
        moved = False
        for r, actions in enumerate(todo):
            while actions and (ready := _ready(order, actions[-1], ends, communication)) is not None:
                action = actions.pop()
                start = max(free[r], ready)
                free[r] = ends[action] = start + cost(action) + overhead
                events[r].append(Event(action, start, free[r]))
                moved = True
        waiting = ", ".join(f"rank {r} for {actions[-1]}" for r, actions in enumerate(todo) if actions)
        check(moved, f"simulate: the order of {order.schedule} ends in a deadlock: {waiting}")
    return Timeline(order, tuple(map(tuple, events)))


def _costs(order: Order, given: Mapping[str, Seconds]) -> Callable[[Action], float]:
    times: dict[str, list[float]] = {}
    for kind, seconds in given.items():
        each = list(seconds) if isinstance(seconds, Sequence) else [seconds] * order.stages
        check(
            len(each) == order.stages,
            f"simulate: {kind} must be a number, or one for each of {order.stages} stages, got {len(each)}",
        )
        for value in each:
            check_number(f"simulate: {kind}", value, _TIME)
        times[kind] = each
    times[BACKWARD] = [i + w for i, w in zip(times[INPUT], times[WEIGHT], strict=True)]
    return lambda action: times[action.kind][action.stage]


def _ready(order: Order, action: Action, ends: Mapping[Action, float], communication: float) -> float | None:
    """When what an action needs has arrived; None: not yet known."""
    stage, kind, m, chain = action
    needs: list[Action] = []
    if kind == FORWARD:
        needs = [Action(stage - 1, FORWARD, m, chain)] if stage else []
    elif kind == WEIGHT:
        needs = [Action(stage, INPUT, m, chain)]
    else:
        needs = [Action(stage, FORWARD, m, chain)]
        if stage < order.stages - 1:
            above = (Action(stage + 1, way, m, chain) for way in (BACKWARD, INPUT))
            needs.append(next((a for a in above if a in ends), Action(stage + 1, BACKWARD, m, chain)))
    if any(a not in ends for a in needs):
        return None
    places = order.ranks[chain]
    return max((ends[a] + (communication if places[a.stage] != places[stage] else 0.0) for a in needs), default=0.0)


def _peak(events: Sequence[Event], last: str) -> int:
    """The most passes whose activations are kept at a time."""
    kept = most = 0
    for event in events:
        # A pass that splits nothing of its own (the last stage of some schedules runs B whole) frees at its B.
        if event.action.kind == FORWARD:
            kept += 1
        elif event.action.kind in (last, BACKWARD):
            kept -= 1
        most = max(most, kept)
    return most
