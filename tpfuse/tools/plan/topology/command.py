"""``python -m tpfuse topology``: cost and bandwidth of networks, side by side."""

from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from ...command import CommandParser, add_count, add_output, present
from ...ledger.plots import figure, legend
from ...ledger.text import progress, table
from .bandwidth import all_reduce, all_to_all, bisection
from .build import NETWORKS, hamming_mesh
from .hamiltonian import hops_of, rings
from .network import AOC, DAC

LARGE = 10_000  # accelerators, beyond which a network takes seconds
_COLOURS = "#4c72b0", "#dd8452", "#55a868"


def register(p: CommandParser) -> None:
    p.runs(_run)
    add_count(p, "--accelerators", "number of accelerators that each network joins", 1024)
    add_output(p)


def _run(args: Namespace) -> None:
    compared = compare(args.accelerators)
    present(args, compared.text(), compared.json(), lambda path: draw(compared, path))


class NetworkRow(NamedTuple):
    """A row of the table: counts and dollars of all planes, shares of injection bandwidth."""

    switches: int
    copper: int
    optical: int
    dollars: float
    bisection: float
    all_to_all: float
    all_reduce: float


class NetworkTable(NamedTuple):
    """Rows by name; ``left_out``: reasons why a network has none."""

    accelerators: int
    rows: dict[str, NetworkRow]
    left_out: list[str]

    def text(self) -> str:
        header = "", "switches", "copper", "optical", "M$", "bisection %", "all-to-all %", "all-reduce %"
        rows = [
            (
                name,
                r.switches,
                r.copper,
                r.optical,
                f"{r.dollars / 1e6:.2f}",
                *(f"{100 * share:.1f}" for share in r[4:]),
            )
            for name, r in self.rows.items()
        ]
        note = f"{self.accelerators} accelerators of sixteen 400 Gb/s links; % of what all of them can inject"
        return "\n".join([table(header, rows), note, *(f"left out: {why}" for why in self.left_out)])

    def json(self) -> dict[str, object]:
        values: dict[str, object] = {name: row._asdict() for name, row in self.rows.items()}
        return {"accelerators": self.accelerators, **values, "left out": self.left_out}


def compare(accelerators: int) -> NetworkTable:
    """Builds each network of NETWORKS that can have this many accelerators."""
    rows, left_out = {}, []
    for name, build in progress([*NETWORKS.items()], "topology: network", long=accelerators >= LARGE):
        try:
            network = build(accelerators)
        except ValueError as error:
            left_out.append(str(error))
            continue
        counts = network.switches, network.cables(DAC), network.cables(AOC), network.dollars
        rows[name] = NetworkRow(*counts, bisection(network), all_to_all(network), all_reduce(network))
    if not rows:
        raise ValueError(left_out[0])
    return NetworkTable(accelerators, rows, left_out)


def draw(compared: NetworkTable, path: Path) -> None:
    """Draws bars of cost and of bandwidth, and the two rings of a small HammingMesh."""
    names = list(compared.rows)

    def drawing(fig: Any, axes: Any) -> None:
        cost, carried, mesh = axes
        _rings(mesh)
        cost.barh(names, [row.dollars / 1e6 for row in compared.rows.values()], color=_COLOURS[0])
        cost.set(xlabel="M$, switches and cables")
        cost.set_title("cost", loc="left", size=10)
        for i, field in enumerate(("bisection", "all_to_all", "all_reduce")):
            positions = [k + 0.27 * (i - 1) for k in range(len(names))]
            shares = [100 * getattr(row, field) for row in compared.rows.values()]
            carried.barh(positions, shares, 0.25, color=_COLOURS[i], label=field.replace("_", " "))
        carried.set(xlabel="% of injection bandwidth", yticks=range(len(names)), yticklabels=names)
        legend(carried)
        for ax in (cost, carried):
            ax.invert_yaxis()

    title = f"networks of {compared.accelerators} accelerators, and what one kind of them looks like"
    figure(path, (16, 4.8), drawing, title=title, columns=3)


def _rings(ax: Any) -> None:
    """Draws 3 x 3 boards of 2 x 2: hops on a board as lines, hops through switches as arcs, boards as squares."""
    from matplotlib.patches import Rectangle

    network = hamming_mesh(36, 2)
    rows, columns = network.grid or (0, 0)
    place = lambda node: (node % columns, -(node // columns))
    for r in range(0, rows, network.board):
        for c in range(0, columns, network.board):
            ax.add_patch(Rectangle((c - 0.3, -r - 1.3), 1.6, 1.6, fc="#eeeeee", ec="#999999"))
    for ring, colour in zip(rings(network), _COLOURS):
        for a, b in hops_of(ring):
            far = abs(a - b) not in (1, columns)  # the two ends of a line
            bend = "arc3,rad=0.22" if far else "arc3,rad=0"
            style = "dotted" if far else "solid" if network.graph.has_edge(a, b) else "dashed"
            ax.annotate(
                "", place(a), place(b), arrowprops=dict(arrowstyle="-", connectionstyle=bend, color=colour, ls=style)
            )
    ax.plot(*zip(*(place(i) for i in range(network.accelerators))), "o", color="black", ms=5)
    ax.set(xlim=(-1.2, columns + 0.2), ylim=(-rows - 0.2, 1.2), aspect="equal")
    ax.set_title(
        "Hx2Mesh at a size that can be drawn: 36 accelerators\ntwo rings through all that share no link",
        loc="left",
        size=10,
    )
    lines = [ax.plot([], [], color=colour, label=f"ring {i}")[0] for i, colour in enumerate(_COLOURS[:2], 1)]
    styles = {
        "solid": "on a board",
        "dashed": "to the next board, by a switch",
        "dotted": "to the far end, by a switch",
    }
    lines += [ax.plot([], [], color="black", ls=style, label=text)[0] for style, text in styles.items()]
    ax.legend(handles=lines, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    ax.axis("off")
