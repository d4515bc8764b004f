"""Pipelines: the actions of each rank under every schedule, their time, and other work in their bubbles.

action     one action, in torch's letters
bubbles      other work in bubbles: its placement, and running it there
chimera      two pipelines in opposite directions
clock        the start and end of each action, all ranks at once
copies       parameters that two ranks hold, and the sum of their gradients
failures     names the rank that has ended when a message fails
placement    the stages of a rank, and the layers of a stage
runtime      torch's runtime over any order of actions
schedules    SCHEDULES: every rank's actions under each
sharded      FSDP2 over the replicas of stages: gathered for a step, summed once
simulator    actions by a clock: seconds, bubbles, activations in flight
step         schedule(model, mesh, name, micro_batches): a step of training
torch_lists  torch's own lists of actions; private API
trees        gradients of micro-batches as binary trees; both uses of a tied weight apart
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..kernels.runtime.deferred import WeightGradients
from .action import Action
from .bubbles import Filling, Placed, Work, demand, fill
from .placement import Chunk, Stage
from .schedules import SCHEDULES, Order, order
from .simulator import Event, Timeline, simulate

if TYPE_CHECKING:
    from .step import Pipeline, schedule
else:

    def __getattr__(name: str) -> Any:
        """Imports ``step``, and with it torch's pipelining and its compiler, at the first use of one of its names."""
        if name not in ("Pipeline", "schedule"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(".step", __name__), name)


__all__ = [
    "SCHEDULES",
    "Action",
    "Chunk",
    "Event",
    "Filling",
    "Order",
    "Pipeline",
    "Placed",
    "Stage",
    "Timeline",
    "WeightGradients",
    "Work",
    "demand",
    "fill",
    "order",
    "schedule",
    "simulate",
]
