"""Schedules of pipelines on four processes of one thread each: training steps, and stages that sleep.

    python -m bench.pipeline                                       about five minutes on two idle cores
    python -m bench.pipeline --json bench/results/pipeline.json    then python -m bench.measured
    python -m bench.pipeline --sleep 0 --rounds 20                 training alone; --rounds 0: sleeping alone

Training: a GPT of real text (the bytes of docs/) takes a step, forward and backward, under every schedule in turn, and
under torch's own schedules of that name with plain torch modules of the same weights, so that what slows the machine
down slows all of them.  A row gives the median and the quartiles of the ratios of neighbouring steps, over tpfuse's
1F1B, the most bytes that autograd keeps on a rank in a step, and the simulator's bubble for F = I = W.  Where ranks
share cores, as four do on two, another rank computes in a bubble: these are no measurements of bubbles.

Sleeping: the same runtime, whose stages sleep F, I and W in place of computing, beside the simulator, which is given
what an action and a message were measured to take beside.
"""

import argparse
import pathlib

from bench._parser import parser_of


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("bench.pipeline", __doc__)
    parser.add_argument("--rounds", type=int, default=12, help="training steps of each (default 12; 0: none)")
    parser.add_argument("--sleep", type=float, default=0.06, help="seconds of a rank's F, I and W each (default 0.06)")
    parser.add_argument("--sleep-rounds", type=int, default=7, help="sleeping steps of each schedule (default 7)")
    for name, value, help_text in (
        ("ranks", 4, "processes"),
        ("micro-batches", 8, "parts of a batch"),
        ("batch", 16, "sequences a step"),
        ("seq", 128, "positions a sequence"),
        ("width", 256, "of the model"),
        ("heads", 4, "of attention"),
        ("layers", 8, "a multiple of twice --ranks"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{help_text} (default {value})")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the results there")
    args = parser.parse_args(argv)
    if args.sleep and args.ranks % 2:
        parser.error(f"--ranks must be even, since messages of neighbours are measured, got {args.ranks}")
    if args.layers % (2 * args.ranks):
        parser.error(f"--layers must be a multiple of twice --ranks={args.ranks}, got {args.layers}")
    return args
