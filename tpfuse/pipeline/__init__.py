"""Pipelines: what each rank does under every schedule, how long it takes, and what fits into its bubbles."""

from ..kernels.runtime.deferred import WeightGradients
from .action import Action
from .bubbles import Filling, Placed, Work, demand, fill
from .order import SCHEDULES, Order, order
from .placement import Chunk, Stage
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
