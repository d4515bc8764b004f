"""Options of ``python -m tpfuse``: what a value may be, and those of the commands that have many."""

import argparse
from pathlib import Path

import torch

from . import machine, memory
from .presets import PRESETS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODEL_HELP = f"a local Hugging Face directory or config.json, or one of {', '.join(PRESETS)}"


BENCH = """Kernels alone, at any shape: every op, or one of a file of your own, against plain torch, torch.compile and,
where it is installed, Liger Kernel. Without OP: the ops, their axes, standard shapes and providers. A row gives the
time (median, 20 % and 80 % quantiles), TFLOP/s and GB/s of the same counted work for every provider, the share of this
card's measured roofline and what that is of (memory, matrix products; cache: the inputs may have come from there, and
the share is left out), the error against fp64 and its ratio to torch's error, registers, spills, what a call adds to
memory, and the path: the kernels, or "by torch". Such as: bench layer_norm --dtype bf16 --shape 8192x4096 --providers
tpfuse,torch,compile"""


LAYOUTS = """Which layout each op of a transformer block has on a mesh of ranks, in the words of DTensor: an activation
[batch, seq, width] is Shard(0), Shard(1), Shard(2) (of heads, where there are heads), Replicate or Partial on each axis
of the mesh, a weight [out, in] is Shard(0) (Megatron's columns), Shard(1) (its rows) or Replicate. Solved exactly
(integer programming) for the least seconds of forward and backward, beside what coordinate descent finds, and
Megatron's own. Needs scipy: pip install 'tpfuse[plan]'. Such as: layouts --model gpt-22b --mesh 8 --split-weights
--explain"""

PLAN = """Searches every dp x tp x pp, schedule, chunks, micro-batch, saving, recompute, and FSDP or DDP for the fastest
step that fits into memory, and prints the ten best with where their time goes. Passes are costed op by op from dry runs
of the model's own stages, and run by a clock over the schedule's own list of actions. Such as: plan --model gpt3-175b
--devices 512 --device a100-80gb --global-batch 1536 --seq 2048 --explain 1"""


class Help(argparse.HelpFormatter):
    """Defaults are shown, where there is one to show."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=110)

    def _get_help_string(self, action: argparse.Action) -> str:
        quiet = any(action.default is value for value in (None, False, argparse.SUPPRESS))
        return (action.help or "") if quiet else f"{action.help} (default: %(default)s)"


def positive(text: str) -> int:
    """Returns an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def seconds(text: str) -> float:
    """Returns a time of 1 ns to 1e9 s."""
    value = float(text)
    if not 1e-9 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 1e-9 to 1e9, got {text}")
    return value


def share(text: str) -> float:
    """Returns a share above 0, of 1 at most."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def rate(text: str) -> float:
    """Returns a rate above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def sizes(text: str) -> list[int]:
    """Returns the integers of "1,2,4"."""
    return [positive(part) for part in text.split(",")]


def mesh(text: str) -> tuple[int, ...]:
    """Returns the axes of "4x8"."""
    try:
        return tuple(positive(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ranks an axis such as 8 or 4x8, got {text!r}") from None


def rates(text: str) -> list[float]:
    """Returns the rates of "25,230"."""
    return [rate(part) for part in text.split(",")]


def json_place(text: str) -> Path:
    """Returns the file of --json, whose suffix tells it from an op that stands behind --json."""
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"FILE ends in .json, got {text!r}; without FILE, --json comes last")
    return Path(text)


def choices(text: str) -> list[tuple[int, int]]:
    """Returns the (tp, dp) pairs of "1x1,2x1"."""
    try:
        return [(positive(tp), positive(dp)) for tp, dp in (part.split("x") for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be tp x dp pairs such as 1x1,2x1, got {text!r}") from None


# ---- of the commands that have many ----


def layouts(p: argparse.ArgumentParser) -> None:
    """Adds those of how a block is laid out."""
    p.add_argument("--mesh", type=mesh, default="8", metavar="N|NxM", help="ranks of one or two axes, the outer first")
    p.add_argument("--seq", type=positive, default=2048, metavar="N", help="positions a sequence")
    p.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences that the mesh runs at once")
    p.add_argument(
        "--micro-batches", type=positive, default=1, metavar="N", help="of --batch, a sum of the weights' gradients"
    )
    p.add_argument("--blocks", type=positive, default=1, metavar="N", help="blocks in a row, each laid out for itself")
    p.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations")
    p.add_argument("--optimizer", choices=memory.OPTIMIZERS, default="adamw-fp32", help="whose states are held")
    held = p.add_mutually_exclusive_group()
    held.add_argument(
        "--memory", type=rate, metavar="GB", help="a rank's, for weights, gradients and optimizer of all the blocks"
    )
    held.add_argument(
        "--split-weights", action="store_true", help="the least memory there is: every matrix split over all ranks"
    )
    p.add_argument("--tflops", type=rate, default=234.0, metavar="X", help="that a rank reaches: 75 %% of an A100")
    p.add_argument("--memory-bandwidth", type=rate, default=1632.0, metavar="GB/S", help="the same: 80 %%")
    p.add_argument(
        "--bandwidth",
        type=rates,
        metavar="GB/S,..",
        help="of a rank's link along each axis; 230 the last, 25 the first",
    )
    p.add_argument("--latency", type=seconds, default=1e-6, metavar="X", help="seconds a message is under way")
    p.add_argument("--explain", action="store_true", help="what every other layout would cost, and the second best")


def plan(p: argparse.ArgumentParser) -> None:
    """Adds those of the search for splits."""
    p.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    on = p.add_argument_group("what it runs on")
    on.add_argument("--devices", type=positive, metavar="N", help="how many")
    on.add_argument("--device", metavar="NAME", help="v100, a100-80gb, h100, h200, mi300x, or here: these CPUs")
    on.add_argument("--cluster", type=Path, metavar="FILE.toml", help="devices and links of your own, in their place")
    on.add_argument("--machine", type=Path, default=machine.DEFAULT, metavar="FILE", help="of here: by calibrate")
    on.add_argument("--memory-share", type=share, default=0.9, metavar="X", help="of a device's memory, to be filled")
    what = p.add_argument_group("what is trained")
    what.add_argument("--global-batch", type=positive, default=8, metavar="N", help="sequences a step, over all ranks")
    what.add_argument("--seq", type=positive, default=256, metavar="N", help="positions a sequence")
    what.add_argument("--dtype", choices=DTYPES, help="of weights and activations (default: bf16; here: fp32)")
    what.add_argument("--optimizer", choices=memory.OPTIMIZERS, default="adamw", help="its states")
    what.add_argument(
        "--fix",
        metavar="FIELD=VALUE,..",
        help="search the others alone: dp, tp, pp, schedule, chunks, micro_batch, saving, full=yes|no, sharded=yes|no,"
        " layers=3-4-4-3; all of them: cost that plan",
    )
    out = p.add_argument_group("output")
    out.add_argument("--explain", type=positive, metavar="N", help="plan N part by part, and what would change it")
    out.add_argument("--check", action="store_true", help="of here: run the best plan and three others as well")
    out.add_argument("--plot", type=Path, metavar="PNG", help="draw the plans (needs matplotlib)")
    out.add_argument("--json", type=Path, metavar="FILE", help="write them; examples/train_gpt.py --plan FILE runs it")


def bench(p: argparse.ArgumentParser) -> None:
    """Adds those of kernels alone."""
    p.add_argument("ops", nargs="*", metavar="OP", help="any that the list shows, all, or a file, path/to/my_op.py")
    p.add_argument(
        "--shape",
        action="append",
        metavar="MxN",
        help="several by commas or given again; else the standard",
    )
    p.add_argument("--dtype", default="bf16", metavar="DTYPE,..", help="bf16, fp16, fp32")
    p.add_argument(
        "--mode",
        default="fwd,bwd",
        metavar="MODE,..",
        help="fwd (saving for backward), bwd (on a kept graph), step",
    )
    p.add_argument("--providers", metavar="NAME,..", help="such as tpfuse,torch,compile; by default all installed")
    p.add_argument("--dropout", type=float, metavar="P", help="for the ops that drop; by default 0.1")
    p.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; by default a GPU where there is one")
    p.add_argument("--seconds", type=float, default=1.0, metavar="X", help="for each shape and mode")
    out = p.add_argument_group("output")
    out.add_argument("--csv", type=Path, metavar="FILE", help="rows for a spreadsheet")
    out.add_argument(
        "--json",
        type=json_place,
        nargs="?",
        const=True,
        metavar="FILE",
        help="numbers for programs in place of tables; with FILE.json, there and tables too",
    )
    out.add_argument(
        "--plot", type=Path, metavar="PNG|DIR", help="one picture, or roofline.png and speed.png (needs matplotlib)"
    )
