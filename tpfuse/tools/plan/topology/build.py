"""The networks by name: fat trees, Dragonfly, 2-D torus, HyperX, HammingMesh."""

import math
from collections.abc import Callable, Iterator

from ....kernels.runtime.errors import check
from .network import AOC, DAC, PORTS, TRACE, Network, empty, fold, join


def fat_tree(accelerators: int, down: int = PORTS // 2) -> Network:
    """Returns a fat tree (Leiserson 1985) whose leaves have ``down`` of their 64 ports to accelerators, the rest up.

    Above the leaves it is not tapered.
    """
    check(1 <= down < PORTS, f"plan: a leaf of a fat tree has 1 to {PORTS - 1} ports down, got {down}")
    graph = empty(accelerators)
    fold(graph, "tree", [(i, DAC) for i in range(accelerators)], down=down, up=PORTS - down)
    taper = "" if 2 * down <= PORTS else f" {down}:{PORTS - down}"
    return Network(f"fat tree{taper}", graph, accelerators, planes=16, ports=1)


def dragonfly(accelerators: int, routers: int = 8, terminals: int = 16, parallel: int = 4) -> Network:
    """Returns a Dragonfly (Kim, Dally, Scott & Abts 2008) of groups of ``routers``.

    A router has ``terminals`` accelerators, ``parallel`` links to each other router of its group (copper), and as many
    links to other groups (optical) as terminals: the balance p = h of that paper.  Four parallel links are the most
    that eight routers of 64 ports have room for.  Groups are joined all to all, as often as the ports allow; ports that
    are left join the nearest groups.
    """
    local = parallel * (routers - 1)
    used = 2 * terminals + local
    check(used <= PORTS, f"plan: a Dragonfly's router has {PORTS} ports, and {used} are asked for")
    groups, ports = -(-accelerators // (routers * terminals)), routers * terminals
    check(
        groups - 1 <= ports,
        f"plan: a Dragonfly of these groups joins at most {(ports + 1) * ports} accelerators, got {accelerators}",
    )
    graph = empty(accelerators)
    for i in range(accelerators):
        join(graph, i, ("router", i // ports, i // terminals % routers), DAC)
    for g in range(groups):
        for a in range(routers):
            for b in range(a):
                for _ in range(parallel):
                    join(graph, ("router", g, a), ("router", g, b), DAC)
    taken = [0] * groups
    for a, b in _pairs(groups, ports):
        join(graph, ("router", a, taken[a] % routers), ("router", b, taken[b] % routers), AOC)
        taken[a], taken[b] = taken[a] + 1, taken[b] + 1
    return Network("Dragonfly", graph, accelerators, planes=16, ports=1)


def _pairs(groups: int, ports: int) -> Iterator[tuple[int, int]]:
    """Yields the two groups of each global link: a circulant multigraph of degree ``ports`` (or one less, where both
    the degree and the number of groups are odd)."""
    if groups == 1:
        return
    repeats, left = divmod(ports, groups - 1)
    for _ in range(repeats):
        yield from ((g, h) for g in range(groups) for h in range(g))
    yield from ((g, (g + offset) % groups) for offset in range(1, left // 2 + 1) for g in range(groups))
    if left % 2 and groups % 2 == 0:
        yield from ((g, g + groups // 2) for g in range(groups // 2))


def torus(accelerators: int) -> Network:
    """Returns a 2-D torus, as square as its number allows.

    Accelerators 2i and 2i + 1 of a row or column lie on one board; every other link is an optical cable.
    """
    rows, columns = _sides(accelerators, 3, f"plan: a torus needs two sides of at least 3, got {accelerators}")
    graph = empty(accelerators)
    for r in range(rows):
        for c in range(columns):
            node = r * columns + c
            join(graph, node, r * columns + (c + 1) % columns, _hop(c, columns))
            join(graph, node, (r + 1) % rows * columns + c, _hop(r, rows))
    board = 2 if rows % 2 == 0 and columns % 2 == 0 else 1
    return Network("2-D torus", graph, accelerators, planes=4, ports=4, grid=(rows, columns), board=board)


def _hop(i: int, side: int) -> str:
    return TRACE if i % 2 == 0 and i + 1 < side else AOC


def hamming_mesh(accelerators: int, board: int) -> Network:
    """Returns a HammingMesh (arXiv:2209.01346) of boards of ``board`` x ``board`` accelerators, as square as it can be.

    On a board neighbours are joined by traces.  The ports at both ends of a board's row lead to the switches of that
    row, by copper, those of its columns to the switches of that column, by optical cables.  Where the ports of a line
    fit, one switch serves as many lines of a row of boards as its 64 ports allow; longer lines are fat trees.  Boards
    of one accelerator make the HyperX of that paper.
    """
    check(board >= 1, f"plan: a board has at least 1 accelerator along a side, got {board}")
    few = f"plan: boards of {board} x {board} need two sides of at least 2 boards, got {accelerators} accelerators"
    check(accelerators % board**2 == 0, few)
    down, across = _sides(accelerators // board**2, 2, few)
    rows, columns = down * board, across * board
    graph = empty(accelerators)
    for r in range(rows):
        for c in range(columns):
            if (c + 1) % board:
                join(graph, r * columns + c, r * columns + c + 1, TRACE)
            if (r + 1) % board:
                join(graph, r * columns + c, (r + 1) * columns + c, TRACE)
    row = lambda r: [r * columns + c for c in _ends(columns, board)]
    column = lambda c: [r * columns + c for r in _ends(rows, board)]
    for name, lines, cable in (("row", [*map(row, range(rows))], DAC), ("column", [*map(column, range(columns))], AOC)):
        together = max(1, min(board, PORTS // len(lines[0])))
        for i in range(0, len(lines), board):
            for j in range(i, i + board, together):
                ports = [(node, cable) for line in lines[j : min(j + together, i + board)] for node in line]
                fold(graph, (name, j), ports, down=PORTS // 2, up=PORTS // 2)
    name = "HyperX" if board == 1 else f"Hx{board}Mesh"
    return Network(name, graph, accelerators, planes=4, ports=4, grid=(rows, columns), board=board)


def _ends(side: int, board: int) -> list[int]:
    """Returns the positions of a line at which ports leave the boards; a board of one accelerator has both ports."""
    return [i for start in range(0, side, board) for i in (start, start + board - 1)]


def _sides(n: int, least: int, message: str) -> tuple[int, int]:
    """Returns the two factors of n nearest to each other, the larger first."""
    short = next((k for k in range(math.isqrt(max(n, 0)), 0, -1) if n % k == 0), 0)
    check(short >= least, message)
    return n // short, short


# 42 and 51 are the most ports down that leave a leaf half, or a quarter, as many ports up.
NETWORKS: dict[str, Callable[[int], Network]] = {
    "fat tree": fat_tree,
    "fat tree, tapered 50 %": lambda n: fat_tree(n, 42),
    "fat tree, tapered 75 %": lambda n: fat_tree(n, 51),
    "Dragonfly": dragonfly,
    "HyperX": lambda n: hamming_mesh(n, 1),
    "Hx2Mesh": lambda n: hamming_mesh(n, 2),
    "Hx4Mesh": lambda n: hamming_mesh(n, 4),
    "2-D torus": torus,
}
