"""The stages of a model that a rank of a pipeline holds, and the layers of a stage."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import check_numbers, integer, one_of, optional, quoted
from .schedules import EVERY, TRAINED, placement


class Chunk(NamedTuple):
    """Stage number ``stage`` of the ``stages`` that a model is cut into: the blocks ``layers``.

    The first stage has the embedding too, the final one the head and the loss.  ``chain``: the copy of the model, of
    which a schedule may train two.
    """

    stage: int
    stages: int
    layers: range
    chain: int = 0

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


class Stage(NamedTuple):
    """A rank's position in a pipeline: ``rank`` of ``ranks``; the ``schedule`` assigns its stages.

    ``chunks``: the number of stages it holds, if the schedule leaves that open.  ``layers``: the number of blocks of
    each stage of the whole pipeline; None: balanced by cost.
    """

    rank: int
    ranks: int
    schedule: str = "1f1b"
    chunks: int | None = None
    layers: Sequence[int] | None = None


_NUMBERS = dict(rank=integer(0), ranks=integer(), chunks=optional(integer()))


def stage_of(name: str, value: "Stage | tuple[int | str, ...]") -> Stage:
    """Returns a checked Stage, made of one or of a tuple of its fields.  ValueError, in the name of ``name``, else."""
    check(
        isinstance(value, tuple) and 2 <= len(value) <= len(Stage._fields),
        f"{name}: stage must be a tpfuse.pipeline.Stage or (rank, ranks) or (rank, ranks, schedule), got"
        f" {quoted(value)}",
    )
    stage = Stage(*value)
    error = one_of(TRAINED)(stage.schedule)
    check(error is None, f"{name}: stage's schedule must be one of {', '.join(TRAINED)}, got {quoted(stage.schedule)}")
    check_numbers(f"{name}: stage", stage._asdict(), _NUMBERS)
    check(stage.rank < stage.ranks, f"{name}: stage's rank must be below its ranks={stage.ranks}, got {stage.rank}")
    held = EVERY[stage.schedule].chunks
    check(
        stage.chunks is None or stage.chunks in held,
        f"{name}: {stage.schedule} has {held[0]} to {held[-1]} stages a rank, got chunks={stage.chunks}",
    )
    return stage


def chunks_of(name: str, stage: Stage, costs: "PartCosts") -> tuple[Chunk, ...]:
    """Returns the stages that a rank holds, chain by chain, of a model whose parts cost ``costs``.

    ValueError, in the name of ``name``, for fewer layers than stages, or ``layers`` that do not fit the stages.
    """
    chains = placement(stage.schedule, stage.ranks, held_by(stage))
    count, layers = len(chains[0]), len(costs.blocks)
    check(
        layers >= count,
        f"{name}: {stage.schedule} over {stage.ranks} ranks cuts the model into {count} stages, and it has {layers}"
        " layers",
    )
    if stage.layers is None:
        sizes = balanced(costs, count)
    else:
        sizes = list(stage.layers) if isinstance(stage.layers, list | tuple) else []
        positive = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes)
        check(
            positive and len(sizes) == count and sum(sizes) == layers,
            f"{name}: stage's layers must be {count} positive integers whose sum is {layers}, got"
            f" {quoted(stage.layers)}",
        )
    begins = [sum(sizes[:i]) for i in range(count + 1)]
    return tuple(
        Chunk(i, count, range(begins[i], begins[i + 1]), chain)
        for chain, ranks in enumerate(chains)
        for i, rank in enumerate(ranks)
        if rank == stage.rank
    )


def held_by(stage: Stage) -> int:
    """Returns the number of stages of a chain that each rank holds."""
    return EVERY[stage.schedule].chunks[0] if stage.chunks is None else stage.chunks


class PartCosts(NamedTuple):
    """The cost of a token in each part of a model, in any unit of work: the embedding, each block, the head."""

    embedding: float
    blocks: Sequence[float]
    head: float


def balanced(costs: PartCosts, count: int) -> list[int]:
    """Returns the blocks of each of ``count`` stages: contiguous, none empty, the costliest stage as cheap as possible;
    ``costs`` are of as many blocks at least."""
    sums = np.cumsum([0.0, *costs.blocks])
    ends = (costs.embedding * (stage == 0) + costs.head * (stage == count - 1) for stage in range(count))
    sizes = partition([sums - sums[:, None] + cost for cost in ends])
    assert sizes is not None  # costs are finite
    return list(sizes)


def partition(costs: Sequence[np.ndarray[Any, Any]]) -> tuple[int, ...] | None:
    """Returns how many blocks each stage has, none empty, so that the slowest stage is fastest: a dynamic program over
    the blocks from the first on.  None where no partition is finite.

    ``costs[s]`` [L + 1, L + 1]: at [i, j] the seconds of stage s with the blocks i to j (excluded), infinite where it
    may not have them.  Of equal partitions the one whose later stages are longer: earlier stages have more
    micro-batches in flight.
    """
    layers = len(costs[0]) - 1
    empty = np.tril(np.full((layers + 1, layers + 1), np.inf))
    best, begins = costs[0][0] + empty[0], []
    for cost in costs[1:]:
        slowest = np.maximum(best[:, None], cost + empty)
        begins.append(slowest.argmin(0))
        best = slowest.min(0)
    if not np.isfinite(best[layers]):
        return None
    sizes, end = [], layers
    for begin in reversed(begins):
        sizes.append(end - int(begin[end]))
        end -= sizes[-1]
    return (end, *reversed(sizes))
