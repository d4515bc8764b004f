"""Chimera's order (Li and Hoefler 2021, arXiv:2107.06925): two copies of the model, whose pipelines run in opposite
directions and fill each other's bubbles."""

from .action import BACKWARD, FORWARD, Action


def actions(ranks: int, micro_batches: int, *, backward: float) -> list[list[Action]]:
    """Returns each rank's actions: the first half of the micro-batches goes down the ranks, the rest goes up.

    Greedy by the clock, a backward pass taking as long as ``backward`` forward passes: a backward pass goes before a
    forward pass, the deeper stage first; stage i has at most ranks - i micro-batches in flight.
    """
    half = micro_batches // 2
    # When the passes of each place end that have begun, in the order of micro-batches.
    ends: dict[tuple[int, int, str], list[float]] = {
        (c, i, kind): [] for c in range(2) for i in range(ranks) for kind in (FORWARD, BACKWARD)
    }
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    free, now, left = [0.0] * ranks, 0.0, 4 * half * ranks

    def over(chain: int, stage: int, kind: str, number: int) -> bool:
        finished = ends[chain, stage, kind]
        return number < len(finished) and finished[number] <= now

    def ready(chain: int, stage: int, kind: str) -> bool:
        """Returns True if the next pass of this kind has its input."""
        count = len(ends[chain, stage, kind])
        if count == half:
            return False
        if kind == BACKWARD:
            deeper = stage == ranks - 1 or over(chain, stage + 1, BACKWARD, count)
            return deeper and over(chain, stage, FORWARD, count)
        oldest = count - (ranks - stage)  # whose backward pass, of those before it too, frees a place
        arrived = stage == 0 or over(chain, stage - 1, FORWARD, count)
        return arrived and (oldest < 0 or over(chain, stage, BACKWARD, oldest))

    while left:
        for r in (r for r in range(ranks) if free[r] <= now):
            places = (0, r), (1, ranks - 1 - r)
            choices = [(kind, i, c) for c, i in places for kind in (BACKWARD, FORWARD) if ready(c, i, kind)]
            if choices:
                micro_batch = lambda kind, i, c: c * half + len(ends[c, i, kind])
                kind, i, c = max(choices, key=lambda x: (x[0] == BACKWARD, x[1], -micro_batch(*x), x[2]))
                lists[r].append(Action(i, kind, micro_batch(kind, i, c), c))
                free[r] = now + (backward if kind == BACKWARD else 1.0)
                ends[c, i, kind].append(free[r])
                left -= 1
        now = min((t for t in free if t > now), default=now)
    return lists
