"""Which stages of a model a rank of a pipeline holds, and which layers a stage has."""

from collections.abc import Sequence
from typing import NamedTuple

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import check_numbers, one_of, optional, shown, whole
from .schedules import SCHEDULES, placement


class Chunk(NamedTuple):
    """Stage number ``stage`` of the ``stages`` that a model is cut into: the blocks ``layers``.

    The first has the embedding too, the last the head and the loss.  ``chain`` tells copies of the model apart, of
    which a schedule may train two.
    """

    stage: int
    stages: int
    layers: range
    chain: int = 0

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


class Stage(NamedTuple):
    """A rank's place in a pipeline: ``rank`` of ``ranks``, and the ``schedule`` that says which stages are its own.

    ``chunks``: the stages that it holds, where the schedule leaves that open.  ``layers``: the number of blocks of each
    stage of the whole pipeline; None: balanced by their cost.
    """

    rank: int
    ranks: int
    schedule: str = "1f1b"
    chunks: int | None = None
    layers: Sequence[int] | None = None


_NUMBERS = dict(rank=whole(0), ranks=whole(), chunks=optional(whole()))


def stage_of(name: str, given: "Stage | tuple[int | str, ...]") -> Stage:
    """Returns a checked Stage for one, or for a tuple of its fields.  ValueError of ``name`` for another."""
    check(
        isinstance(given, tuple) and 2 <= len(given) <= len(Stage._fields),
        f"{name}: stage must be a tpfuse.pipeline.Stage or (rank, ranks) or (rank, ranks, schedule), got"
        f" {shown(given)}",
    )
    stage = Stage(*given)
    known = one_of(SCHEDULES)(stage.schedule)
    check(known is None, f"{name}: stage's schedule must be one of {', '.join(SCHEDULES)}, got {shown(stage.schedule)}")
    check_numbers(f"{name}: stage", stage._asdict(), _NUMBERS)
    check(stage.rank < stage.ranks, f"{name}: stage's rank must be below its ranks={stage.ranks}, got {stage.rank}")
    held = SCHEDULES[stage.schedule].chunks
    check(
        stage.chunks is None or stage.chunks in held,
        f"{name}: {stage.schedule} has {held[0]} to {held[-1]} stages a rank, got chunks={stage.chunks}",
    )
    return stage


def chunks_of(name: str, stage: Stage, costs: "Costs") -> tuple[Chunk, ...]:
    """Returns the stages that a rank holds, chain by chain, of a model whose parts cost ``costs``.

    ValueError of ``name`` where there are fewer layers than stages, or ``layers`` does not say each stage's.
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
            f" {shown(stage.layers)}",
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
    return SCHEDULES[stage.schedule].chunks[0] if stage.chunks is None else stage.chunks


class Costs(NamedTuple):
    """What a token costs each part of a model, in any unit of work; the embedding and the head stand at the ends."""

    embedding: float
    blocks: Sequence[float]
    head: float


def balanced(costs: Costs, count: int) -> list[int]:
    """Returns how many blocks each of ``count`` stages has: contiguous, none empty, the costliest as cheap as can be.

    Of cuts that are equal in that, the one whose earlier stages are shorter: they keep more micro-batches.
    """
    prefix = [0.0]
    for cost in costs.blocks:
        prefix.append(prefix[-1] + cost)
    n = len(costs.blocks)

    def weight(i: int, j: int, stage: int) -> float:
        ends = costs.embedding * (stage == 0) + costs.head * (stage == count - 1)
        return prefix[j] - prefix[i] + ends

    # best[j]: the costliest of the stages so far over the first j blocks, and where the last of them begins
    best: list[list[tuple[float, int]]] = [[(weight(0, j, 0), 0) if j else (float("inf"), 0) for j in range(n + 1)]]
    for stage in range(1, count):
        row = []
        for j in range(n + 1):
            choices = [(max(best[-1][i][0], weight(i, j, stage)), i) for i in range(stage, j)]
            row.append(min(choices, default=(float("inf"), 0)))
        best.append(row)
    sizes, j = [], n
    for stage in reversed(range(count)):
        i = best[stage][j][1]
        sizes.append(j - i)
        j = i
    return sizes[::-1]
