"""What a split of a model over machines would take: the devices, the networks and the collectives that it runs on.

check        plans against real steps on this machine
cluster      devices in levels of links: a group's rate; presets, and clusters from TOML
collectives  six all-reduces: their messages, and their seconds on a link
command      python -m tpfuse collectives
devices      a device's roofline, data sheets, and this machine as calibrated: seconds of an op
explain      why a plan is the best, and what would change that
intra/       layouts of a block's ops on a mesh
kept         of how many micro-batches a rank keeps activations at a time
known        what searches over one model share
layers       layers to stages, by dynamic programming
means        what steps are costed by on a cluster
messages     seconds of what goes over tp, over dp and between stages
pieces       embedding, block, head and border of the real model, by dry runs of its stages
planning     python -m tpfuse plan
report       plans as a table, numbers and a picture
search       every split, by branch and bound
spans        pieces as arrays: what any run of blocks costs as a stage
split        a job, a way to split it, and what the pieces of its model cost: what the planner hands on
state        what a rank holds apart from activations, and its optimizer's seconds
step         a step's seconds by part and each rank's memory
topology/    networks as graphs, by networkx
"""

from . import intra, topology
from .cluster import Cluster, Level
from .collectives import ALL_REDUCE, OWN, Link, Message, cheapest, seconds
from .devices import DEVICES, Device
from .split import Job, Split

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
    "Split",
    "cheapest",
    "intra",
    "seconds",
    "topology",
]
