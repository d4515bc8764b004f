"""The action lists of torch.distributed.pipelining's schedules, without ranks or stages that could run.

They are private in torch (``pipeline_order``; 2.11 to 2.15), so this is the one file that reads them; runtime.py runs
such lists.
"""

from types import SimpleNamespace
from typing import Any

from torch import nn

from .action import Action


def actions(name: str, ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    """Returns the actions of a class of torch, without its bubbles (None): no rank waits for them."""
    from torch.distributed.pipelining import schedules  # which imports the compiler

    stages = [
        SimpleNamespace(
            stage_index=i * ranks,
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            is_last=False,
            submod=nn.Identity(),
        )
        for i in range(chunks)
    ]
    torch_class = getattr(schedules, name)
    # Placing the messages between actions takes most of the time, and they are the runtime's.
    alone = type(name, (torch_class,), dict(_prepare_schedule_with_comms=lambda *_, **__: None))
    built: Any = alone(stages, micro_batches)
    return [[ours for action in built.pipeline_order[r] for ours in _flat(action)] for r in range(ranks)]


def _flat(action: Any) -> list[Action]:
    """Returns an action of torch as ours; one that overlaps two as both, in their order."""
    if action is None:
        return []
    parts = action.sub_actions or (action,)
    return [Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in parts]
