"""The actions of each rank of a pipeline, in order, under every schedule."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import check_numbers, integer, number, one_of, optional, quoted
from . import chimera, torch_lists
from .action import BACKWARD, FORWARD, INPUT, Action


class Order(NamedTuple):
    """``actions[r]`` are those of rank r; ``ranks[c][i]`` is the rank that holds stage i of chain c.

    Without a flush micro-batches below 0 are those of the batch before, -1 its last: what ``actions`` lack of their
    passes has run in the step before.
    """

    schedule: str
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages that a model is cut into."""
        return len(self.ranks[0])

    @property
    def chunks(self) -> int:
        """The number of stages that a rank holds of each chain."""
        return self.stages // len(self.actions)

    @property
    def versions(self) -> int:
        """The most steps whose weights a rank keeps at a time."""
        return EVERY[self.schedule].versions(len(self.actions))

    @property
    def copies(self) -> int:
        """The most copies of its stages' weights that a rank keeps."""
        return len(self.ranks) * self.versions


Actions = Sequence[Sequence[Action]]


def begun(actions: Sequence[Action]) -> list[Action]:
    """Returns the backward passes of a rank whose forward passes have run in the step before."""
    present = set(actions)
    return [a for a in actions if a.kind in (BACKWARD, INPUT) and a._replace(kind=FORWARD) not in present]


class OrderRequest(NamedTuple):
    """The arguments of :func:`order`, checked, with the default of ``chunks``."""

    ranks: int
    micro_batches: int
    chunks: int
    backward: float


class Schedule(NamedTuple):
    """``make(request)`` returns each rank's actions.

    ``chunks``: the allowed numbers of stages a rank, the first is the default.  ``v``: stages go from rank 0 to the
    last rank and back.  ``split``: a backward pass is two actions, the second makes weight gradients.  ``chains``:
    copies of the model, each trained on its share of the micro-batches.  ``versions(p)``: the most steps whose
    weights one of p ranks keeps at a time.
    """

    make: Callable[[OrderRequest], Actions]
    chunks: range
    v: bool = False
    split: bool = False
    chains: int = 1
    versions: Callable[[int], int] = lambda ranks: 1


_NUMBERS = dict(ranks=integer(), micro_batches=integer(), chunks=optional(integer()), backward=number(1e-9, 1e9))
_SEVERAL = range(2, 65)
_ONE, _TWO = range(1, 2), range(2, 3)


def _gpipe(request: OrderRequest) -> Actions:
    """All forward passes, then all backward passes (Huang et al. 2018, arXiv:1811.06965)."""
    micro_batches = range(request.micro_batches)
    return [[Action(r, kind, m) for kind in (FORWARD, BACKWARD) for m in micro_batches] for r in range(request.ranks)]


def _torch(name: str) -> Callable[[OrderRequest], Actions]:
    """The actions of one of torch's schedules."""
    return lambda request: torch_lists.actions(name, request.ranks, request.micro_batches, request.chunks)


def _chimera(request: OrderRequest) -> Actions:
    return chimera.actions(request.ranks, request.micro_batches, backward=request.backward)


def _one_f_one_b(request: OrderRequest) -> Actions:
    """Forward and backward in turn, with ranks - r micro-batches in flight (Narayanan et al. 2019, PipeDream)."""
    (ranks, micro_batches, _, _), lists = request, []
    for r in range(ranks):
        warm = min(ranks - 1 - r, micro_batches)
        actions = [Action(r, FORWARD, m) for m in range(warm)]
        for m in range(micro_batches):
            if warm + m < micro_batches:
                actions.append(Action(r, FORWARD, warm + m))
            actions.append(Action(r, BACKWARD, m))
        lists.append(actions)
    return lists


def _without_flush(lag: Callable[[int, int], tuple[int, int]]) -> Callable[[OrderRequest], Actions]:
    """A step of an endless list: one forward and one backward pass in turn, ``lag(rank, ranks)`` micro-batches behind
    the rank's place in the list."""

    def make(request: OrderRequest) -> Actions:
        lists = []
        for r in range(request.ranks):
            lags = tuple(zip((FORWARD, BACKWARD), lag(r, request.ranks), strict=True))
            lists.append([Action(r, kind, m - behind) for m in range(request.micro_batches) for kind, behind in lags])
        return lists

    return make


# All gradients of a step's batch are complete at its end.
SCHEDULES = {
    "gpipe": Schedule(_gpipe, _ONE),
    "1f1b": Schedule(_one_f_one_b, _ONE),
    "interleaved": Schedule(_torch("ScheduleInterleaved1F1B"), _SEVERAL),
    "zero-bubble": Schedule(_torch("ScheduleInterleavedZeroBubble"), _SEVERAL, split=True),
    "zbv": Schedule(_torch("ScheduleZBVZeroBubble"), _TWO, v=True, split=True),
    "dualpipev": Schedule(_torch("ScheduleDualPipeV"), _TWO, v=True, split=True),
    "chimera": Schedule(_chimera, _ONE, chains=2),
}
# A step ends with micro-batches in flight.  Under 2bw (Narayanan et al. 2020, arXiv:2006.09503) a pass needs what its
# neighbour did a turn ago, so all ranks begin and end a step at once; PipeDream (arXiv:1806.03377) is only simulated.
WITHOUT_FLUSH = {
    "2bw": Schedule(_without_flush(lambda r, ranks: (r, 2 * (ranks - 1) - r)), _ONE, versions=lambda ranks: 2),
    "pipedream": Schedule(_without_flush(lambda r, ranks: (0, ranks - 1 - r)), _ONE, versions=lambda ranks: ranks),
}
EVERY = SCHEDULES | WITHOUT_FLUSH
TRAINED = *SCHEDULES, "2bw"


def order(schedule: str, ranks: int, micro_batches: int, *, chunks: int | None = None, backward: float = 2.0) -> Order:
    """Returns the actions of ``schedule``, one of ``SCHEDULES``, "2bw" or "pipedream", over ``ranks`` ranks.

    ``chunks``: stages a rank, which only "interleaved" and "zero-bubble" leave open (default 2).  ``backward``: the
    time of a backward pass over that of a forward pass, by which "chimera" chooses its order.  ValueError for an
    unknown schedule, and for numbers that it cannot run: "interleaved" and "zero-bubble" need micro-batches that fill
    their rounds of about ``ranks`` each, "dualpipev" as many as stages, "chimera" even numbers of both, "2bw" as many
    as end a batch within the step after it, 2 (ranks - 1).
    """
    error = one_of(EVERY)(schedule)
    check(error is None, f"pipeline: schedule must be one of {', '.join(EVERY)}, got {quoted(schedule)}")
    numbers = dict(ranks=ranks, micro_batches=micro_batches, chunks=chunks, backward=backward)
    check_numbers("pipeline", numbers, _NUMBERS)
    kind = EVERY[schedule]
    held = kind.chunks[0] if chunks is None else chunks
    choices = f"{kind.chunks[0]}" if len(kind.chunks) == 1 else f"{kind.chunks[0]} to {kind.chunks[-1]}"
    check(held in kind.chunks, f"pipeline: {schedule} has {choices} stages a rank, got {held}")
    possible(schedule, ranks, micro_batches, held)
    actions = tuple(map(tuple, kind.make(OrderRequest(ranks, micro_batches, held, backward))))
    return Order(schedule, micro_batches, actions, placement(schedule, ranks, held))


def placement(schedule: str, ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the rank of each stage, of every chain."""
    kind, down = EVERY[schedule], tuple(range(ranks))
    if kind.chains == 2:
        return down, down[::-1]
    return (down + down[::-1] if kind.v else down * chunks,)


def possible(schedule: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """Raises ValueError if a known schedule cannot run with these numbers."""
    if schedule in ("interleaved", "zero-bubble"):
        rounds = max(1, micro_batches // ranks)
        check(
            micro_batches % rounds == 0,
            f"pipeline: {schedule} over {ranks} ranks runs micro-batches in {rounds} rounds, which must divide their"
            f" number, got micro_batches={micro_batches}",
        )
    if schedule == "dualpipev":
        check(
            micro_batches >= ranks * chunks,
            f"pipeline: dualpipev needs as many micro-batches as stages, {ranks * chunks}, got"
            f" micro_batches={micro_batches}",
        )
    if schedule == "chimera":
        check(
            ranks % 2 == 0 and micro_batches % 2 == 0,
            f"pipeline: chimera needs even numbers, got ranks={ranks} and micro_batches={micro_batches}",
        )
    if schedule == "2bw":
        check(
            micro_batches >= 2 * (ranks - 1),
            f"pipeline: 2bw over {ranks} ranks needs at least 2 (ranks - 1) = {2 * (ranks - 1)} micro-batches, so that"
            f" a batch ends in the step after its own, got micro_batches={micro_batches}",
        )
