"""Networks as graphs, and what they give to a planner: bandwidth, cost, and the links of a split's groups."""

from .bandwidth import all_reduce, all_to_all, bisection
from .build import NETWORKS, dragonfly, fat_tree, hamming_mesh, torus
from .network import Network
from .rings import cycles, rings

__all__ = [
    "NETWORKS",
    "Network",
    "all_reduce",
    "all_to_all",
    "bisection",
    "cycles",
    "dragonfly",
    "fat_tree",
    "hamming_mesh",
    "rings",
    "torus",
]
