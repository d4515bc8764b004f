"""The fastest splits of a job over a number of devices: every one that the model, the batch and the schedules allow,
by branch and bound.

Candidates wait in order of what they take at least.  A candidate that comes up first gets its layers, is thrown away
where a rank would hold too much, and waits again by a closer bound; then the clock runs.  What waits once it cannot be
among the fastest any more is never looked at.

Pieces are what takes long to cost.  So the first bound is of the pieces that keep most, and where blocks are
recomputed, of their GEMMs and attention once more: passes that recompute, or whose weight gradients wait, take no less
(tests/tools/plan/test_search.py holds the ledger's to that).
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...kernels.runtime.errors import check
from ...layers.block import SAVING
from ...pipeline.schedules import SCHEDULES, possible
from ..ledger.text import Progress, duration
from .kept import kept
from .known import Known
from .layers import cut
from .spans import Spans, Stages
from .split import Elements, Job, Split
from .state import piece_share
from .step import Load, Means, Step, micro_batches

Fixed = Mapping[str, Any]  # fields of Split -> value


class Found(NamedTuple):
    """The fastest steps, the fastest first.

    ``looked``: splits costed, of which ``fits`` were seen to have room, and the clock ran for ``simulated``.
    ``least``: of those without room, the fewest bytes of the fullest rank.  ``complete``: False where interrupted.
    """

    steps: list[Step]
    looked: int
    fits: int
    simulated: int
    least: float
    complete: bool = True


def search(
    job: Job,
    devices: int,
    means: Means,
    *,
    fixed: Fixed = MappingProxyType({}),
    keep: int = 10,
    known: Known | None = None,
) -> Found:
    """Returns the ``keep`` fastest splits that have the values of ``fixed``; after Ctrl-C the fastest so far.

    ``known``: what another search of the same model by ``means.costs`` has left.

    ValueError where the model, the batch and the schedules leave no split of so many devices, and for a field or a
    value of ``fixed`` that is none.
    """
    return _Search(job, means, keep, known).run(candidates(job, devices, fixed))


def fits(job: Job, devices: int, means: Means, fixed: Fixed) -> bool:
    """Whether any split holds the job."""
    looking = _Search(job, means, 1)
    return any(looking.has_room(split) for split in candidates(job, devices, fixed))


# ---- the candidates ----


def candidates(job: Job, devices: int, fixed: Fixed) -> list[Split]:
    """Returns the splits, their layers not chosen; ValueError where there are none."""
    check_fixed(fixed)
    wanted = lambda split: all(getattr(split, name) == value for name, value in fixed.items() if name != "layers")
    found = [split for split in _every(job, devices, fixed) if wanted(split)]
    if layers := fixed.get("layers"):
        found = [s._replace(layers=tuple(layers)) for s in found if s.pp * s.chunks == len(layers)]
    given = " with " + ", ".join(f"{name}={value}" for name, value in fixed.items()) if fixed else ""
    check(
        bool(found),
        f"plan: no split of {devices} devices{given} has dp x tp x pp = {devices}, stages within"
        f" {job.config.num_layers} layers, a batch of {job.batch} that dp x micro-batch divides, and micro-batches that"
        " its schedule can do",
    )
    return found


def check_fixed(fixed: Fixed) -> None:
    """Holds given fields to what they may be."""
    for name, value in fixed.items():
        check(name in Split._fields, f"plan: --fix knows {', '.join(Split._fields)}, got {name!r}")
        choices = dict(schedule=tuple(SCHEDULES), saving=SAVING, full=(False, True), sharded=(False, True))
        if name in choices:
            check(
                value in choices[name], f"plan: {name} must be one of {', '.join(map(str, choices[name]))}, got {value}"
            )
        elif name == "layers":
            check(bool(value) and min(value) >= 1, f"plan: layers must be positive numbers of blocks, got {value}")
        else:
            check(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                f"plan: {name} must be a positive integer, got {value!r}",
            )


def _every(job: Job, devices: int, fixed: Fixed) -> Iterator[Split]:
    """Micro-batches are powers of two and the one of ``fixed``; chunks below."""
    # Blocks that are recomputed whole keep their inputs alone: "smallest" would make their passes longer, and no more.
    again = fixed.get("saving", SAVING[0])
    kinds: list[dict[str, Any]] = [dict(saving=saving, full=False) for saving in SAVING]
    kinds.append(dict(saving=again, full=True))
    for pp in _divisors(devices):
        for tp in _divisors(devices // pp):
            dp = devices // pp // tp
            if pp > job.config.num_layers or job.batch % dp:
                continue
            ways: list[dict[str, Any]] = [dict(sharded=sharded) for sharded in ((False, True) if dp > 1 else (False,))]
            for micro_batch in _divisors(job.batch // dp):
                if micro_batch & (micro_batch - 1) and micro_batch != fixed.get("micro_batch"):
                    continue
                split = Split(dp, tp, pp, micro_batch=micro_batch)
                layers, chunks = job.config.num_layers, fixed.get("chunks")
                pipes = list(_pipes(pp, micro_batches(job, split), layers, chunks))
                for pipe, kind, way in itertools.product(pipes, kinds, ways):
                    yield split._replace(**pipe, **kind, **way)


def _pipes(pp: int, count: int, layers: int, fixed: int | None) -> Iterator[dict[str, Any]]:
    """The schedules that can do these numbers, with the fewest chunks, those that share the layers evenly, and
    ``fixed``; without a pipeline one stands for all."""
    if pp == 1:
        yield {}
        return
    for name, schedule in SCHEDULES.items():
        for chunks in schedule.chunks:
            if pp * chunks > layers:
                break
            even = layers % (pp * chunks) == 0
            if (even or chunks in (schedule.chunks[0], fixed)) and _can(name, pp, count, chunks):
                yield dict(schedule=name, chunks=chunks)


def _can(name: str, pp: int, count: int, chunks: int) -> bool:
    try:
        possible(name, pp, count, chunks)
    except ValueError:
        return False
    return True


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


# ---- branch and bound ----


class _Search:
    """What one search knows, by what it depends on."""

    def __init__(self, job: Job, means: Means, keep: int, known: Known | None = None):
        self.job, self.means, self.keep = job, means, keep
        self._known = Known() if known is None else known
        self._state: dict[tuple[Any, ...], float] = {}
        self._full: dict[Split, int] = {}  # splits, and the smallest micro-batch known to find no room in them
        self.least = float("inf")

    def run(self, splits: list[Split]) -> Found:
        shown, best, simulated, looked, fit = Progress(), list[Step](), 0, 0, 0
        waiting: list[tuple[float, int, Split, Load | None]] = []
        ticket, complete, errors = itertools.count(), True, dict[str, None]()

        def wait(bound: float, split: Split, load: Load | None = None) -> None:
            heapq.heappush(waiting, (bound, next(ticket), split, load))

        try:
            for i, split in enumerate(splits):
                shown.show(f"plan: pieces of split {i + 1} of {len(splits)}")
                try:
                    looked += 1
                    if self.holds_state(split):
                        wait(self.first_bound(split), split)
                except ValueError as error:
                    errors[str(error)] = None
                    looked -= 1
            while waiting and (len(best) < self.keep or waiting[0][0] < best[-1].seconds):
                fastest = f", the best {duration(best[0].seconds)}" if best else ""
                shown.show(f"plan: {len(waiting)} splits to go, {simulated} simulated{fastest}")
                bound, _, split, load = heapq.heappop(waiting)
                if load is not None:
                    simulated += 1
                    best = sorted([*best, load.step()], key=_rank)[: self.keep]
                elif self.holds_pass(split):
                    own = self.at_least(split)
                    if own > bound:
                        wait(own, split)
                    elif (load := self.placed(split)) is not None:
                        fit += 1
                        wait(load.bound, load.split, load)
        except KeyboardInterrupt:
            complete = False
        shown.done()
        check(looked > 0 or not errors, f"plan: no split that the model can do: {'; '.join(list(errors)[:3])}")
        return Found(best, looked, fit, simulated, least=self.least, complete=complete)

    def spans(self, split: Split) -> Spans:
        return self._known.spans(self.job, split, self.means.costs)

    def holds_state(self, split: Split) -> bool:
        """Whether the fullest rank may have room for its state."""
        return self._room(self.state(split))

    def holds_pass(self, split: Split) -> bool:
        """Whether it may have room for a block's pass too, and for one micro-batch of the mean's activations, all of
        which are kept when its last forward pass ends; where a smaller micro-batch has none, a larger one has none."""
        kind = split._replace(micro_batch=1)
        if split.micro_batch >= self._full.get(kind, math.inf):
            return False
        kept = float(self._total(split, split).saved[0]) / split.pp
        if self._room(self.state(split) + kept + self.spans(split).transient(3)[1]):
            return True
        self._full[kind] = split.micro_batch
        return False

    def state(self, split: Split) -> float:
        """Returns the bytes of the fullest rank's state, at least: it has as many parameters as the mean."""
        stages, chains = split.pp * split.chunks, SCHEDULES[split.schedule].chains
        place = split.dp, split.tp, split.pp, split.sharded, stages, chains
        if place not in self._state:
            simplest = Split(split.dp, split.tp, split.pp, sharded=split.sharded)
            spans, own = self.spans(simplest), self._total(simplest, split).parameters[0] * chains / split.pp
            self._state[place] = float(self.means.state(self.job, split, self._elements(split, own, spans)))
        return self._state[place]

    def _elements(self, split: Split, own: Any, spans: Spans) -> Elements:
        """Returns what a rank holds at least of ``own`` elements that are cut as the model's mean."""
        share = spans.cut_by(split.dp) if split.sharded else 1.0
        return Elements(own, share * own, 2 * own / (1 if split.pp > 1 else self.job.config.num_layers + 1))

    def _total(self, split: Split, cut: Split) -> Stages:
        """Returns what the pieces of ``split`` are together, over the stages of ``cut``."""
        return self.spans(split).total(cut.pp * cut.chunks)

    def _room(self, size: float) -> bool:
        if size > self.means.limit:
            self.least = min(self.least, size)
        return size <= self.means.limit

    def first_bound(self, split: Split) -> float:
        """Returns what :meth:`at_least` cannot be below, of a split whose own pieces are not costed yet."""
        plain = _plain(split)
        again = self.spans(plain).again if split.full else 0.0
        return self._mean(split, float(self._total(plain, split).both[0]) + again)

    def at_least(self, split: Split) -> float:
        """Returns seconds of compute of the slowest rank, at least: the mean's."""
        return self._mean(split, float(self._total(split, split).both[0]))

    def _mean(self, split: Split, seconds: float) -> float:
        """Returns a rank's seconds in a step, where all stages together take so many for a micro-batch."""
        return seconds * micro_batches(self.job, split) / split.pp

    def has_room(self, split: Split) -> bool:
        try:
            return self.holds_state(split) and self.holds_pass(split) and self.placed(split) is not None
        except ValueError:  # a split that the model cannot do
            return False

    def placed(self, split: Split) -> Load | None:
        """Returns the load of a split with its layers; None where no rank has room for it."""
        spans = self.spans(split)
        if not self._holds_blocks(split, spans):
            return None
        fastest, fitting = lambda: spans.fastest(split.pp * split.chunks), lambda: self._fitting(split, spans)
        for choose in (fastest, fitting) if split.layers is None else (lambda: split.layers,):
            layers = choose()
            if layers is not None:
                load = Load(self.job, split._replace(layers=layers), self.means, spans)
                if self._room(max(m.total for m in load.memory)):
                    return load
        return None

    def _holds_blocks(self, split: Split, spans: Spans) -> bool:
        """Whether all ranks together may have room for the model's blocks, as the lightest of them and at the fewest
        micro-batches that any of a rank's stages keeps."""
        blocks, room = spans.pieces.blocks, self.means.limit - spans.transient(3)[1]
        lightest = min(blocks, key=lambda block: block.parameters)
        size, shard = lightest.parameters, piece_share(lightest, split.dp if split.sharded else 1)
        state = float(self.means.state(self.job, split, Elements(size, shard, 2 * size * (split.pp > 1))))
        saved, most = min(block.saved for block in blocks), 0.0
        if math.isinf(room):
            return True
        for own in kept(split.schedule, split.pp, micro_batches(self.job, split), split.chunks):
            counts = own.counts[..., 0].max(0)
            most += room // max(state + saved * counts[counts > 0].min(), 1e-9)
        return most >= len(blocks) * SCHEDULES[split.schedule].chains

    def _fitting(self, split: Split, spans: Spans) -> tuple[int, ...] | None:
        """Returns the layers of stages that each fit into its share of the rank that holds it: all of it, where that
        holds one stage."""
        chains, count = SCHEDULES[split.schedule].chains, split.pp * split.chunks
        in_flight = np.zeros((count, 2))
        for own in kept(split.schedule, split.pp, micro_batches(self.job, split), split.chunks):
            np.maximum.at(in_flight, own.stages, own.counts.max(0))
        transient, costs = spans.transient(count), []
        for stage in range(count):
            w = spans.windows(stage, count)
            elements = self._elements(split, w.parameters * split.chunks * chains, spans)
            state = self.means.state(self.job, split, elements)
            saved, held = in_flight[stage]
            size = state + transient[stage] + split.chunks * chains * (w.saved * saved + w.held * held)
            costs.append(np.where(size <= self.means.limit, w.both, np.inf))
        return cut(costs)


def _plain(split: Split) -> Split:
    """Returns the split whose pieces take least of those that differ in schedule and in what is kept."""
    return split._replace(schedule="1f1b", chunks=1, saving=SAVING[0], full=False)


def _rank(step: Step) -> tuple[Any, ...]:
    """Orders steps by their seconds, and those that take the same by how simple they are."""
    split = step.split
    return step.seconds, split.pp, split.tp, split.chunks, split.full, split.sharded, split.schedule, split.micro_batch
