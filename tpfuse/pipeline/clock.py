"""When each action of an order begins and ends: all ranks at once, one action of each after another."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..kernels.runtime.errors import check
from .action import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from .schedules import Order

Array = np.ndarray[Any, Any]
_CODE = {kind: code for code, kind in enumerate(KINDS)}
_F, _B, _I, _W = (_CODE[kind] for kind in (FORWARD, BACKWARD, INPUT, WEIGHT))


class Clock(NamedTuple):
    """An order as arrays over all its actions, rank by rank, which ``run`` takes in microseconds an action.

    ``begins[r]``: where rank r's actions begin; the last is their number.  ``stage``, ``kind``: of each action, kinds
    as places in KINDS.  ``own``: the pass of the same stage that an action needs, and ``other``: that of the stage
    beside it; -1: none.  ``far``: whether ``other`` is another rank's.
    """

    begins: Array
    stage: Array
    kind: Array
    own: Array
    other: Array
    far: Array

    @classmethod
    def of(cls, order: Order) -> "Clock":
        every = [(a.stage, _CODE[a.kind], a.micro_batch, a.chain) for actions in order.actions for a in actions]
        stage, kind, m, chain = np.array(every, dtype=np.int32).reshape(-1, 4).T
        begins = np.cumsum([0, *map(len, order.actions)])
        # One stage beyond each end, whose passes are not there.
        place = np.full((len(order.ranks), order.stages + 2, len(KINDS), m.max(initial=0) + 1), -1, dtype=np.int32)
        place[chain, stage + 1, kind, m] = np.arange(len(every))
        at = lambda beside, code: place[chain, stage + 1 + beside, code, m]
        whole, forward = at(1, _B), kind == _F
        other = np.where(forward, at(-1, _F), np.where(kind == _W, -1, np.where(whole >= 0, whole, at(1, _I))))
        own = np.where(forward, -1, np.where(kind == _W, at(0, _I), at(0, _F)))
        # What is needed and runs nowhere is waited for for ever: it stands behind the last action.
        last = order.stages - 1
        lacks = np.where(forward, stage > 0, (kind != _W) & (stage < last)) & (other < 0)
        other = np.where(lacks, len(every), other)
        own = np.where(~forward & (own < 0), len(every), own)
        rank = np.repeat(np.arange(len(order.actions)), np.diff(begins))
        far = (other >= 0) & (other < len(every)) & (np.append(rank, 0)[other] != rank)
        return cls(begins, stage, kind, own, other, far)

    def costs(self, times: Mapping[str, Any]) -> Array:
        """Returns each action's seconds, from those of each stage by kind."""
        table: Array = np.array([times[kind] for kind in KINDS], dtype=np.float64)
        made: Array = table[self.kind, self.stage]
        return made

    def run(self, costs: Array, communication: float) -> tuple[Array, Array]:
        """Returns when each action starts and ends: as soon as its rank is free and what it needs has arrived.

        Where ranks wait for each other for ever, the actions that never run end at infinity.
        """
        n = len(costs)
        # Behind the actions: one that never ends, and (at -1) one that has ended before all.
        ends = np.full(n + 2, np.inf)
        ends[-1] = 0.0
        starts, delay = np.full(n, np.inf), np.where(self.far, communication, 0.0)
        heads, stops = self.begins[:-1].copy(), self.begins[1:]
        free, ranks = np.zeros(len(heads)), np.arange(len(heads))
        while True:
            ranks = ranks[heads[ranks] < stops[ranks]]
            at = heads[ranks]
            arrived = np.maximum(ends[self.own[at]], ends[self.other[at]] + delay[at])
            runs = arrived < np.inf
            if not runs.any():
                return starts, ends[:n]
            now, at = ranks[runs], at[runs]
            starts[at] = np.maximum(free[now], arrived[runs])
            free[now] = ends[at] = starts[at] + costs[at]
            heads[now] += 1


def clock(order: Order, times: Mapping[str, Any], communication: float, overhead: float) -> tuple[Array, Array]:
    """Returns the starts and ends of ``order``; ValueError where ranks wait for each other for ever."""
    made = Clock.of(order)
    starts, ends = made.run(made.costs(times) + overhead, communication)
    if np.isinf(ends).any():
        stuck = []
        for r, (begin, end) in enumerate(zip(made.begins, made.begins[1:], strict=False)):
            waits = np.flatnonzero(np.isinf(ends[begin:end]))
            stuck += [f"rank {r} for {order.actions[r][waits[0]]}"] if len(waits) else []
        check(False, f"simulate: the order of {order.schedule} ends in a deadlock: {', '.join(stuck)}")
    return starts, ends
