"""Pipeline stages hold the whole model together, and have each parameter in one group of the optimizer.

A whole model is the case of one stage.  A parameter that several ranks hold, a tied embedding or all of a second chain,
is one tensor of the checkpoint, which one of them writes and all of them read.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from ...layers.shards import named_buffers
from ...models.model import staged_in
from ...pipeline.placement import Stage
from .pieces import BUFFER
from .ranks import Ranks
from .state import MODEL, Entries, Group, stored_names

_SAID = "param_groups must be the same on every rank, got"


def stage_in(model: nn.Module) -> Stage | None:
    """Returns this rank's place in a pipeline; None for a whole model."""
    staged = staged_in(model)
    return None if staged is None else staged.stages.place


def check_stages(stages: Sequence[Stage | None]) -> None:
    """ValueError where the stages of the ranks, in their order, are not those of one whole model."""
    pipelines = [None if stage is None else stage._replace(rank=0) for stage in stages]
    for rank, pipeline in enumerate(pipelines):
        if pipeline != pipelines[0]:
            raise ValueError(
                f"stage must be of one pipeline on every rank, got {stages[0]} on rank 0 and {stages[rank]} on rank"
                f" {rank}"
            )
    if pipelines[0] is not None:
        held = {stage.rank for stage in stages if stage is not None}
        absent = [str(rank) for rank in range(pipelines[0].ranks) if rank not in held]
        if absent:
            raise ValueError(
                f"the model is not whole: no rank holds the stages of rank {', '.join(absent)} of"
                f" {pipelines[0].ranks} of its pipeline"
            )


def merged(groups_of: Sequence[list[Group]], held: Sequence[Collection[str]]) -> list[Group]:
    """Returns the optimizer's groups over all ranks; ``groups_of`` and ``held``: each rank's groups and parameters.

    Parameters stand in the order of the ranks, each once.  ValueError where the groups differ in more than parameters,
    or where ranks that hold the same parameter do not have it in the same group.
    """
    for rank, groups in enumerate(groups_of):
        if len(groups) != len(groups_of[0]):
            raise ValueError(f"{_SAID} {len(groups_of[0])} groups on rank 0 and {len(groups)} on rank {rank}")
        for i, (reference, group) in enumerate(zip(groups_of[0], groups, strict=True)):
            for key in (reference | group).keys() - {"params"}:
                if json.dumps(reference.get(key)) != json.dumps(group.get(key)):
                    raise ValueError(
                        f"{_SAID} {key} {reference.get(key)} in group {i} on rank 0 and {group.get(key)} on rank {rank}"
                    )
    places: dict[str, tuple[int, str]] = {}  # of each parameter: the first rank that holds it, and its group there
    for rank, groups in enumerate(groups_of):
        group_names = {name: f"group {i}" for i, group in enumerate(groups) for name in group["params"]}
        for name in held[rank]:
            place = group_names.get(name, "no group")
            first_rank, first_place = places.setdefault(name, (rank, place))
            if place != first_place:
                raise ValueError(f"{_SAID} {name} in {first_place} on rank {first_rank} and in {place} on rank {rank}")
    joined: list[dict[str, Any]] = []
    for i, group in enumerate(groups_of[0]):
        params = dict.fromkeys(name for groups in groups_of for name in groups[i]["params"])
        joined.append(group | {"params": list(params)})
    return joined


def held_elsewhere(ranks: Ranks, model: nn.Module, entries: Entries) -> set[str]:
    """Returns the model's tensors of a checkpoint that other stages hold and this rank does not; each rank calls it."""
    mine = {MODEL + name for name in stored_names(entries).values()} | {BUFFER + name for name in named_buffers(model)}
    names_of = ranks.gather(lambda: [] if stage_in(model) is None else list(mine))
    return {name for names in names_of for name in names} - mine
