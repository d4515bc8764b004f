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


class OrderArrays(NamedTuple):
    """An order as arrays over all its actions, rank by rank; ``run`` takes microseconds an action.

    ``begins[r]``: index of rank r's first action; one more entry is the number of actions.  ``stage``, ``kind``: of
    each action, kinds as indices into KINDS.  ``same``: the pass of the same stage that an action needs, ``adjacent``:
    that of a neighbouring stage; -1: none.  ``sender``, ``rank``: those that run ``adjacent`` and the action.
    """

    begins: Array
    stage: Array
    kind: Array
    same: Array
    adjacent: Array
    sender: Array
    rank: Array

    @classmethod
    def of(cls, order: Order) -> "OrderArrays":
        rows = [(a.stage, _CODE[a.kind], a.micro_batch, a.chain) for actions in order.actions for a in actions]
        stage, kind, m, chain = np.array(rows, dtype=np.int32).reshape(-1, 4).T
        begins = np.cumsum([0, *map(len, order.actions)])
        # One stage beyond each end, whose passes are not there.
        depth = m.max(initial=0) + 1 - m.min(initial=0)  # micro-batches below 0 are counted from the end
        place = np.full((len(order.ranks), order.stages + 2, len(KINDS), depth), -1, dtype=np.int32)
        place[chain, stage + 1, kind, m] = np.arange(len(rows))
        index = lambda offset, code: place[chain, stage + 1 + offset, code, m]
        undivided, forward = index(1, _B), kind == _F
        adjacent = np.where(
            forward, index(-1, _F), np.where(kind == _W, -1, np.where(undivided >= 0, undivided, index(1, _I)))
        )
        same = np.where(forward, -1, np.where(kind == _W, index(0, _I), index(0, _F)))
        # An input that no action makes is waited for for ever: its index is one beyond the actions.  That of a
        # micro-batch below 0 was made in the step before.
        final = order.stages - 1
        lacks = np.where(forward, stage > 0, (kind != _W) & (stage < final)) & (adjacent < 0) & (m >= 0)
        adjacent = np.where(lacks, len(rows), adjacent)
        same = np.where(~forward & (same < 0) & (m >= 0), len(rows), same)
        rank = np.repeat(np.arange(len(order.actions)), np.diff(begins))
        sender = np.where((adjacent >= 0) & (adjacent < len(rows)), np.append(rank, 0)[adjacent], rank)
        return cls(begins, stage, kind, same, adjacent, sender, rank)

    def costs(self, times: Mapping[str, Any]) -> Array:
        """Returns each action's seconds, from those of each stage by kind."""
        table: Array = np.array([times[kind] for kind in KINDS], dtype=np.float64)
        return table[self.kind, self.stage]

    def run(self, costs: Array, communication: Array) -> tuple[Array, Array]:
        """Returns when each action starts and ends: it runs as soon as its rank is free and its inputs have arrived.

        ``communication``: seconds of a message from each rank to each, of one to itself 0.
        Where ranks wait for each other for ever, the actions that never run end at infinity.
        """
        n = len(costs)
        # Behind the actions: one that never ends, and (at -1) one that has ended before all.
        ends = np.full(n + 2, np.inf)
        ends[-1] = 0.0
        starts, delay = np.full(n, np.inf), communication[self.sender, self.rank]
        heads, stops = self.begins[:-1].copy(), self.begins[1:]
        free, ranks = np.zeros(len(heads)), np.arange(len(heads))
        while True:
            ranks = ranks[heads[ranks] < stops[ranks]]
            action = heads[ranks]
            arrived = np.maximum(ends[self.same[action]], ends[self.adjacent[action]] + delay[action])
            runs = arrived < np.inf
            if not runs.any():
                return starts, ends[:n]
            now, action = ranks[runs], action[runs]
            starts[action] = np.maximum(free[now], arrived[runs])
            free[now] = ends[action] = starts[action] + costs[action]
            heads[now] += 1


def clock(order: Order, times: Mapping[str, Any], communication: Array, overhead: float) -> tuple[Array, Array]:
    """Returns the starts and ends of ``order``; ValueError where ranks wait for each other for ever."""
    arrays = OrderArrays.of(order)
    starts, ends = arrays.run(arrays.costs(times) + overhead, communication)
    if np.isinf(ends).any():
        stuck = []
        for r, (begin, end) in enumerate(zip(arrays.begins, arrays.begins[1:], strict=False)):
            waits = np.flatnonzero(np.isinf(ends[begin:end]))
            stuck += [f"rank {r} for {order.actions[r][waits[0]]}"] if len(waits) else []
        check(False, f"simulate: the order of {order.schedule} ends in a deadlock: {', '.join(stuck)}")
    return starts, ends
