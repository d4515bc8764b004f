"""Shortest paths: which share of what is sent crosses each edge."""

from collections.abc import Mapping
from typing import Any

from ....kernels.runtime.errors import check

Edge = frozenset[Any]  # its two nodes


def spread(graph: Any, source: object, wanted: Mapping[Any, float]) -> dict[Edge, float]:
    """Returns how much crosses each edge where ``source`` sends each node what it wants.

    A message takes all shortest paths in equal parts; parallel links are paths of their own.  Counts paths on the way
    out, level by level, and adds up parts on the way back (Brandes 2001).
    """
    levels: list[dict[Any, int]] = [{source: 1}]  # node -> shortest paths from the source
    seen, waiting = {source}, set(wanted) - {source}
    while waiting:
        level: dict[Any, int] = {}
        for node, paths in levels[-1].items():
            for near, edge in graph.adj[node].items():
                if near not in seen:
                    level[near] = level.get(near, 0) + paths * edge["links"]
        check(bool(level), f"plan: the network has no way from {source} to {next(iter(waiting))}")
        seen.update(level)
        waiting.difference_update(level)
        levels.append(level)
    crossing: dict[Edge, float] = {}
    onward: dict[Any, float] = {}
    for nearer, level in zip(levels[-2::-1], levels[:0:-1]):
        leaving: dict[Any, float] = {}
        for node in level.keys() & (wanted.keys() | onward.keys()):
            arriving = wanted.get(node, 0.0) + onward.get(node, 0.0)
            for near, edge in graph.adj[node].items():
                if near in nearer:
                    part = arriving * nearer[near] * edge["links"] / level[node]
                    crossing[frozenset((near, node))] = part
                    leaving[near] = leaving.get(near, 0.0) + part
        onward = leaving
    return crossing
