"""Branch and bound over all splits of a job that the model, the batch and the schedules allow.

Candidates wait in a heap by a lower bound of their step.  The candidate with the lowest bound gets its layers, is
dropped where a rank would hold too much, and waits again by a closer bound; then the clock runs.  A candidate whose
bound is above the slowest kept step is never looked at.

Costing pieces takes most of the time.  So the first bound uses the pieces that keep most, plus, where blocks are
recomputed, their GEMMs and attention once more: passes that recompute, or whose weight gradients wait, take no less
(tests/tools/plan/test_search.py holds the ledger's pieces to that).
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
from ...parallel import CP_KINDS
from ...pipeline.placement import partition
from ...pipeline.schedules import EVERY, SCHEDULES, TRAINED, WITHOUT_FLUSH, possible
from ..ledger.dryrun import Plan
from ..ledger.shapes import Shape
from ..ledger.text import Progress, duration
from .costs import CostModel
from .in_flight import in_flight
from .spans import SpanCache, Spans, Stages
from .split import Elements, Job, Split
from .step import Load, StepEstimate, micro_batches

Fixed = Mapping[str, Any]  # fields of Split -> value
NOTHING_FIXED: Fixed = MappingProxyType({})
_CHOICES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    dict(schedule=TRAINED, saving=SAVING, cp_kind=CP_KINDS[1:])
    | dict.fromkeys(("full", "sharded", "over_replicas"), (False, True))
)


class SearchResult(NamedTuple):
    """The fastest steps, sorted.

    ``costed``: splits whose pieces were costed; of these ``fits`` had room, and the clock ran for ``simulated``.
    ``least``: of splits without room, the fewest bytes of the fullest rank.  ``complete``: False where interrupted.
    """

    steps: list[StepEstimate]
    costed: int
    fits: int
    simulated: int
    least: float
    complete: bool = True


def search(
    job: Job,
    devices: int,
    costs: CostModel,
    *,
    fixed: Fixed = NOTHING_FIXED,
    keep: int = 10,
    cache: SpanCache | None = None,
) -> SearchResult:
    """Returns the ``keep`` fastest splits that have the values of ``fixed``; after Ctrl-C the fastest so far.

    The schedule "2bw", whose gradients are one step late, is taken where ``fixed`` has it, and not searched.

    ``cache``: of another search of the same model by ``costs.pieces``.

    ValueError where the model, the batch and the schedules leave no split of so many devices, and for a field or a
    value of ``fixed`` that is not one of Split's.
    """
    return _Search(job, costs, keep, cache).run(candidates(job, devices, fixed))


def fits(job: Job, devices: int, costs: CostModel, fixed: Fixed) -> bool:
    """Returns whether any split holds the job."""
    searching = _Search(job, costs, 1)
    return any(searching.has_room(split) for split in candidates(job, devices, fixed))


# ---- candidates ----


def candidates(job: Job, devices: int, fixed: Fixed) -> list[Split]:
    """Returns the splits, their layers not chosen; ValueError where there are none."""
    check_fixed(fixed)
    layers = fixed.get("layers")
    check(
        layers is None or sum(layers) == job.config.num_layers,
        f"plan: layers must add up to the model's {job.config.num_layers} blocks, got"
        f" {'-'.join(map(str, layers or ()))}",
    )
    required = {name: value for name, value in fixed.items() if name != "layers"}.items()
    splits = [s for s in _splits(job, devices, fixed) if all(getattr(s, name) == value for name, value in required)]
    if layers is not None:
        splits = [s._replace(layers=tuple(layers)) for s in splits if s.stages == len(layers)]
    condition = " with " + ", ".join(f"{name}={value}" for name, value in fixed.items()) if fixed else ""
    check(
        bool(splits),
        f"plan: no split of {devices} devices{condition} has dp x cp x tp x pp = {devices}, stages within"
        f" {job.config.num_layers} layers, a batch of {job.batch} that dp x micro-batch divides, and micro-batches that"
        " its schedule can do",
    )
    return splits


def check_fixed(fixed: Fixed) -> None:
    """Raises ValueError for a field that is not one of Split's, or a value that it cannot have."""
    for name, value in fixed.items():
        check(name in Split._fields, f"plan: --fix knows {', '.join(Split._fields)}, got {name!r}")
        if name in _CHOICES:
            choices = ", ".join(map(str, _CHOICES[name]))
            check(value in _CHOICES[name], f"plan: {name} must be one of {choices}, got {value}")
        elif name == "layers":
            check(bool(value) and min(value) >= 1, f"plan: layers must be positive numbers of blocks, got {value}")
        else:
            positive = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            check(positive, f"plan: {name} must be a positive integer, got {value!r}")


def _splits(job: Job, devices: int, fixed: Fixed) -> Iterator[Split]:
    """Yields all splits; micro-batches are powers of two and the one of ``fixed``, chunks as in :func:`_pipelines`."""
    # Recomputed blocks keep only their inputs: "smallest" would make their passes longer and save nothing.
    savings = [*((saving, False) for saving in SAVING), (fixed.get("saving", SAVING[0]), True)]
    for split in _sized(job, devices, fixed):
        pipelines = _pipelines(split, micro_batches(job, split), job.config.num_layers, fixed)
        replicas = (False, True) if split.dp * split.cp > 1 else (False,)
        over = (False, True) if split.dp > 1 and _can_be_over_replicas(job, split) else (False,)
        for pipelined, (saving, full), *flags in itertools.product(pipelines, savings, replicas, over):
            sharded, over_replicas = flags
            if sharded and pipelined.schedule in WITHOUT_FLUSH:
                continue  # is not built
            yield pipelined._replace(saving=saving, full=full, sharded=sharded, over_replicas=over_replicas)


def _sized(job: Job, devices: int, fixed: Fixed) -> Iterator[Split]:
    """Yields the sizes of a mesh and of a micro-batch.

    Where cp and the micro-batch have a common factor n, n times the replicas, each with an n-th of its sequences but
    whole ones, compute as much and send less: such a split is one only where both are fixed.
    """
    both_fixed = {"cp", "micro_batch"} <= fixed.keys()
    for pp in filter(lambda pp: pp <= job.config.num_layers, _divisors(devices)):
        for tp in _divisors(devices // pp):
            for cp in _divisors(devices // pp // tp):
                dp = devices // pp // tp // cp
                plan = Plan(tp, cp=cp, cp_kind=fixed.get("cp_kind", Plan().cp_kind)).settled(job.config)
                split = Split(dp, tp, pp, cp=cp, cp_kind=plan.cp_kind)
                for micro_batch in _divisors(job.batch // dp) if job.batch % dp == 0 else ():
                    power = micro_batch & (micro_batch - 1) == 0 or micro_batch == fixed.get("micro_batch")
                    if power and (math.gcd(cp, micro_batch) == 1 or both_fixed):
                        yield split._replace(micro_batch=micro_batch)


def _can_be_over_replicas(job: Job, split: Split) -> bool:
    """Returns whether a model can divide experts among the ranks of all replicas: not with pieces of sequences."""
    shapes = Shape.kinds(job.config)
    counts = [s.experts.num_experts for s in shapes if s.experts is not None]
    return split.cp == 1 and bool(counts) and all(n % (split.dp * split.tp) == 0 for n in counts)


def _pipelines(split: Split, count: int, layers: int, fixed: Fixed) -> Iterator[Split]:
    """Yields ``split`` under each schedule that can run ``count`` micro-batches, with the fewest chunks, with those
    that share the layers evenly, and with those of ``fixed``; without a pipeline, only once."""
    if split.pp == 1:
        yield split
        return
    for name in (fixed["schedule"],) if "schedule" in fixed else SCHEDULES:
        choices = EVERY[name].chunks
        for chunks in choices:
            if split.pp * chunks > layers:
                break
            even = layers % (split.pp * chunks) == 0
            if (even or chunks in (choices[0], fixed.get("chunks"))) and _possible(name, split.pp, count, chunks):
                yield split._replace(schedule=name, chunks=chunks)


def _possible(name: str, pp: int, count: int, chunks: int) -> bool:
    try:
        possible(name, pp, count, chunks)
    except ValueError:
        return False
    return True


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


# ---- branch and bound ----


class _Search:
    """One search: bounds, room and layers of splits; cached by what they depend on."""

    def __init__(self, job: Job, costs: CostModel, keep: int, cache: SpanCache | None = None):
        self.job, self.costs, self.keep = job, costs, keep
        self._cache = SpanCache() if cache is None else cache
        self._state: dict[tuple[Any, ...], float] = {}
        self._full: dict[Split, int] = {}  # split -> the smallest micro-batch that does not fit
        self.least = float("inf")

    def run(self, splits: list[Split]) -> SearchResult:
        """Runs the search over ``splits``; ValueError where the model can do none of them."""
        progress, best, simulated, costed, fit = Progress(), list[StepEstimate](), 0, 0, 0
        heap: list[tuple[float, int, Split, Load | None]] = []
        ticket, complete, errors = itertools.count(), True, dict[str, None]()

        def push(bound: float, split: Split, load: Load | None = None) -> None:
            heapq.heappush(heap, (bound, next(ticket), split, load))

        try:
            for i, split in enumerate(splits):
                progress.update(f"plan: pieces of split {i + 1} of {len(splits)}")
                try:
                    if self.holds_state(split):
                        push(self.cheap_bound(split), split)
                    costed += 1
                except ValueError as error:
                    errors[str(error)] = None
            while heap and (len(best) < self.keep or heap[0][0] < best[-1].seconds):
                fastest = f", the best {duration(best[0].seconds)}" if best else ""
                progress.update(f"plan: {len(heap)} splits to go, {simulated} simulated{fastest}")
                bound, _, split, load = heapq.heappop(heap)
                if load is not None:
                    simulated += 1
                    best = sorted([*best, load.step()], key=_rank)[: self.keep]
                elif self.holds_pass(split):
                    closer = self.compute_bound(split)
                    if closer > bound:
                        push(closer, split)
                    elif (load := self.load(split)) is not None:
                        fit += 1
                        push(load.bound, load.split, load)
        except KeyboardInterrupt:
            complete = False
        progress.clear()
        check(costed > 0 or not errors, f"plan: no split that the model can do: {'; '.join(list(errors)[:3])}")
        return SearchResult(best, costed, fit, simulated, least=self.least, complete=complete)

    # ---- lower bounds ----

    def spans(self, split: Split) -> Spans:
        """Returns the spans of a split's pieces."""
        return self._cache.spans(self.job, split, self.costs.pieces)

    def _total(self, pieces: Split, split: Split) -> Stages:
        """Returns the sum of all stages of ``split``, by the pieces of another split."""
        return self.spans(pieces).total(split.stages)

    def cheap_bound(self, split: Split) -> float:
        """Returns a lower bound of :meth:`compute_bound` that needs no pieces of this split's own saving, schedule or
        cp: ranks with pieces of sequences share the work of one, and sum all gradients."""
        plain = split._replace(schedule="1f1b", chunks=1, saving=SAVING[0], full=False, cp=1, cp_kind=Split().cp_kind)
        recompute, total = self.spans(plain).recompute if split.full else 0.0, self._total(plain, split)
        sums = self.costs.pieces_sum(split, float(total.parameters[0]) * self.job.dtype.itemsize)
        return self._mean(split, (float(total.both[0]) + recompute) / split.cp + sums)

    def compute_bound(self, split: Split) -> float:
        """Returns a lower bound of the slowest rank's seconds of compute: the mean's."""
        return self._mean(split, float(self._total(split, split).both[0]))

    def _mean(self, split: Split, seconds: float) -> float:
        """Returns a rank's mean seconds in a step, given those of all stages for a micro-batch."""
        return seconds * micro_batches(self.job, split) / split.pp

    # ---- memory ----

    def _room(self, size: float) -> bool:
        """Returns whether a rank may hold ``size`` bytes; remembers the least that it may not."""
        if size > self.costs.limit:
            self.least = min(self.least, size)
        return size <= self.costs.limit

    def has_room(self, split: Split) -> bool:
        """Returns whether a split fits, with some choice of layers."""
        try:
            return self.holds_state(split) and self.holds_pass(split) and self.load(split) is not None
        except ValueError:  # a split that the model cannot do
            return False

    def holds_state(self, split: Split) -> bool:
        """Returns whether the fullest rank may have room for its state."""
        return self._room(self.state(split))

    def holds_pass(self, split: Split) -> bool:
        """Returns whether state, one block's temporaries and one micro-batch's activations fit (of the mean rank, which
        keeps them when its last forward pass ends).  If a micro-batch does not fit, larger ones are not tried."""
        smallest = split._replace(micro_batch=1)
        if split.micro_batch >= self._full.get(smallest, math.inf):
            return False
        saved = float(self._total(split, split).saved[0]) / split.pp
        if self._room(self.state(split) + saved + self.spans(split).least_transient):
            return True
        self._full[smallest] = split.micro_batch
        return False

    def state(self, split: Split) -> float:
        """Returns a lower bound of the fullest rank's state: that of a rank with the mean's parameters."""
        chains, versions = EVERY[split.schedule].chains, EVERY[split.schedule].versions(split.pp)
        kinds = split.sharded, split.over_replicas, chains, versions
        key = split.dp, split.cp, split.tp, split.pp, split.stages, *kinds
        if key not in self._state:
            simplest = Split(split.dp, split.tp, split.pp)
            simplest = simplest._replace(sharded=split.sharded, over_replicas=split.over_replicas)
            spans, total = self.spans(simplest), self._total(simplest, split)
            local, experts = (n[0] * chains / split.pp for n in (total.parameters, total.experts))
            elements = self._elements(split, local, spans, experts=experts)
            self._state[key] = float(self.costs.state(self.job, split, elements))
        return self._state[key]

    def _elements(self, split: Split, local: Any, spans: Spans, *, experts: Any) -> Elements:
        """Returns lower bounds for a rank of ``local`` elements, of which FSDP cuts the same fraction as of the
        model; ``experts``: those of them that are divided among replicas."""
        fraction = spans.shard_fraction(split.shards)
        units = 1 if split.pp > 1 else self.job.config.num_layers + 1
        return Elements(local, fraction * local, 2 * (local - experts) / units, experts)

    # ---- layers ----

    def load(self, split: Split) -> Load | None:
        """Returns the load of a split with its layers; None where a rank has no room for it."""
        spans = self.spans(split)
        if not self._holds_blocks(split, spans):
            return None
        fastest, fitting = lambda: spans.fastest(split.stages), lambda: self._fitting(split, spans)
        for choose in (fastest, fitting) if split.layers is None else (lambda: split.layers,):
            layers = choose()
            if layers is not None:
                load = Load(self.job, split._replace(layers=layers), self.costs, spans)
                if self._room(max(m.total for m in load.memory)):
                    return load
        return None

    def _holds_blocks(self, split: Split, spans: Spans) -> bool:
        """Returns whether all ranks together may have room for the model's blocks, counting each block as the lightest
        and each rank's micro-batches in flight as the fewest of any of its stages."""
        blocks, room = spans.pieces.blocks, self.costs.limit - spans.least_transient
        if math.isinf(room):
            return True
        lightest = min(blocks, key=lambda block: block.parameters)
        size, shard = lightest.parameters, lightest.share(split.shards)
        gathered = 2 * size * (split.pp > 1)
        state = float(self.costs.state(self.job, split, Elements(size, shard, gathered, lightest.experts)))
        saved, capacity = min(block.saved for block in blocks), 0.0
        for flight in in_flight(split.schedule, split.pp, micro_batches(self.job, split), split.chunks):
            counts = flight.counts[..., 0].max(0)
            capacity += room // max(state + saved * counts[counts > 0].min(), 1e-9)
        return capacity >= len(blocks) * EVERY[split.schedule].chains

    def _fitting(self, split: Split, spans: Spans) -> tuple[int, ...] | None:
        """Returns the fastest partition whose stages each fit into an even share of their rank's memory."""
        chains, count = EVERY[split.schedule].chains, split.stages
        most = np.zeros((count, 2))  # micro-batches in flight
        for flight in in_flight(split.schedule, split.pp, micro_batches(self.job, split), split.chunks):
            np.maximum.at(most, flight.stages, flight.counts.max(0))
        costs = list[Any]()
        for stage in range(count):
            span = spans.span_costs(stage, count)
            local, experts = (n * split.chunks * chains for n in (span.parameters, span.experts))
            state = self.costs.state(self.job, split, self._elements(split, local, spans, experts=experts))
            saved, held = most[stage]
            size = state + span.transient + split.chunks * chains * (span.saved * saved + span.held * held)
            costs.append(np.where(size <= self.costs.limit, span.both, np.inf))
        return partition(costs)


def _rank(step: StepEstimate) -> tuple[Any, ...]:
    """Orders steps by their seconds, and equally fast ones by their simplicity."""
    split = step.split
    choices = split.full, split.sharded, split.over_replicas, split.schedule, split.micro_batch
    return step.seconds, split.pp, split.cp, split.tp, split.chunks, *choices
