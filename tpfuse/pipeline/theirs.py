"""The action lists of torch.distributed.pipelining's schedules, without ranks or stages that could run.

They are private in torch (``pipeline_order``; 2.11 to 2.15), so this is the one file that reads them; runtime.py runs
such lists.
"""

from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from .action import Action


def actions(name: str, ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    """Returns the actions of a class of torch, whose bubbles (None) are left out: no rank waits for them."""
    stage = dict(num_stages=ranks * chunks, group_size=ranks, group_rank=0, submod=nn.Identity())
    stages = [SimpleNamespace(stage_index=i * ranks, is_last=False, **stage) for i in range(chunks)]
    theirs = getattr(schedules, name)
    # The messages between its actions, which take most of the time to place, are the runtime's, and here is none.
    alone = type(name, (theirs,), dict(_prepare_schedule_with_comms=lambda *_, **__: None))
    made: Any = alone(stages, micro_batches)
    return [[ours for action in made.pipeline_order[r] for ours in _flat(action)] for r in range(ranks)]


def _flat(action: Any) -> list[Action]:
    """An action of torch -> ours, of one that overlaps two both in their order."""
    if action is None:
        return []
    parts = action.sub_actions or (action,)
    return [Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in parts]
