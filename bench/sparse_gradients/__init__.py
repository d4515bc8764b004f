"""Times of a training step where replicas' links are slow, by how gradients are averaged.

    python -m bench.sparse_gradients                 0.1, 0.3, 1, 10 Gbit/s and unshaped (root: network namespaces)
    python -m bench.sparse_gradients --json bench/results/sparse_gradients.json
    python -m bench.sparse_gradients.page            the table of docs/training.md, from that file

Replicas of a GPT under DistributedDataParallel, one thread each, every method in turn in the same processes: dense
all-reduce, torch's bf16, fp16 and PowerSGD hooks, TopkA and Ok-Topk.  Four replicas are two at either end of a link.
Seconds are medians of a step's forward, backward, messages and optimizer, ratios quartiles over the rounds of a step's
time to the dense one's in the same round.
"""

import argparse
from pathlib import Path

from bench._parser import check_rounds, parser_of

UNTIMED = 3  # first steps: DDP rebuilds its buckets after one, PowerSGD begins in the third


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("bench.sparse_gradients", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="replicas (default 2 4)")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[0.1, 0.3, 1.0, 10.0, 0.0], help="Gbit/s, 0 is unshaped (default all)"
    )
    parser.add_argument("--density", type=float, default=0.01, help="of TopkA and Ok-Topk (default 0.01)")
    parser.add_argument("--rounds", type=int, default=10, help=f"steps of each, after {UNTIMED} (default 10)")
    for name, value in dict(width=256, layers=4, heads=4, seq=128, batch=4).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    args = parser.parse_args(argv)
    check_rounds(parser, args.rounds)
    return args
