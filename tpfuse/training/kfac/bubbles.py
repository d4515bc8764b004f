"""K-FAC's work as pieces for the bubbles of a pipeline (PipeFisher, Osawa et al. 2022, arXiv:2211.14133).

The factors of each weight and micro-batch are a piece after the backward pass that gives their matrices, and the
inversion of each factor is one after all of these.  Tensor-parallel ranks and replicas of a stage have the same pieces
in the same order, in which they may send to each other.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import listed
from ...models.model import staged_in
from ...pipeline import Action, Work
from ...pipeline.action import BACKWARD, WEIGHT
from ...pipeline.copies import copied
from ...ranks.messages import gather
from ..matrices import WholeMatrices
from .curvature import SIDES, Curvature, State

if TYPE_CHECKING:
    from ...pipeline import Pipeline

Refreshes = Mapping[Curvature, Callable[[str], None]]  # of a factor, by its side
FACTORS, _REPEATS = "factors", 3


class _Piece(NamedTuple):
    """A piece of this rank, which needs an action or pieces by their places in the rank's list."""

    seconds: float
    prerequisites: tuple[Action | int, ...]


def check_copies(model: nn.Module, matrices: WholeMatrices) -> None:
    """ValueError for a weight that another rank of the pipeline holds too, with factors of other micro-batches."""
    staged = staged_in(model)
    twice = set() if staged is None else set(copied(staged).values())
    names = [name for name, (p, *_) in matrices.sources.items() if p in twice]
    check(
        not names,
        f"KFAC: two ranks of the pipeline hold {listed(names)}, each for a part of the micro-batches, of which their"
        " factors would differ; use another schedule",
    )


def stages_of(pipeline: "Pipeline", matrices: WholeMatrices) -> list[int]:
    names = {p: name for name, p in pipeline.model.named_parameters()}
    layers = [int(names[p].split(".")[1]) for p, *_ in matrices.sources.values()]  # of blocks.3.mlp.fc1.weight
    chunks = pipeline.model.stages.chunks
    return [next(chunk.stage for chunk in chunks if layer in chunk.layers) for layer in layers]


def pieces(pipeline: "Pipeline", stages: Mapping[Curvature, int], refreshes: Refreshes) -> list[Work]:
    """Returns the pieces of all ranks, of which this one's can be run.  ``stages``: of each weight on this rank."""
    curvatures, rank = list(refreshes), pipeline.group.rank()
    ends = [action for action in pipeline.order.actions[rank] if action.kind in (BACKWARD, WEIGHT)]
    runs: list[Callable[[], None]] = []
    pieces_here: list[_Piece] = []
    factors: dict[Curvature, list[int]] = {}
    seconds = _seconds(curvatures)
    for action in ends:
        for curvature in curvatures:
            if stages[curvature] == action.stage:
                factors.setdefault(curvature, []).append(len(pieces_here))
                pieces_here.append(_Piece(seconds[curvature][FACTORS], (action,)))
                runs.append(_adding(curvature, action.micro_batch))
    for curvature in curvatures:
        for side in SIDES:
            pieces_here.append(_Piece(seconds[curvature][side], tuple(factors[curvature])))
            runs.append(functools.partial(refreshes[curvature], side))
    work: list[Work] = []
    for r, held in enumerate(gather(pieces_here, pipeline.group)):
        offset = len(work)
        for i, piece in enumerate(held):
            after_these = tuple(a if isinstance(a, Action) else a + offset for a in piece.prerequisites)
            work.append(Work(r, piece.seconds, after_these, runs[i] if r == rank else None))
    return work


def _adding(curvature: Curvature, micro_batch: int) -> Callable[[], None]:
    def run() -> None:
        for rows in curvature.held.pop(micro_batch, ()):
            curvature.add(rows)

    return run


# ---- what pieces take ----


def _seconds(curvatures: list[Curvature]) -> dict[Curvature, dict[str, float]]:
    """Returns the seconds of each weight's pieces, those of ``FACTORS`` and of both sides: medians over repeats, once
    for weights of one size, and means over the ranks with the same pieces."""
    sizes: dict[object, dict[str, float]] = {}
    for curvature in curvatures:
        if curvature.size not in sizes:
            sizes[curvature.size] = _measured(curvature)
    times = [list(seconds.values()) for seconds in sizes.values()]
    for group in dict.fromkeys(group for curvature in curvatures for group in curvature.groups):
        ranks = gather(times, group)
        times = [[statistics.fmean(same) for same in zip(*rows, strict=True)] for rows in zip(*ranks, strict=True)]
    means = {size: dict(zip(sizes[size], row, strict=True)) for size, row in zip(sizes, times, strict=True)}
    return {curvature: means[curvature.size] for curvature in curvatures}


def _measured(curvature: Curvature) -> dict[str, float]:
    """Returns the seconds of the pieces of a weight of this size, on random rows."""
    assert curvature.size is not None
    rows, probe, state, times = curvature.size.random_rows(), curvature.blank(), State(), dict[str, list[float]]()
    works: dict[str, Callable[[], None]] = {FACTORS: functools.partial(probe.add, rows)}
    for side in SIDES:
        works[side] = functools.partial(probe.refresh, side, state, decay=0.5, damping=1.0)
    for _ in range(_REPEATS):
        for name, work in works.items():
            begin = _now(rows.x)
            work()
            times.setdefault(name, []).append(_now(rows.x) - begin)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _now(x: torch.Tensor) -> float:
    if not x.is_cpu:
        torch.accelerator.synchronize(x.device)
    return time.perf_counter()
