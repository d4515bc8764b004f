"""Networks as graphs, and what they give to a planner: bandwidth, cost, and the links of a split's groups."""

from .bandwidth import all_reduce, all_to_all, bisection
from .build import NETWORKS, dragonfly, fat_tree, hamming_mesh, torus
from .network import Network
from .placement import Links, links, place
from .rings import cycles, rings

__all__ = [
    "NETWORKS",
    "Links",
    "Network",
    "all_reduce",
    "all_to_all",
    "bisection",
    "cycles",
    "dragonfly",
    "fat_tree",
    "hamming_mesh",
    "links",
    "place",
    "rings",
    "torus",
]
