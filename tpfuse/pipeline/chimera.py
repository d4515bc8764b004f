"""Chimera's order (Li and Hoefler 2021, arXiv:2107.06925): two copies of the model, whose pipelines run in opposite
directions and fill each other's bubbles."""

import math
from typing import NamedTuple

from .action import BACKWARD, FORWARD, Action


class _Chain(NamedTuple):
    ranks: list[int]  # of each stage
    micro_batches: range


def actions(ranks: int, micro_batches: int, *, backward: float) -> list[list[Action]]:
    """Returns each rank's actions: the first half of the micro-batches goes down the ranks, the rest goes up.

    Greedy by the clock, a backward pass taking as long as ``backward`` forward passes: a backward pass goes before a
    forward pass, the deeper stage first; stage i has at most ranks - i micro-batches in flight.
    """
    half, down = micro_batches // 2, list(range(ranks))
    chains = _Chain(down, range(half)), _Chain(down[::-1], range(half, micro_batches))
    ends: dict[Action, float] = {}
    begun = {(c, i, kind): 0 for c in range(2) for i in range(ranks) for kind in (FORWARD, BACKWARD)}
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    free, now = [0.0] * ranks, 0.0

    def over(action: Action) -> bool:
        return ends.get(action, math.inf) <= now

    def following(chain: int, stage: int, kind: str) -> Action | None:
        """The next action of a kind, if what it needs is there."""
        ms, count = chains[chain].micro_batches, begun[chain, stage, kind]
        if count == half:
            return None
        if kind == BACKWARD:
            needs = [Action(stage, FORWARD, ms[count], chain)]
            needs += [Action(stage + 1, BACKWARD, ms[count], chain)] if stage < ranks - 1 else []
        else:
            needs = [Action(stage - 1, FORWARD, ms[count], chain)] if stage else []
            before = count - (ranks - stage)  # whose backward pass, of those before it too, frees a place
            needs += [Action(stage, BACKWARD, ms[before], chain)] if before >= 0 else []
        return Action(stage, kind, ms[count], chain) if all(map(over, needs)) else None

    while len(ends) < 4 * half * ranks:
        for r in (r for r in range(ranks) if free[r] <= now):
            places = [(c, chain.ranks.index(r)) for c, chain in enumerate(chains)]
            ready = [a for c, i in places for kind in (BACKWARD, FORWARD) if (a := following(c, i, kind)) is not None]
            if ready:
                chosen = max(ready, key=lambda a: (a.kind == BACKWARD, a.stage, -a.micro_batch, a.chain))
                begun[chosen.chain, chosen.stage, chosen.kind] += 1
                ends[chosen] = free[r] = now + (backward if chosen.kind == BACKWARD else 1.0)
                lists[r].append(chosen)
        now = min((t for t in free if t > now), default=now)
    return lists
