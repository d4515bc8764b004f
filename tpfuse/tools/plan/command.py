"""``python -m tpfuse collectives``: its options, without torch."""

from argparse import Namespace

from ..command import CommandParser, add_number, add_numbers, add_output, bounded, positive, present, rate, size
from ..command import seconds as seconds_type


def register(p: CommandParser) -> None:
    p.runs(_run)
    ranks, sizes = (
        ",".join(str(base**k) for k in powers) for base, powers in ((4, range(1, 7)), (2, range(10, 31, 2)))
    )
    add_numbers(p, "--ranks", positive, "numbers of ranks that sum", default=ranks)
    add_numbers(p, "--sizes", size, "message sizes, in bytes a rank", default=sizes, of="BYTES")
    add_number(p, "--latency", seconds_type, "time a message is under way, in seconds", default=5e-6)
    add_number(p, "--overhead", seconds_type, "time a message keeps a rank busy, in seconds", default=1e-6)
    add_number(p, "--bandwidth", rate, "bandwidth of a rank's link each way, in GB/s", default=25.0)
    add_number(
        p,
        "--density",
        bounded(float, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
        "share of the elements that a rank sends, 0 to 1: also costs sums of sparse buffers (default: none)",
    )
    add_output(p)


def _run(args: Namespace) -> None:
    from .all_reduces import compare, draw  # which import torch

    compared = compare(args)
    present(args, compared.text(), compared.json(), lambda path: draw(compared, path))
