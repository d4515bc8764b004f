"""Bandwidth of a network, as shares of what its accelerators can inject.

``bisection``   the accelerators of lower numbers send to those of higher numbers: max-flow over the links of one half.
                In a mesh the halves are rows, of which there are no fewer than columns, so that few links are cut.
``all_to_all``  each accelerator sends equally much to all others.  Messages take shortest paths, in equal parts over
                all of them; the fullest link sets the pace.
``all_reduce``  rings (``rings``), each summing its part of the data in both directions at once.  A link that several
                hops cross is shared; the fullest sets the pace.

A packet network reaches less, because of headers and queues; HammingMesh's table II has 98.1 to 98.9 % for rings.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ....kernels.runtime.errors import check
from .hamiltonian import hops_of, rings
from .network import Network, extra

_SOURCES = 64  # at once, of :func:`loads`

Edge = frozenset[Any]  # its two nodes


def bisection(network: Network) -> float:
    """Returns the max-flow from the first half of the accelerators to the second, over the links of the first."""
    networkx = extra("networkx")
    graph, half = networkx.Graph(), network.accelerators // 2
    side = lambda node: ("low" if node < half else "high") if isinstance(node, int) else node
    for a, b, edge in network.graph.edges(data=True):
        u, v = side(a), side(b)
        if u != v:
            capacity = graph[u][v]["capacity"] if graph.has_edge(u, v) else 0
            graph.add_edge(u, v, capacity=capacity + edge["links"])
    return float(networkx.maximum_flow_value(graph, "low", "high")) / (half * network.ports)


# ---- shortest paths ----


def spread(graph: Any, source: object, receivers: Mapping[Any, float]) -> dict[Edge, float]:
    """Returns the messages that cross each edge where ``source`` sends each of ``receivers`` so many.

    A message takes all shortest paths in equal parts; parallel links are paths of their own.  Counts paths on the way
    out, level by level, and adds up shares on the way back (Brandes 2001).
    """
    levels: list[dict[Any, int]] = [{source: 1}]  # node -> number of shortest paths from the source
    visited, waiting = {source}, set(receivers) - {source}
    while waiting:
        level: dict[Any, int] = {}
        for node, count in levels[-1].items():
            for neighbour, edge in graph.adj[node].items():
                if neighbour not in visited:
                    level[neighbour] = level.get(neighbour, 0) + count * edge["links"]
        check(bool(level), f"plan: the network has no way from {source} to {next(iter(waiting))}")
        visited.update(level)
        waiting.difference_update(level)
        levels.append(level)
    crossing: dict[Edge, float] = {}
    onward: dict[Any, float] = {}
    for nearer, level in zip(levels[-2::-1], levels[:0:-1]):
        leaving: dict[Any, float] = {}
        for node in level.keys() & (receivers.keys() | onward.keys()):
            arriving = receivers.get(node, 0.0) + onward.get(node, 0.0)
            for neighbour, edge in graph.adj[node].items():
                if neighbour in nearer:
                    share = arriving * nearer[neighbour] * edge["links"] / level[node]
                    crossing[frozenset((neighbour, node))] = share
                    leaving[neighbour] = leaving.get(neighbour, 0.0) + share
        onward = leaving
    return crossing


def loads(graph: Any, sources: Mapping[Any, float], receivers: Mapping[Any, float]) -> dict[Edge, float]:
    """Returns the messages that cross each edge where each of ``sources``, its weight times, sends as :func:`spread`.

    The sums are those of spread for one source after another, as products of matrices with a column a source: a
    thousand switches take a second, and not a minute.
    """
    number = {node: i for i, node in enumerate(graph)}
    edges = [(number[a], number[b], edge["links"]) for a, b, edge in graph.edges(data=True)]
    ends = np.array([(a, b) for a, b, _ in edges] + [(b, a) for a, b, _ in edges], dtype=int).reshape(-1, 2).T
    links = np.array([n for *_, n in edges] * 2, dtype=float)
    adjacent = extra("scipy.sparse").csr_matrix((links, ends), shape=(len(number), len(number)))
    wanted = np.zeros((len(number), 1))
    wanted[[number[node] for node in receivers], 0] = list(receivers.values())
    crossed = np.zeros(len(edges))
    columns = [(number[node], weight) for node, weight in sources.items()]
    for start in range(0, len(columns), _SOURCES):
        places, weights = (np.array(values) for values in zip(*columns[start : start + _SOURCES], strict=True))
        paths = np.zeros((len(number), len(places)))
        paths[places, range(len(places))] = 1
        levels, visited = [paths], paths > 0
        while not visited[wanted[:, 0] > 0].all():
            paths = np.where(visited, 0.0, adjacent @ levels[-1])
            check(bool(paths.any()), "plan: the network has no way between some of its ends")
            levels.append(paths)
            visited |= paths > 0
        onward = np.zeros_like(paths)
        for nearer, level in zip(levels[-2::-1], levels[:0:-1], strict=True):
            share = np.divide(wanted + onward, level, out=np.zeros_like(level), where=level > 0)
            each = ((share[ends[1]] * nearer[ends[0]]) @ weights * links).reshape(2, -1)
            crossed += each.sum(0)
            onward = nearer * (adjacent @ share)
    edge_of = [*number]
    return {frozenset((edge_of[a], edge_of[b])): load for (a, b, _), load in zip(edges, crossed, strict=True) if load}


# ---- all to all ----


def all_to_all(network: Network) -> float:
    """Returns the bandwidth at which each accelerator sends to all others at once, over that of its links."""
    load: dict[Any, float] = {}  # messages of both directions
    capacity: Counter[Any] = Counter()
    kind_of = _edge_kind(network)
    for a, b, edge in network.graph.edges(data=True):
        capacity[kind_of(frozenset((a, b)))] += 2 * edge["links"]
    receivers: Mapping[Any, int]
    senders: Mapping[Any, int]
    if network.grid:
        receivers = dict.fromkeys(range(network.accelerators), 1)
        board = [r * network.grid[1] + c for r in range(network.board) for c in range(network.board)]
        senders = dict.fromkeys(board, network.accelerators // len(board))
    else:  # the accelerators of a switch send and receive as one: each has n - 1 messages on its own link
        senders = receivers = Counter(next(iter(network.graph.adj[i])) for i in range(network.accelerators))
    for link, messages in loads(network.graph, senders, receivers).items():
        load[kind_of(link)] = load.get(kind_of(link), 0.0) + messages
    fullest = max((n / capacity[kind] for kind, n in load.items()), default=0.0) * network.ports
    return min(1.0, (network.accelerators - 1) / fullest) if fullest else 1.0


def _edge_kind(network: Network) -> Any:
    """Returns a function from an edge to a key that edges of equal load share: in a mesh, edges that a translation by
    boards maps to each other; elsewhere the edge alone."""
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
    """Returns, for each hop, the share of its messages that crosses each edge.

    Accelerators with one neighbour share the paths of their switches, which are computed once.
    """
    neighbours: Any = network.graph.adj
    switch = lambda node: next(iter(neighbours[node])) if len(neighbours[node]) == 1 else node
    paths: dict[tuple[Any, Any], dict[Edge, float]] = {}
    crossed = []
    for hop in hops:
        ends = switch(hop[0]), switch(hop[1])
        if ends not in paths:
            paths[ends] = spread(network.graph, ends[0], {ends[1]: 1.0})
        access = {frozenset((node, end)): 1.0 for node, end in zip(hop, ends) if node != end}
        crossed.append({**paths[ends], **access})
    return crossed


def pace(network: Network, crossed: Iterable[dict[Edge, float]]) -> float:
    """Returns the share of a link's bandwidth that each hop has, in each direction, while all hops are in use both
    ways."""
    used: dict[Edge, float] = {}
    for hop in crossed:
        for edge, share in hop.items():
            used[edge] = used.get(edge, 0.0) + share
    return float(min(network.graph.edges[edge]["links"] / n for edge, n in used.items()))


def all_reduce(network: Network) -> float:
    """Returns the bandwidth at which an accelerator sends in an all-reduce over all of them, over that of its links."""
    cycles = rings(network)
    hops = [hop for ring in cycles for hop in hops_of(ring)]
    return 2 * len(cycles) * pace(network, crossings(network, hops)) / network.ports
