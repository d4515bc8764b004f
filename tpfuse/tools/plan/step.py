"""Estimate of one training step under a split: its seconds, where they go, and each rank's peak memory.

Passes run by the simulator's clock over the schedule's own list of actions.  Time of the rank that ends last that
nothing else explains is "pp": bubbles, messages between stages that nothing hides, and the sums of Chimera's copies.
The rest follows how tpfuse runs it:

    dp    replicas sum once a step: with stages after the last pass, hidden by nothing; without, as DDP does, under the
          last backward pass, where the device sends while computing.  Sharded without stages, FSDP gathers twice and
          scatters once a micro-batch, under its passes; with stages it gathers and scatters once a step, and
          parameters and gradients are whole in between
          Experts that are divided among replicas have no part in any of it
    cp    as tp: what attention exchanges, and the sum of the weights' gradients of each micro-batch
    tp    hidden by nothing; the exchanges of experts' rows count here, also where they are over dp x tp
    steps follow one another: the optimizer, and a rank's waiting for others, count; without a flush (2bw) each rank
          begins the next where it ends
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...kernels.runtime.errors import check
from ...pipeline.action import BACKWARD, FORWARD, KINDS
from ...pipeline.clock import OrderArrays
from ...pipeline.schedules import EVERY, WITHOUT_FLUSH, Order, placement
from ...pipeline.simulator import Timeline, simulate
from .costs import CostModel
from .in_flight import in_flight, ordered
from .spans import Array, Spans
from .split import PARTS, Elements, Job, Split

PP, DP, OPTIMIZER = "pp", "dp", "optimizer"
STEP_PARTS = *PARTS, PP, DP, OPTIMIZER
_ROUNDING = 1e-12  # of a step's sum of parts
_F, _B = KINDS.index(FORWARD), KINDS.index(BACKWARD)


class Memory(NamedTuple):
    """Bytes of a rank at its peak."""

    state: float
    activations: float

    @property
    def total(self) -> float:
        return self.state + self.activations


class StepEstimate(NamedTuple):
    """Estimate of a split's step.

    ``parts``: seconds by STEP_PARTS of ``rank``, the pipeline rank that ends last.  ``parameters``: elements on that
    rank; ``experts``: those of experts that are divided among replicas.  ``memory``: of each pipeline rank.  ``hop``:
    seconds of a message to the next stage, the slowest of all.
    """

    split: Split
    micro_batches: int
    seconds: float
    parts: dict[str, float]
    rank: int
    parameters: float
    experts: float
    memory: tuple[Memory, ...]
    hop: float

    @property
    def updated(self) -> float:
        """Elements that the optimizer of that rank steps on."""
        return float(updated(self.split, self.parameters, self.experts))

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


def updated(split: Split, parameters: Any, experts: Any) -> Any:
    """Returns how many of ranks' elements their optimizers step on, numbers or arrays: FSDP cuts them evenly, but not
    ``experts``."""
    return experts + (parameters - experts) / split.shards


class Load:
    """The work of each pipeline rank in a step of a split with chosen layers, before the clock runs."""

    def __init__(self, job: Job, split: Split, costs: CostModel, spans: Spans):
        assert split.layers is not None
        self.job, self.split, self.costs = job, split, costs
        self.count = micro_batches(job, split)
        self.chains = placement(split.schedule, split.pp, split.chunks)
        self.stages = stages = spans.cut(split.layers)
        self.hops = costs.hops(split, spans.pieces.hop_bytes)
        self.parts = self._by_rank((stages.parts[:, _F] + stages.parts[:, _B]) * self.count / len(self.chains))
        self.busy = self.parts.sum(1)
        self.elements = spans.elements(split.layers, split)
        self.parameters, self.experts = self._by_rank(np.stack([stages.parameters, stages.experts], -1)).T
        size = job.dtype.itemsize
        self.dp = np.array([self._exposed(n * size) for n in self.parameters - self.experts])
        self.update = np.array([costs.update(job, n) for n in updated(split, self.parameters, self.experts)])
        # Chimera's two copies sum their gradients: each rank with the one that holds the same stages.
        self.copies = np.zeros(split.pp)
        if len(self.chains) > 1:
            pairs = enumerate(zip(self.chains[1], self.parameters, strict=True))
            self.copies = np.array([costs.hops(split, n * size)[rank, other] for rank, (other, n) in pairs])
        self.transient = spans.transient(split.layers)

    def _exposed(self, gradients: float) -> float:
        """Returns the seconds of sums over dp that nothing hides, of a rank with so many bytes of gradients."""
        split, costs = self.split, self.costs
        once = costs.sums(split, gradients)
        if split.pp > 1:
            return once
        if split.sharded:
            return self.count * max(0.0, once - costs.hides * float(self.stages.both.sum()))
        return max(0.0, once - costs.hides * float(self.stages.seconds(BACKWARD).sum()))

    def _by_rank(self, of_stages: Array) -> Array:
        """Sums rows of stages over those that each rank holds."""
        sums = np.zeros((self.split.pp, of_stages.shape[1]))
        for chain in self.chains:
            np.add.at(sums, list(chain), of_stages)
        return sums

    def _chain_hops(self, chain: tuple[int, ...]) -> Array:
        """Returns the seconds of a message from each stage to the next."""
        return np.array(self.hops[list(chain[:-1]), list(chain[1:])])

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Peak memory of each pipeline rank."""
        split, sizes = self.split, np.stack([self.stages.saved, self.stages.held], -1)
        elements = self._by_rank(np.stack(np.broadcast_arrays(*self.elements), -1))
        memory = list[Memory]()
        for rank, flight in enumerate(in_flight(split.schedule, split.pp, self.count, split.chunks)):
            state = float(self.costs.state(self.job, split, Elements(*elements[rank])))
            memory.append(Memory(state, flight.peak(sizes) + float(self.transient[flight.stages].max())))
        return tuple(memory)

    @property
    def bound(self) -> float:
        """Lower bound of the step's seconds.

        A rank cannot start before a micro-batch's forward passes have come down to one of its stages, computes for all
        its busy time, and (where backward passes are whole, so that its last action is one) its last gradient still has
        to go up to the first stage.  Without a flush it need not wait.
        """
        tail = self.copies + self.dp + self.update
        if self.split.schedule in WITHOUT_FLUSH:
            return float((self.busy + tail).max())
        start, finish = np.full((2, self.split.pp), np.inf)
        for chain in self.chains:
            hops = self._chain_hops(chain)
            down, up = (np.cumsum([0.0, *(self.stages.seconds(kind)[:-1] + hops)]) for kind in (FORWARD, BACKWARD))
            np.minimum.at(start, list(chain), down)
            np.minimum.at(finish, list(chain), up + tail[chain[0]])
        split = EVERY[self.split.schedule].split
        return float((start + self.busy + (tail if split else np.maximum(tail, finish))).max())

    @property
    def passes(self) -> tuple[list[float], list[float], list[float]]:
        """Seconds of each stage's F, I and W, as of :func:`simulate`; a backward pass that is whole counts as I."""
        F, B, I, W = (self.stages.seconds(kind).tolist() for kind in KINDS)  # noqa: E741
        return (F, I, W) if EVERY[self.split.schedule].split else (F, B, [0.0] * len(W))

    def order(self) -> Order:
        return ordered(self.split.schedule, self.split.pp, self.count, self.split.chunks)

    def timeline(self) -> Timeline:
        """Returns when each pass of a step runs on each rank, without sums and optimizer after the last."""
        return simulate(self.order(), *self.passes, communication=self.hops.tolist())

    def step(self) -> StepEstimate:
        """Runs the clock."""
        split = self.split
        clock = clock_of(split.schedule, split.pp, self.count, split.chunks)
        starts, ends = clock.run(clock.costs(dict(zip(KINDS, self.stages.passes.T))), self.hops)
        finish = ends[clock.begins[1:] - 1] + self.copies + self.dp + self.update
        if split.schedule in WITHOUT_FLUSH:
            finish -= starts[clock.begins[:-1]]
        rank = int(finish.argmax())
        seconds, parts = float(finish[rank]), dict(zip(PARTS, self.parts[rank].tolist()))
        tail = {DP: float(self.dp[rank]), OPTIMIZER: float(self.update[rank])}
        waits = seconds - sum(parts.values()) - sum(tail.values())
        parts |= {PP: waits if split.pp > 1 and waits > _ROUNDING * seconds else 0.0} | tail
        return StepEstimate(
            split,
            self.count,
            seconds,
            parts,
            rank=rank,
            parameters=float(self.parameters[rank]),
            experts=float(self.experts[rank]),
            memory=self.memory,
            hop=max(float(self._chain_hops(chain).max(initial=0.0)) for chain in self.chains),
        )


@lru_cache(maxsize=32)
def clock_of(schedule: str, ranks: int, count: int, chunks: int) -> OrderArrays:
    """Returns the clock of an order, cached: an order takes longer to build than to run."""
    return OrderArrays.of(ordered(schedule, ranks, count, chunks))
