"""What a network carries, as shares of what its accelerators can inject.

``bisection``   the accelerators of lower numbers send to those of higher numbers: max-flow over the links of one half.
                In a mesh the halves are rows, of which there are no fewer than columns, so that few links are cut.
``all_to_all``  every accelerator sends as much to every other.  Messages take shortest paths, in equal parts over all
                of them; the fullest link sets the pace.
``all_reduce``  rings (``rings``), each summing its part of the data in both directions at once.  A link that several
                hops cross is shared; the fullest sets the pace.

A network of packets gives less, by headers and by queues; HammingMesh's table II has 98.1 to 98.9 % for rings.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .hamiltonian import hops_of, rings
from .network import Network, networkx
from .route import Edge, spread


def bisection(network: Network) -> float:
    """Returns the max-flow from the first half of the accelerators to the second, over the links of the first."""
    graph, half = networkx().Graph(), network.accelerators // 2
    side = lambda node: ("low" if node < half else "high") if isinstance(node, int) else node
    for a, b, edge in network.graph.edges(data=True):
        u, v = side(a), side(b)
        if u != v:
            before = graph[u][v]["capacity"] if graph.has_edge(u, v) else 0
            graph.add_edge(u, v, capacity=before + edge["links"])
    return float(networkx().maximum_flow_value(graph, "low", "high")) / (half * network.ports)


# ---- all to all ----


def all_to_all(network: Network) -> float:
    """Returns what every accelerator sends at once to all others, over its links."""
    load: dict[Any, float] = {}  # messages of both directions
    room: Counter[Any] = Counter()
    alike = _alike(network)
    for a, b, edge in network.graph.edges(data=True):
        room[alike(frozenset((a, b)))] += 2 * edge["links"]
    wanted: Mapping[Any, int]
    senders: Mapping[Any, int]
    if network.grid:
        wanted = dict.fromkeys(range(network.accelerators), 1)
        first = [r * network.grid[1] + c for r in range(network.board) for c in range(network.board)]
        senders = dict.fromkeys(first, network.accelerators // len(first))
    else:  # those of a switch send, and are sent to, as one: their own links have n - 1 messages each
        senders = wanted = Counter(next(iter(network.graph.adj[i])) for i in range(network.accelerators))
    for source, weight in senders.items():
        for link, messages in spread(network.graph, source, wanted).items():
            load[alike(link)] = load.get(alike(link), 0.0) + weight * messages
    fullest = max((n / room[links] for links, n in load.items()), default=0.0) * network.ports
    return min(1.0, (network.accelerators - 1) / fullest) if fullest else 1.0


def _alike(network: Network) -> Any:
    """Returns a function from an edge to what all edges with the same load have in common: in a mesh, those that moving
    every board by one puts in each other's places, elsewhere the edge alone."""
    if network.grid is None:
        return lambda edge: edge
    columns, board = network.grid[1], network.board

    def place(node: Any) -> Any:
        if isinstance(node, int):
            return node // columns % board, node % columns % board
        (axis, line, *above), *kind = node
        return axis, line % board, len(above), kind[0]

    def kind(edge: Edge) -> Any:
        along = len({node // columns for node in edge if isinstance(node, int)}) == 1
        return along, frozenset(map(place, edge))

    return kind


# ---- all-reduce ----


def crossings(network: Network, hops: Iterable[tuple[int, int]]) -> list[dict[Edge, float]]:
    """Returns which share of each hop's messages crosses each edge.

    An accelerator with one neighbour sends as its switch does, whose ways are looked for once.
    """
    near: Any = network.graph.adj
    behind = lambda node: next(iter(near[node])) if len(near[node]) == 1 else node
    known: dict[tuple[Any, Any], dict[Edge, float]] = {}
    found = []
    for a, b in hops:
        ways = behind(a), behind(b)
        if ways not in known:
            known[ways] = spread(network.graph, ways[0], {ways[1]: 1.0})
        own = {frozenset((node, way)): 1.0 for node, way in zip((a, b), ways) if node != way}
        found.append({**known[ways], **own})
    return found


def pace(network: Network, crossed: Iterable[dict[Edge, float]]) -> float:
    """Returns the share of a link's bandwidth that every hop has, each way, where all are at work both ways at once."""
    used: dict[Edge, float] = {}
    for hop in crossed:
        for edge, part in hop.items():
            used[edge] = used.get(edge, 0.0) + part
    return float(min(network.graph.edges[edge]["links"] / n for edge, n in used.items()))


def all_reduce(network: Network) -> float:
    """Returns what an accelerator sends in an all-reduce over all of them, over its links."""
    around = rings(network)
    hops = [hop for ring in around for hop in hops_of(ring)]
    return 2 * len(around) * pace(network, crossings(network, hops)) / network.ports
