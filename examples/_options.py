"""The options of train_gpt.py."""

import argparse
import math
import sys
from pathlib import Path

import _common as common

SIZES = {  # parameters, about 12 layers * width^2
    "3m": dict(hidden_size=256, num_layers=4, num_heads=8),
    "10m": dict(hidden_size=384, num_layers=6, num_heads=12),
    "50m": dict(hidden_size=768, num_layers=7, num_heads=12),
}


def parse() -> argparse.Namespace:
    """Returns the options; an error in one line where they do not go together."""
    parser = common.Parser("Train a byte-level GPT on real text, under tensor x sequence x data parallelism.")
    add = parser.add_argument_group("model and text").add_argument
    add("--size", choices=SIZES, default="3m", help="parameters")
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="a file, or a folder of files (default: the Python standard library's sources)",
    )
    add("--max-mb", type=float, default=8, metavar="MB", help="read this much of it at most")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=common.positive, default=500, metavar="N", help="optimizer steps")
    add("--batch", type=common.positive, default=8, metavar="N", help="sequences a step, over all processes")
    add("--seq", type=common.positive, default=128, metavar="N", help="bytes a sequence")
    add(
        "--pack",
        action="store_true",
        help="train on paragraphs, packed into rows; none sees another (a step has about as many bytes)",
    )
    add(
        "--lr",
        type=float,
        default=2e-3,
        metavar="X",
        help="highest learning rate; warms up over a tenth of the steps, then a cosine",
    )
    add("--dropout", type=float, default=0.1, metavar="P", help="dropout everywhere: embedding, attention, residual")
    add("--seed", type=int, default=0, metavar="N", help="decides weights, samples and dropout masks")
    add = parser.add_argument_group(
        "how it is split and run (none of it changes what is learnt, but for rounding)"
    ).add_argument
    add("--tp", type=common.positive, metavar="N", help="tensor-parallel processes (default: all that --dp leaves)")
    add("--dp", type=common.positive, default=1, metavar="N", help="data-parallel replicas; tp x dp processes in all")
    add(
        "--micro-batches",
        type=common.positive,
        default=1,
        metavar="N",
        help="parts that a replica's batch is computed in, to save memory",
    )
    add("--no-sequence-parallel", action="store_true", help="every tensor-parallel rank holds all rows between GEMMs")
    add(
        "--saving",
        choices=("fastest", "smallest"),
        default="fastest",
        help="for backward, keep what is fastest or what is smallest",
    )
    add(
        "--main-grad",
        action="store_true",
        help="add gradients in fp32 inside the GEMMs and average them in rank order (tpfuse.MainGrad, in DDP's place)",
    )
    add("--bf16", action="store_true", help="autocast to bfloat16 (on a GPU it is the default)")
    add(
        "--timeout",
        type=common.positive,
        default=300,
        metavar="S",
        help="seconds after which a process that the others wait for ends the run",
    )
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("out/train_gpt"), metavar="DIR", help="everything is written here")
    add("--checkpoint-every", type=common.positive, default=200, metavar="N", help="steps between checkpoints")
    add("--validate-every", type=common.positive, default=100, metavar="N", help="steps between validations")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, where there is one")
    add("--restart", action="store_true", help="start anew although --out holds a run, and replace it")
    add("--prompt", default="class Error(", metavar="TEXT", help="what the trained model continues at the end")
    args = parser.parse_args()

    args.tp = args.tp or max(1, common.WORLD // args.dp)
    if args.tp * args.dp != common.WORLD:
        parser.error(
            f"--tp {args.tp} x --dp {args.dp} needs {args.tp * args.dp} processes, and there are {common.WORLD}:"
            f" torchrun --nproc-per-node {args.tp * args.dp} {sys.argv[0]} ..."
        )
    for name, value in (("--max-mb", args.max_mb), ("--lr", args.lr)):
        if not 0 < value < math.inf:
            parser.error(f"{name} must be a positive number, got {value}")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout must be in [0, 1), got {args.dropout}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be in [0, 2^63), got {args.seed}")
    if args.seq < 2:
        parser.error("--seq must be at least 2: a byte to read and one to guess")
    if args.batch % (args.dp * args.micro_batches):
        parser.error(f"--batch {args.batch} is not divisible by --dp {args.dp} x --micro-batches {args.micro_batches}")
    if args.resume and args.restart:
        parser.error("--resume and --restart exclude each other")
    if not 0 < len(args.prompt.encode()) < args.seq:
        parser.error(f"--prompt must have 1 to {args.seq - 1} bytes (--seq {args.seq})")
    return args
