"""``tpfuse`` and ``python -m tpfuse``: the commands of :mod:`tpfuse.tools`, whose options stand beside their code."""

import sys

from .tools import command

# Each command's line in the list, and the function of tpfuse.tools that adds its options.  The list imports no torch.
COMMANDS = {
    "doctor": (
        "examine the installation: versions, devices, links, a self-test of every op",
        "doctor.command:register",
    ),
    "bits": (
        "the bits of training steps over layouts of ranks, and the first op that differs",
        "bits.command:register",
    ),
    "ledger": (
        "bytes and flops of one layer: plain torch, the operator table of 2020, tpfuse",
        "ledger.commands:register_ledger",
    ),
    "memory": (
        "memory of a rank: saved activations, weights, optimizer, under DDP and FSDP",
        "ledger.commands:register_memory",
    ),
    "dryrun": (
        "one rank of any world, in one process: memory, flops and messages beside formulas",
        "ledger.commands:register_dryrun",
    ),
    "mfu": ("share of the peak that a measured step reaches (MFU, HFU)", "ledger.speed_commands:register_mfu"),
    "calibrate": (
        "measure this machine's CPUs, for predict and plan --device here",
        "ledger.speed_commands:register_calibrate",
    ),
    "predict": (
        "time of a training step on this machine by tp and dp (needs calibrate)",
        "ledger.speed_commands:register_predict",
    ),
    "plan": ("the fastest splits of a model's training over devices, and why", "plan.planning:register"),
    "layouts": ("the fastest layout of each op of a block over a mesh of ranks", "plan.intra.command:register"),
    "pipeline": (
        "pipeline schedules side by side: seconds, bubbles, activations in flight",
        "pipeline.command:register",
    ),
    "collectives": ("the fastest all-reduce, by message size and number of ranks", "plan.command:register"),
    "topology": (
        "cost and bandwidth of eight networks of as many accelerators (needs networkx)",
        "plan.topology.command:register",
    ),
    "bench": ("time kernels at any shape, against plain torch, torch.compile, Liger Kernel", "bench.command:register"),
}


def parser() -> command.Parser:
    return command.make_parser(COMMANDS)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 1 where a tool found something wrong, 2 after a printed error."""
    return command.main(parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
