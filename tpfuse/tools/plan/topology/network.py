"""A network as a graph: accelerators, switches, and the cables between them.

Accelerators are the nodes 0 to n - 1; the others are switches.  An edge has ``links``, the number of cables between its
two ends, and ``cable``, their kind.  A graph is one plane: planes are alike and do not meet, so shares of bandwidth are
those of one plane, and costs and bytes a second are those of one plane times their number.

The parts are those of HammingMesh (Hoefler et al. 2022, arXiv:2209.01346): links of 400 Gb/s, switches of 64 ports,
copper (DAC) of 5 m and active optical cables (AoC) of 20 m, and sixteen links an accelerator: four planes of four ports
in meshes, sixteen planes of one port in switched networks.  The rest is assumed.  Prices, and which cables are optical
(all between switches but those inside a Dragonfly's group, the columns of a HammingMesh, all of a torus that leave a
board), are such that the costs of its table II come out; traces on boards cost nothing.
Seconds: 5 ns a metre of cable, 300 ns through a switch or through an accelerator that forwards, and 1 us for a message
to leave one accelerator's memory and reach another's.
"""

import importlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from ....kernels.runtime.errors import check

LINK = 50e9  # bytes a second, each way: 400 Gb/s
PORTS = 64  # of a switch
FORWARD = 300e-9  # seconds through a switch or an accelerator
ENDS = 1e-6  # seconds at both ends of a message


class Cable(NamedTuple):
    dollars: float
    seconds: float  # from one end to the other


SWITCH = 14_280.0  # dollars
TRACE, DAC, AOC = "trace", "DAC", "AoC"
CABLES = {TRACE: Cable(0.0, 1e-9), DAC: Cable(272.0, 25e-9), AOC: Cable(603.0, 100e-9)}


class Network(NamedTuple):
    """A network of ``accelerators``.

    ``graph``: a networkx.Graph, of one plane.  ``ports``: links of an accelerator in a plane.  ``grid``: rows and
    columns of accelerators, numbered row by row, where they form a mesh.  ``board``: accelerators along a board's side.
    """

    name: str
    graph: Any
    accelerators: int
    planes: int
    ports: int
    grid: tuple[int, int] | None = None
    board: int = 1

    @property
    def switches(self) -> int:
        return self.planes * (len(self.graph) - self.accelerators)

    def cables(self, cable: str) -> int:
        """Returns the number of cables of a kind in all planes."""
        return self.planes * sum(e["links"] for *_, e in self.graph.edges(data=True) if e["cable"] == cable)

    @property
    def dollars(self) -> float:
        """Price of all switches and cables, without accelerators and their boards."""
        return self.switches * SWITCH + sum(self.cables(name) * cable.dollars for name, cable in CABLES.items())


def extra(name: str) -> Any:
    """Returns a module of tpfuse[plan]; ValueError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"plan: networks need {name.partition('.')[0]}: pip install tpfuse[plan]") from None


def empty(accelerators: int) -> Any:
    """Returns a graph without edges."""
    check(accelerators >= 2, f"plan: a network joins at least 2 accelerators, got {accelerators}")
    graph = extra("networkx").Graph()
    graph.add_nodes_from(range(accelerators))
    return graph


def join(graph: Any, a: object, b: object, cable: str) -> None:
    """Adds one link between two nodes."""
    if graph.has_edge(a, b):
        graph[a][b]["links"] += 1
    else:
        graph.add_edge(a, b, links=1, cable=cable)


def fold(graph: Any, name: object, below: Iterable[tuple[object, str]], down: int, up: int) -> None:
    """Joins ports, each (node, cable), by a folded Clos network: one switch where all fit, else leaves with ``down``
    ports below and ``up`` above, whose upper ports are joined in the same way at full bandwidth.

    Leaves that one switch can reach share spines, their links assigned round-robin; more leaves have a tree for each
    upper port (k-ary n-trees).
    """
    ports = list(below)
    if len(ports) <= PORTS:
        for node, cable in ports:
            join(graph, node, (name, "switch"), cable)
        return
    leaves = [(name, "leaf", i) for i in range(-(-len(ports) // down))]
    for i, (node, cable) in enumerate(ports):
        join(graph, node, leaves[i // down], cable)
    if len(leaves) <= PORTS:
        spines = -(-len(leaves) * up // PORTS)
        for i in range(len(leaves) * up):
            join(graph, leaves[i // up], (name, "spine", i % spines), AOC)
    else:
        for j in range(up):
            fold(graph, (name, j), [(leaf, AOC) for leaf in leaves], down=PORTS // 2, up=PORTS // 2)
