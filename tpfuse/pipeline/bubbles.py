"""Other work in a pipeline's bubbles (PipeFisher, Osawa et al. 2022, arXiv:2211.14133): where it runs, and how many
steps all of it takes.

Second-order optimizers have such work: curvature after a pass that gives its inputs, inverses after all curvature.  It
may take more than one step's bubbles, and is then refreshed once in as many steps.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import check_number, number
from .action import Action
from .simulator import Timeline

_SECONDS = number(0, 1e9, "(]")


class Work(NamedTuple):
    """A piece of work for ``rank`` that cannot be cut, and takes ``seconds``.

    ``after``: actions of the first step, and indices of other work in the list, that must end before it starts.
    ``run`` does the work.
    """

    rank: int
    seconds: float
    after: tuple[Action | int, ...] = ()
    run: Callable[[], Any] | None = None


class Placed(NamedTuple):
    """Work number ``number`` runs from ``start`` to ``end``, in seconds from the beginning of step ``step``, before the
    action at index ``place`` of its rank."""

    number: int
    step: int
    place: int
    start: float
    end: float


class Filling(NamedTuple):
    """``placed[r]`` is the ``work`` of rank r, in its order; all of it is done within ``steps`` steps."""

    timeline: Timeline
    work: tuple[Work, ...]
    placed: tuple[tuple[Placed, ...], ...]
    steps: int

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is idle after filling, over all steps, in [0, 1]."""
        worked = sum(p.end - p.start for placed in self.placed for p in placed)
        total = self.steps * self.timeline.seconds * len(self.placed)
        return 1 - (self.steps * sum(self.timeline.busy) + worked) / total


def demand(timeline: Timeline, work: Sequence[Work]) -> float:
    """Returns the largest ratio, over ranks, of the seconds of ``work`` to those of a step's bubbles: a lower bound of
    a filling's steps."""
    seconds: list[float] = [0.0] * len(timeline.events)
    for piece in work:
        seconds[piece.rank] += piece.seconds
    waits = (timeline.seconds - busy for busy in timeline.busy)
    return max(0.0 if not x else x / wait if wait else float("inf") for x, wait in zip(seconds, waits, strict=True))


def fill(timeline: Timeline, work: Sequence[Work]) -> Filling:
    """Places every piece of ``work`` into the first bubble of its rank that is long enough, in the order of the list.

    No action of the pipeline moves.  ValueError for work of a rank that does not exist, that is longer than every
    bubble of its rank, or that comes before work it needs.
    """
    ranks = [_Rank(_gaps(timeline, r), timeline.seconds) for r in range(len(timeline.events))]
    ends: dict[Action | int, float] = {e.action: e.end for events in timeline.events for e in events}
    for n, piece in enumerate(work):
        _check(n, piece, ranks, ends)
        ends[n] = ranks[piece.rank].place(n, piece.seconds, max((ends[a] for a in piece.after), default=0.0))
    placed = tuple(tuple(rank.placed) for rank in ranks)
    return Filling(timeline, tuple(work), placed, 1 + max((p.step for row in placed for p in row), default=0))


class Filler:
    """Runs the work of one rank of a filling, step by step and then again from its first step."""

    def __init__(self, filling: Filling, rank: int):
        """ValueError for work of the rank that needs what happens on another: no rank waits for another's work."""
        self.filling, self.step = filling, 0
        self._runs: dict[tuple[int, int], list[Callable[[], Any]]] = {}
        actions = {e.action for e in filling.timeline.events[rank]}
        for placed in filling.placed[rank]:
            piece = filling.work[placed.number]
            for a in piece.after:
                on_rank = a in actions if isinstance(a, Action) else filling.work[a].rank == rank
                check(
                    on_rank,
                    f"fill: work {placed.number} of rank {rank} cannot be run: it needs {_label(a)}, of another rank",
                )
            if piece.run is not None:
                self._runs.setdefault((placed.step, placed.place), []).append(piece.run)

    def run_before(self, place: int) -> None:
        """Runs this step's work in the bubble before the action at ``place``."""
        for run in self._runs.get((self.step, place), ()):
            run()

    def end(self) -> None:
        """Moves to the next step."""
        self.step = (self.step + 1) % self.filling.steps


def _label(a: Action | int) -> str:
    return f"action {a}" if isinstance(a, Action) else f"work {a}"


class _Gap(NamedTuple):
    """A bubble of every step, before the action at index ``place``."""

    place: int
    start: float
    end: float


def _gaps(timeline: Timeline, rank: int) -> list[_Gap]:
    """Returns the bubbles of a rank; the final one lasts to the end of the step."""
    events = timeline.events[rank]
    starts, ends = (0.0, *(e.end for e in events)), (*(e.start for e in events), timeline.seconds)
    return [_Gap(i, start, end) for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]


class _Rank:
    """The bubbles of a rank in every step of ``period`` seconds, and the work placed in them."""

    def __init__(self, gaps: Sequence[_Gap], period: float):
        self.gaps, self.period, self.placed = gaps, period, list[Placed]()

    @property
    def longest(self) -> float:
        return max((gap.end - gap.start for gap in self.gaps), default=0.0)

    def place(self, number: int, seconds: float, ready: float) -> float:
        """Places work in the first free room after ``ready``; returns when it ends.  Both in seconds from step 0."""
        step = int(ready // self.period)
        while True:
            for gap in self.gaps:
                start = max(gap.start, ready - step * self.period)
                for neighbour in (p for p in self.placed if p.step == step and p.place == gap.place):
                    if neighbour.start < start + seconds and neighbour.end > start:
                        start = neighbour.end
                if seconds <= gap.end - start:  # start + seconds may be rounded up beyond the end
                    end = min(start + seconds, gap.end)
                    placed = Placed(number, step, gap.place, start=start, end=end)
                    bisect.insort(self.placed, placed, key=lambda p: (p.step, p.start))
                    return step * self.period + placed.end
            step += 1


def _check(n: int, piece: Work, ranks: Sequence[_Rank], ends: dict[Action | int, float]) -> None:
    check(0 <= piece.rank < len(ranks), f"fill: work {n} is of rank {piece.rank}, and there are {len(ranks)}")
    check_number(f"fill: seconds of work {n}", piece.seconds, _SECONDS)
    longest = ranks[piece.rank].longest
    check(
        piece.seconds <= longest,
        f"fill: work {n} takes {piece.seconds:g} s, and the longest bubble of rank {piece.rank} {longest:g} s: cut it",
    )
    for a in piece.after:
        check(a in ends, f"fill: work {n} needs {a}, which is neither an action of the order nor work before it")
