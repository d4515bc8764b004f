"""Rings through a mesh: two Hamiltonian cycles of a torus that share no edge.

One cycle goes row by row: along all of a row but one edge, then down.  It enters row i in column s_i, runs in direction
d_i (+1 or -1) through its c nodes, and goes down from column s_i - d_i = s_(i+1).  After r rows it closes if the d_i
add up to w c.  The other cycle consists of the edges left over, mostly columns.  In row i only the column s_(i+1) has
its row edge left, to column s_i, and has no edge down: a hole among the columns that moves by one a row.  After r rows
the hole has gone w times around, which rotates the other c - 1 columns by w; they form one cycle if w and c - 1 have no
common factor.  w = 1 satisfies this: r >= c rows, both even or both odd, (r + c) / 2 of them in direction +1.  With one
even and one odd side a pair exists too (Kotzig 1973), but not in this form: one cycle is used, w = 0, with an even
number of rows, and half of the links stay idle.
"""

from .network import Network

Ring = tuple[int, ...]  # accelerators in order


def cycles(rows: int, columns: int) -> tuple[Ring, ...]:
    """Returns cycles through all nodes of a torus, numbered row by row, that share no edge: two where both sides are
    even or both odd, one where they are not or a side is 1.

    A side of 2 has two edges between its nodes.
    """
    if min(rows, columns) == 1:
        return (tuple(range(rows * columns)),)
    if rows < columns if (rows - columns) % 2 == 0 else rows % 2:  # transpose
        return tuple(tuple(node % rows * columns + node // rows for node in ring) for ring in cycles(columns, rows))
    if (rows - columns) % 2:
        return (_along([1, -1] * (rows // 2), columns),)
    up = (rows + columns) // 2
    directions = [1] * up + [-1] * (rows - up)
    return _along(directions, columns), _aside(directions, columns)


def _entries(directions: list[int], columns: int) -> list[int]:
    """Returns s_0 to s_r."""
    return [-sum(directions[:i]) % columns for i in range(len(directions) + 1)]


def _along(directions: list[int], columns: int) -> Ring:
    starts = enumerate(zip(_entries(directions, columns), directions))
    return tuple(row * columns + (s + d * k) % columns for row, (s, d) in starts for k in range(columns))


def _aside(directions: list[int], columns: int) -> Ring:
    """Returns the cycle of the edges that :func:`_along` leaves."""
    entries = _entries(directions, columns)
    ring, column = [], 1  # any but s_0
    for _ in range(columns - 1):
        for row, (s, s_next) in enumerate(zip(entries, entries[1:])):
            ring.append(row * columns + column)
            if column == s_next:
                ring.append(row * columns + s)
                column = s
    return tuple(ring)


def rings(network: Network) -> tuple[Ring, ...]:
    """Returns the rings of an all-reduce over all accelerators: those of :func:`cycles` in a mesh, else one ring."""
    if network.grid is None:
        return (tuple(range(network.accelerators)),)
    return cycles(*network.grid)


def hops_of(ring: Ring) -> list[tuple[int, int]]:
    """Returns the pairs of neighbours in a ring, including the one that closes it."""
    return list(zip(ring, (*ring[1:], ring[0])))
