"""Pipelines: the actions of each rank under every schedule, their time, and other work in their bubbles.

action     one action, in torch's letters
bubbles      other work in bubbles: its placement, and running it there
chimera      two pipelines in opposite directions
clock        the start and end of each action, all ranks at once
copies       parameters that two ranks hold, and the sum of their gradients
delayed      a pipeline without a flush, whose gradients are one step late
delays       gradients that are applied one step late, and who holds a model's
failures     names the rank that has ended when a message fails
placement    the stages of a rank, and the layers of a stage
runtime      torch's runtime over any order of actions
scheduled    schedule(model, mesh, name, micro_batches): what trains a model
schedules    SCHEDULES: every rank's actions under each
sharded      FSDP2 over the replicas of stages: gathered for a step, summed once
simulator    actions by a clock: seconds, bubbles, activations in flight
step         a step of training, whose gradients are complete at its end
torch_lists  torch's own lists of actions; private API
trees        gradients of micro-batches as binary trees; both uses of a tied weight apart
versions     the weights of a batch in flight
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
    from .scheduled import schedule
    from .step import Pipeline
else:

    def __getattr__(name: str) -> Any:
        """Imports ``step``, and with it torch's pipelining and its compiler, at the first use of one of its names."""
        if name not in ("Pipeline", "schedule"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(".scheduled", __name__), name)


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
