"""``python -m tpfuse doctor``: an examination of this installation, by torchrun of all ranks."""

from argparse import Namespace
from pathlib import Path

from ..command import CommandParser, add_output, print_result
from . import doctor
from .launched import world


def register(p: CommandParser) -> None:
    p.runs(_run, "What this installation is, what runs where, and whether it works; by torchrun, of all ranks.")
    p.add_argument(
        "--folder", type=Path, default=Path("."), metavar="DIR", help="folder whose disk and sharing are examined"
    )
    add_output(p, plot=False)


def _run(args: Namespace) -> int:
    """Returns 1 where there is a fault, 0 otherwise; of several ranks the first prints."""
    with world(None) as group:
        report = doctor(args.folder, group)
        if group is None or group.rank() == 0:
            print_result(args, report.text, report.json())
    return 0 if report.ok else 1
