"""The bits of training at several layouts against one process, and what they cost.

    python -m bench.bits                          every kind, dtype and way of saving: a row a layout
    python -m bench.bits --kind llama --dtype bf16
    python -m bench.bits --cost                   processor time with bitwise over without, bytes on the wire

A row compares two steps of AdamW with clipping, and greedy tokens, as integers: tensors that are equal of all.  The
exit code is 1 where one is not.

--cost: forward and backward of the same model with leaves and without, in turn in the same processes, one thread each;
median and quartiles of the ratio of neighbouring steps, in processor time of rank 0.  A rank sends 16 M (V / R - 1)
(R - 1) bytes more in a step: of each of the M rows four numbers of the loss for each leaf, in place of each rank.
"""

import argparse
import pathlib

from bench._parser import parser_of
from bench.bits.kinds import ALL_KINDS
from tpfuse.layers.block import SAVING
from tpfuse.tools.options import DTYPES

V, BATCH, SEQ, STEPS, NEW_TOKENS = 8, 3, 13, 2, 6
WIDTHS = 512, 1024


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("bench.bits", __doc__)
    dtypes = [name for name in DTYPES if name != "fp16"]
    for name, choices in (("kind", list(ALL_KINDS)), ("dtype", dtypes), ("saving", SAVING)):
        parser.add_argument(f"--{name}", choices=choices, action="append", help="default: all")
    parser.add_argument("--cost", action="store_true", help="measure the cost in place of the bits")
    parser.add_argument("--width", type=int, action="append", help="of --cost; default: 512 and 1024")
    parser.add_argument("--rounds", type=int, default=9, help="of --cost: steps of each (default 9)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the results there")
    args = parser.parse_args(argv)
    args.kind, args.dtype, args.saving = args.kind or list(ALL_KINDS), args.dtype or dtypes, args.saving or list(SAVING)
    args.width = args.width or list(WIDTHS)
    return args
