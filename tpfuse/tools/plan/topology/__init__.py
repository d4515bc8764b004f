"""Networks as graphs: their bandwidth, their cost, and the links of a split's groups.

bandwidth    bisection, all-to-all, all-reduce, as shares of injection; traffic by shortest paths
build        NETWORKS: fat trees, Dragonfly, torus, HyperX, HammingMesh of a number of accelerators
command      python -m tpfuse topology
hamiltonian  two cycles through a torus that share no edge
network      a graph of accelerators, switches and cables, and its cost; folded Clos
placement    the accelerators of a split's ranks, and the links of their groups
"""

from .bandwidth import all_reduce, all_to_all, bisection
from .build import NETWORKS, dragonfly, fat_tree, hamming_mesh, torus
from .hamiltonian import cycles, rings
from .network import Network
from .placement import Links, links, place

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
