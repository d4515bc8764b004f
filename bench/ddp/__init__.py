"""DistributedDataParallel's own settings, and what they do to a training step (Li et al. 2020, arXiv:2006.15704).

    python -m bench.ddp --json bench/results/ddp.json    1 and 10 Gbit/s and unshaped (root: network namespaces)
    python -m bench.ddp --ranks 2 --rate 0 --rounds 2    two replicas on one machine, quickly
    python -m bench.ddp.page                             the tables and the picture of docs/data_parallel.md

Replicas of a GPT, one thread each, take a step (forward, backward and the messages, no optimizer) under every setting
in turn, each with a model of its own in the same processes, so that what slows the machine down slows all of them:
buckets of 0 (one a parameter) to 50 MiB, of which 25 is torch's own and has a first one of 1; gradients that are copied
into buckets in place of being views of them; static_graph; micro-batches under no_sync.  Beside them:

    no overlap    backward, then one all-reduce of all gradients
    compute       forward and backward without messages;  forward: the first part of it
    messages      the all-reduce alone

Four replicas are two at either end of a link.  Seconds are quartiles over the rounds, of a micro-batch; ``over`` is a
ratio to buckets of 25 MiB in the same round.  No step can be shorter than forward + max(backward, messages).
"""

import argparse
import pathlib

from bench._parser import check_rounds, parser_of

BUCKETS = {"0 MiB": 2**-20, "1 MiB": 1, "5 MiB": 5, "10 MiB": 10, "25 MiB": None, "50 MiB": 50}
MICRO_BATCHES = {f"{count} micro-batches": count for count in (2, 4, 8)}
USUAL = "25 MiB"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("bench.ddp", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="replicas, even numbers (default 2 4)")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[1.0, 10.0, 0.0], help="Gbit/s, 0 is unshaped (default all)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps of each setting, after two (default 5)")
    for name, value in dict(width=512, layers=5, heads=8, seq=64, batch=1).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the results there")
    args = parser.parse_args(argv)
    check_rounds(parser, args.rounds)
    return args
