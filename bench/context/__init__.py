"""Context parallelism: what a rank holds, and what its kinds take beside a ring and beside tensor parallelism.

    python -m bench.context --json bench/results/context.json    1 and 10 Gbit/s and unshaped (root: namespaces)
    python -m bench.context --rate 0 --rounds 2 --seq 1024       one machine, quickly
    python -m bench.context.page                                 the tables and the picture of docs/context.md

Two ranks, one thread each, take turns in the same processes, so that what slows the machine down slows all of them:

    attention    forward and backward over one sequence, each rank a piece of it: "heads" (all-to-all), "keys" (gathered
                 keys) and "ring" (ring.py: keys and values travel, as PyTorch's and other libraries' kernels have it);
                 8 query heads with 8 kv heads, and with 1
    a step       of training a Llama of 4 layers: cp 2 by heads, by keys, and tp 2 with sequence parallelism
    a prompt     the same models' forward without gradients

"pairwise" is the overlap of messages, which the others have "off".

PyTorch's own context_parallel has no implementation for CPUs, so that its kind is measured by ring.py alone.

Memory is the growth of a rank's peak resident set in a training step, from before the model is made, of one sequence
over 1, 2 and 4 ranks; each size runs in processes of its own.  Seconds are quartiles over the rounds, ratios those of
one round.
"""

import argparse
import pathlib

from bench._parser import check_rounds, parser_of

HEADS = 8
ATTENTION = {"attention, 8 kv heads": 8, "attention, 1 kv head": 1}
KINDS = "heads", "heads, pairwise", "keys", "ring"
MODELS = "cp 2, heads", "cp 2, heads, pairwise", "cp 2, keys", "tp 2", "tp 2, pairwise"
GROUPS = dict.fromkeys(ATTENTION, KINDS) | dict.fromkeys(("a step", "a prompt"), MODELS)  # what is timed in turn
LENGTHS = 1024, 2048, 4096, 8192
RANKS = 1, 2, 4


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("bench.context", __doc__)
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[1.0, 10.0, 0.0], help="Gbit/s, 0 is unshaped (default all)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind, after one (default 5)")
    parser.add_argument("--seq", type=int, default=4096, help="positions of the sequence (default 4096)")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[*LENGTHS], help="positions at which memory is read (none: not)"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the results there")
    args = parser.parse_args(argv)
    check_rounds(parser, args.rounds)
    return args
