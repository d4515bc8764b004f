"""Pipelines: what each rank does under every schedule, how long it takes, and what fits into its bubbles."""

from .action import Action
from .bubbles import Filling, Placed, Work, demand, fill
from .order import SCHEDULES, Order, order
from .simulator import Event, Timeline, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Event",
    "Filling",
    "Order",
    "Placed",
    "Timeline",
    "Work",
    "demand",
    "fill",
    "order",
    "simulate",
]
