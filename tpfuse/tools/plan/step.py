"""A step under a split: how long it takes, where the time goes, and what each rank holds.

Passes run by the simulator's clock over the schedule's own list of actions.  What it leaves to the rank that ends last
is "pp": bubbles, the messages between stages that nothing hides, and the sums of Chimera's copies.  Assumed of the
rest, as tpfuse runs it:

    dp    replicas sum once a step: with stages after the last pass, hidden by nothing; without, as DDP does, under the
          last backward pass, where the device sends beside its computing.  Sharded without stages, FSDP gathers twice
          and scatters once a micro-batch, under its passes; with stages it gathers and scatters once a step, and
          parameters and gradients are whole in between
    tp    hidden by nothing
    steps follow one another: the optimizer, and what a rank waits for others, count
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...kernels.runtime.errors import check
from ...pipeline.action import BACKWARD, FORWARD, KINDS
from ...pipeline.clock import Clock
from ...pipeline.schedules import SCHEDULES, placement
from ...pipeline.simulator import Timeline, simulate
from .kept import kept, ordered
from .spans import Array, Spans
from .split import PARTS, Costs, Elements, Job, Split

PP, DP, OPTIMIZER = "pp", "dp", "optimizer"
STEP_PARTS = *PARTS, PP, DP, OPTIMIZER


class Means(NamedTuple):
    """What steps are costed by: the pieces, and of a rank what they do not say.

    ``hop``: seconds of so many bytes to the next stage.  ``sums``: seconds in which replicas sum so many bytes of
    gradients, or of a sharded split gather and scatter as many.  ``update``: seconds of the optimizer over so many
    elements.  ``state``: bytes of parameters, gradients, optimizer and buffers of a rank's.  ``limit``: bytes
    that a rank may hold.  ``hides``: whether messages pass while the device computes.
    """

    costs: Costs
    hop: Callable[[Split, float], float]
    sums: Callable[[Split, float], float]
    update: Callable[[Job, Split, float], float]
    state: Callable[[Job, Split, Elements], Any]
    limit: float
    hides: bool


class Memory(NamedTuple):
    """Bytes of a rank at its peak."""

    state: float
    activations: float

    @property
    def total(self) -> float:
        return self.state + self.activations


class Step(NamedTuple):
    """A split's step: ``parts`` of STEP_PARTS, seconds of ``rank``, a place in the pipeline, which ends last.

    ``parameters``: elements on that rank.  ``memory``: of every place in the pipeline.  ``hop``: seconds of a message
    to the next stage.
    """

    split: Split
    micro_batches: int
    seconds: float
    parts: dict[str, float]
    rank: int
    parameters: float
    memory: tuple[Memory, ...]
    hop: float

    @property
    def peak(self) -> float:
        """The most bytes that a rank holds."""
        return max(m.total for m in self.memory)


def micro_batches(job: Job, split: Split) -> int:
    """Returns how many micro-batches a replica runs a step; ValueError where the batch cannot be cut so."""
    check(
        job.batch % (split.dp * split.micro_batch) == 0,
        f"plan: a batch of {job.batch} is not divisible by dp {split.dp} x micro-batches of {split.micro_batch}",
    )
    return job.batch // (split.dp * split.micro_batch)


class Load:
    """What the ranks of a split with chosen layers do in a step, before the clock runs."""

    def __init__(self, job: Job, split: Split, means: Means, spans: Spans):
        assert split.layers is not None
        self.job, self.split, self.means = job, split, means
        self.count = micro_batches(job, split)
        self.chains = placement(split.schedule, split.pp, split.chunks)
        self.stages = stages = spans.cut(split.layers)
        self.hop = means.hop(split, spans.pieces.rows)
        self.parts = self._by_rank((stages.parts[:, _F] + stages.parts[:, _B]) * self.count / len(self.chains))
        self.busy = self.parts.sum(1)
        self.elements = spans.elements(split.layers, split)
        self.parameters = self._by_rank(stages.parameters[:, None])[:, 0]
        self.dp = np.array([exposed(self, n) for n in self.parameters])
        self.update = np.array([means.update(job, split, n) for n in self.parameters])
        # Chimera's two copies sum their gradients: each rank with the one that holds the same stages.
        self.copies = np.array([_copies(self, n) for n in self.parameters])
        self.transient = spans.transient(len(stages.saved))

    def _by_rank(self, of_stages: Array) -> Array:
        """Sums rows of stages over those that each rank holds."""
        made = np.zeros((self.split.pp, of_stages.shape[1]))
        for chain in self.chains:
            np.add.at(made, list(chain), of_stages)
        return made

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Of every place in the pipeline."""
        split, sizes = self.split, np.stack([self.stages.saved, self.stages.held], -1)
        held, found = self._by_rank(np.stack(self.elements, -1)), []
        for rank, own in enumerate(kept(split.schedule, split.pp, self.count, split.chunks)):
            state = float(self.means.state(self.job, split, Elements(*held[rank])))
            found.append(Memory(state, own.most(sizes) + float(self.transient[own.stages].max())))
        return tuple(found)

    @property
    def bound(self) -> float:
        """Seconds that the step takes at least.

        A rank cannot start before a micro-batch's forward passes have come down to one of its stages, computes for all
        its busy time, and (where backward passes are whole, so that its last action is one) what it has made goes on up
        to the first stage.
        """
        after = self.copies + self.dp + self.update
        first, least = np.full((2, self.split.pp), np.inf)
        for chain in self.chains:
            far = self.hop * (np.diff(chain) != 0)
            down, up = (np.cumsum([0.0, *(self.stages.seconds(kind)[:-1] + far)]) for kind in (FORWARD, BACKWARD))
            np.minimum.at(first, list(chain), down)
            np.minimum.at(least, list(chain), up + after[chain[0]])
        split = SCHEDULES[self.split.schedule].split
        return float((first + self.busy + (after if split else np.maximum(after, least))).max())

    def timeline(self) -> Timeline:
        """Returns when each pass of a step runs on each rank, without what comes after the last."""
        split, later = self.split, SCHEDULES[self.split.schedule].split
        made = ordered(split.schedule, split.pp, self.count, split.chunks)
        F, B, I, W = (self.stages.seconds(kind).tolist() for kind in KINDS)  # noqa: E741
        return simulate(made, F, I if later else B, W if later else [0.0] * len(W), communication=self.hop)

    def step(self) -> Step:
        """Runs the clock."""
        split = self.split
        made = clock_of(split.schedule, split.pp, self.count, split.chunks)
        _, ends = made.run(made.costs(dict(zip(KINDS, self.stages.passes.T))), self.hop)
        done = ends[made.begins[1:] - 1] + self.copies + self.dp + self.update
        rank = int(done.argmax())
        parts = dict(zip(PARTS, self.parts[rank].tolist()))
        beside = {DP: float(self.dp[rank]), OPTIMIZER: float(self.update[rank])}
        seconds = float(done[rank])
        waits = seconds - sum(parts.values()) - sum(beside.values())
        parts |= {PP: waits if split.pp > 1 else 0.0} | beside
        elements = float(self.parameters[rank])
        return Step(
            split=split,
            micro_batches=self.count,
            seconds=seconds,
            parts=parts,
            rank=rank,
            parameters=elements,
            memory=self.memory,
            hop=self.hop,
        )


def _copies(load: Load, parameters: float) -> float:
    if len(load.chains) == 1:
        return 0.0
    return load.means.hop(load.split, parameters * load.job.dtype.itemsize)


_F, _B = KINDS.index(FORWARD), KINDS.index(BACKWARD)


def exposed(load: Load, parameters: float) -> float:
    """Returns the seconds of sums over dp that nothing hides, of a rank of so many elements."""
    job, split, means = load.job, load.split, load.means
    if split.dp == 1:
        return 0.0
    size = parameters * job.dtype.itemsize
    if split.pp > 1:  # once a step, one gather and one scatter where it is sharded: as many bytes as a sum
        return means.sums(split._replace(sharded=False), size)
    once, stages = means.sums(split, size), load.stages
    if split.sharded:
        return load.count * max(0.0, once - means.hides * float(stages.both.sum()))
    return max(0.0, once - means.hides * float(stages.seconds(BACKWARD).sum()))


@lru_cache(maxsize=32)
def clock_of(schedule: str, ranks: int, count: int, chunks: int) -> Clock:
    """Returns the clock of an order, kept: an order takes longer to make than to run."""
    return Clock.of(ordered(schedule, ranks, count, chunks))
