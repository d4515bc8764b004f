"""Pipelines: what each rank does under every schedule, how long it takes, and what fits into its bubbles.

action     one action, in torch's letters
bubbles    other work in bubbles: where it fits, and what runs it there
chimera    two pipelines in opposite directions
clock      when each action begins and ends, all ranks at once
copies     parameters that two ranks hold, and the sum of their gradients
lost       which rank has ended, where a message has failed
placement  which stages a rank holds, and which layers a stage has
runtime    torch's runtime over any order of actions
schedules  SCHEDULES: every rank's actions under each
sharded    FSDP2 over the replicas of stages: whole for a step, summed once
simulator  actions by a clock: seconds, bubbles, activations in flight
step       schedule(model, mesh, name, micro_batches): a step of training
theirs     torch's own lists of actions; private API
"""

from ..kernels.runtime.deferred import WeightGradients
from .action import Action
from .bubbles import Filling, Placed, Work, demand, fill
from .placement import Chunk, Stage
from .schedules import SCHEDULES, Order, order
from .simulator import Event, Timeline, simulate
from .step import Pipeline, schedule

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
