"""Placement of a split's ranks on a network's accelerators, and the links that their groups then have.

Ranks are numbered as in a mesh ("pp", "dp", "cp", "tp"), tp fastest, and get accelerators in order: in a tree or
Dragonfly by number, so that neighbours share a leaf; in a mesh board by board along the rows of boards, and on a board
by squares of 2 x 2. tp then stays on a board if it divides one, dp continues along the rows, and each stage of pp
begins at a row of boards of its own, so that pp goes along columns, if all stages have room for that.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....kernels.runtime.errors import check
from ..collectives import Link
from ..split import Split
from .bandwidth import Edge, crossings, pace
from .hamiltonian import Ring, cycles, hops_of
from .network import CABLES, ENDS, FORWARD, LINK, Network


class Links(NamedTuple):
    """A rank's link for each of its groups: ``tp``, ``dp`` and ``cp`` for rings, ``pp`` to the next stage and from
    it."""

    tp: Link
    dp: Link
    pp: Link
    cp: Link


def place(split: Split, network: Network) -> list[int]:
    """Returns the accelerator of each rank; ValueError where there are too few."""
    sizes = split.dp, split.cp, split.tp, split.pp
    check(min(sizes) >= 1, f"plan: dp, cp, tp and pp must be positive integers, got {split}")
    check(
        split.ranks <= network.accelerators,
        f"plan: {split.mesh} = {split.ranks} ranks do not fit on the"
        f" {network.accelerators} accelerators of {network.name}",
    )
    stage = split.ranks // split.pp
    if network.grid is None:
        return list(range(split.ranks))
    (rows, columns), board = network.grid, network.board
    order = [
        (down + r) * columns + across + c
        for down in range(0, rows, board)
        for across in range(0, columns, board)
        for r, c in _squares(board)
    ]
    row = columns * board  # accelerators of a row of boards
    rows_of_stage = -(-stage // row) * row
    fits = split.pp * rows_of_stage <= network.accelerators and board**2 % split.tp == 0
    distance = rows_of_stage if fits else stage
    return [order[p * distance + i] for p in range(split.pp) for i in range(stage)]


def _squares(side: int) -> list[tuple[int, int]]:
    """Returns the positions of a board, each next to the previous one: squares of 2 x 2 from left to right and back;
    rows, where the side is odd."""
    if side % 2:
        return [(r, c if r % 2 == 0 else side - 1 - c) for r in range(side) for c in range(side)]
    tiles = [(r, c if r % 2 == 0 else side // 2 - 1 - c) for r in range(side // 2) for c in range(side // 2)]
    return [(2 * r + i, 2 * c + j) for r, c in tiles for i, j in ((0, 0), (1, 0), (1, 1), (0, 1))]


def links(split: Split, network: Network) -> Links:
    """Returns the links of a split's groups.

    All groups of a kind (all of tp, say) send at once, on shortest paths; groups of other kinds do not.  Hops share the
    edges that several cross, and the fullest edge sets the bandwidth of all: bytes a second that a rank sends over all
    its planes.  Rings send in both directions, and a group uses the faster of two choices: one ring of its ranks in
    order, or two cycles where they fill a grid of rows and columns.  A hop of pp carries activations in one direction,
    their gradients in the other.  The latency is that of the longest hop.  A group of one has its links to itself.
    """
    accelerators = place(split, network)
    mesh = np.array(accelerators).reshape(split.pp, split.dp, split.cp, split.tp)
    rings = lambda axis: np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis]).tolist()
    dp, cp, tp = (_ringed(rings(axis), network) for axis in (1, 2, 3))
    hops = [*zip(mesh[:-1].flatten().tolist(), mesh[1:].flatten().tolist(), strict=True)]
    return Links(tp, dp, _link(hops, network, 1), cp)


def _ringed(groups: Sequence[Sequence[int]], network: Network) -> Link:
    if len(groups[0]) == 1:
        return _link([], network, 1)
    choices: list[list[tuple[Ring, ...]]] = [[(tuple(group),) for group in groups]]  # rings of each group
    if network.grid and all(grids := [_cycles(group, network.grid[1]) for group in groups]):
        choices.append(grids)
    links = []
    for rings in choices:
        hops = [hop for group in rings for ring in group for hop in hops_of(ring)]
        links.append(_link(hops, network, 2 * len(rings[0])))
    return max(links, key=lambda link: link.bandwidth)


def _cycles(group: Sequence[int], columns: int) -> tuple[Ring, ...]:
    """Returns the cycles of a grid through the rows and columns of a group; none where it is no grid."""
    down, across = sorted({node // columns for node in group}), sorted({node % columns for node in group})
    if len(down) * len(across) != len(group) or min(len(down), len(across)) == 1:
        return ()
    return tuple(
        tuple(down[i // len(across)] * columns + across[i % len(across)] for i in ring)
        for ring in cycles(len(down), len(across))
    )


def _link(hops: Sequence[tuple[int, int]], network: Network, concurrent: int) -> Link:
    """Returns the link of a rank that sends over so many hops at once; all its links where there are no hops."""
    if not hops:
        return Link(0.0, network.ports * network.planes * LINK)
    crossed = crossings(network, hops)
    latency = max(_seconds(network, hop) for hop in crossed)
    return Link(latency, concurrent * pace(network, crossed) * network.planes * LINK)


def _seconds(network: Network, hop: dict[Edge, float]) -> float:
    """Returns a hop's latency, the mean over its paths."""
    wires = sum(share * CABLES[network.graph.edges[edge]["cable"]].seconds for edge, share in hop.items())
    return ENDS + wires + (sum(hop.values()) - 1) * FORWARD
