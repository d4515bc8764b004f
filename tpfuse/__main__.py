"""``python -m tpfuse``: the commands of :mod:`tpfuse.tools`, each registered beside its code."""

import sys
from argparse import ArgumentParser

from .tools import command
from .tools.bench import command as bench
from .tools.bits import command as bits
from .tools.doctor import command as doctor
from .tools.ledger import commands as ledger
from .tools.ledger import speed_commands as speeds
from .tools.pipeline import command as pipeline
from .tools.plan import command as collectives
from .tools.plan import planning
from .tools.plan.intra import command as layouts
from .tools.plan.topology import command as topology

TOOLS = doctor, bits, ledger, speeds, planning, layouts, pipeline, collectives, topology, bench


def parser() -> ArgumentParser:
    """Returns the parser of the command line."""
    commands = command.Commands()
    for tool in TOOLS:
        tool.register(commands)
    return commands.parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 1 where a tool found something wrong, 2 after a printed error."""
    return command.main(parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
