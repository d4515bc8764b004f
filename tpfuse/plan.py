"""The public names of :mod:`tpfuse.tools.plan`."""

from .tools.plan import intra, topology
from .tools.plan.cluster import Cluster, Level, preset
from .tools.plan.collectives import ALL_REDUCE, OWN, Link, Message, cheapest, seconds
from .tools.plan.devices import DEVICES, Device
from .tools.plan.planning import best_plans
from .tools.plan.report import Plans
from .tools.plan.split import Job, Split

__all__ = [
    "ALL_REDUCE",
    "DEVICES",
    "OWN",
    "Cluster",
    "Device",
    "Job",
    "Level",
    "Link",
    "Message",
    "Plans",
    "Split",
    "best_plans",
    "cheapest",
    "intra",
    "preset",
    "seconds",
    "topology",
]
