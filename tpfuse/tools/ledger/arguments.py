"""The command line of ``python -m tpfuse``: its commands and their options."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from ...kernels.runtime.launch import MULTIPROCESSORS
from ...layers.block import SAVING
from ...models.stack import RECOMPUTE
from ...pipeline.schedules import SCHEDULES
from . import machine, memory, mfu, options
from .options import DTYPES, MODEL_HELP, Help, choices, positive, rate, seconds, sizes


def make_parser(commands: Mapping[str, Callable[[argparse.Namespace], int | None]]) -> argparse.ArgumentParser:
    """Returns the parser; ``commands`` are the functions to run, by name, which it leaves in ``run``."""
    what = (
        "Where the bytes go, what a model needs, how near the limit it runs, whether the installation works, and how"
        " fast the kernels are."
    )
    top = argparse.ArgumentParser(prog="python -m tpfuse", description=what)
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def named(name: str, what: str, more: str | None = None) -> argparse.ArgumentParser:
        p = subparsers.add_parser(name, help=what, description=more or what, formatter_class=Help, allow_abbrev=False)
        p.set_defaults(run=commands[name])
        return p

    def command(name: str, what: str, plot: bool = True, more: str | None = None) -> argparse.ArgumentParser:
        p = named(name, what, more)
        out = p.add_argument_group("output")
        out.add_argument("--json", action="store_true", help="numbers for programs in place of tables")
        if plot:
            out.add_argument("--plot", type=Path, metavar="PNG", help="draw it (needs matplotlib)")
        return p

    def model(p: argparse.ArgumentParser, default: str | None = None) -> None:
        p.add_argument("--model", required=default is None, default=default, metavar="MODEL", help=MODEL_HELP)

    def split(p: argparse.ArgumentParser, seq: int, micro: int, dtype: str) -> None:
        p.add_argument("--seq", type=positive, default=seq, metavar="N", help="positions a sequence")
        p.add_argument(
            "--micro-batch", type=positive, default=micro, metavar="N", help="sequences that a replica runs at once"
        )
        p.add_argument("--dtype", choices=DTYPES, default=dtype, help="of weights and activations")
        p.add_argument(
            "--no-sequence-parallel",
            action="store_true",
            help="every tensor-parallel rank holds all rows between GEMMs",
        )
        p.add_argument("--saving", choices=SAVING, help="for backward, keep what is fastest (default) or smallest")
        p.add_argument(
            "--recompute",
            choices=RECOMPUTE,
            help="in backward make again what is cheap (selective: --saving smallest) or each block (full)",
        )

    def spread(p: argparse.ArgumentParser) -> None:
        p.add_argument("--pp", type=positive, default=1, metavar="N", help="ranks that the layers are spread over")
        p.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of --pp: what its ranks do, and when")
        p.add_argument(
            "--micro-batches", type=positive, default=8, metavar="N", help="of --pp: parts of a step's batch"
        )
        p.add_argument("--chunks", type=positive, metavar="N", help="of --pp: stages a rank, where that is left open")

    p = command(
        "ledger",
        "One layer: the bytes of plain torch, of the operator table of 2020, and of tpfuse, side by side.",
    )
    p.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--batch", type=positive, default=8, metavar="N", help="sequences")
    p.add_argument("--seq", type=positive, default=512, metavar="N", help="positions a sequence")
    p.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations")
    p.add_argument(
        "--tp",
        type=positive,
        default=1,
        metavar="N",
        help="one rank of N, with sequence parallelism: tpfuse's columns alone",
    )
    p.add_argument(
        "--arch", choices=MULTIPROCESSORS, default="sm_90", help="whose launch parameters tpfuse's kernels have"
    )
    p.add_argument("--ops", action="store_true", help="every op of tpfuse's layer too")
    p.add_argument(
        "--ms",
        type=float,
        metavar="X",
        help="a measured time of tpfuse's layer (fastest), for its MUE; with --bandwidth",
    )
    p.add_argument("--bandwidth", type=float, metavar="GB/S", help="the memory's peak")

    p = command(
        "memory",
        "Saved activations in closed form and measured, parameters, gradients, optimizer, DDP and FSDP.",
    )
    model(p)
    p.add_argument("--tp", type=positive, default=1, metavar="N", help="tensor-parallel size")
    p.add_argument("--dp", type=positive, default=1, metavar="N", help="replicas")
    spread(p)
    split(p, 2048, 1, "bf16")
    p.add_argument("--optimizer", choices=memory.OPTIMIZERS, default="adamw", help="its states")

    p = command(
        "dryrun",
        "A rank of any world, in one process: real code on meta tensors, counted and against the formulas.",
    )
    model(p)
    p.add_argument("--tp", type=positive, default=1, metavar="N", help="tensor-parallel size")
    p.add_argument("--dp", type=positive, default=1, metavar="N", help="replicas")
    spread(p)
    split(p, 2048, 1, "bf16")
    p.add_argument("--optimizer", choices=memory.OPTIMIZERS, default="adamw", help="its states")
    p.add_argument(
        "--arch", choices=MULTIPROCESSORS, default="sm_90", help="whose launch parameters tpfuse's kernels have"
    )
    p.add_argument(
        "--sweep", action="store_true", help="how each cost grows with --tps and --ranks, in place of one --tp and --dp"
    )
    p.add_argument(
        "--tps", type=sizes, default="1,2,4,8,16,32,64", metavar="N,N", help="of --sweep: tensor-parallel sizes"
    )
    p.add_argument("--ranks", type=sizes, default="1,8,64,512,4096", metavar="N,N", help="of --sweep: ranks in all")

    p = command(
        "mfu",
        "Model and hardware flops utilisation of a measured step; without --model, a published table again.",
        False,
    )
    p.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--batch", type=positive, metavar="N", help="sequences a step, over all devices")
    p.add_argument("--seq", type=positive, default=2048, metavar="N", help="positions a sequence")
    p.add_argument("--seconds", type=float, metavar="X", help="a step's")
    p.add_argument("--devices", type=positive, default=1, metavar="N", help="how many took part")
    p.add_argument("--device", choices=mfu.PEAK, default="H100", help="for its dense 16-bit peak")
    p.add_argument("--peak-tflops", type=float, metavar="X", help="a peak of your own in place of --device's")
    p.add_argument("--recompute", choices=mfu.RECOMPUTE, default="none", help="what is computed again in backward")

    p = command("calibrate", "Measures what this machine's CPUs can do, in about a minute, for predict.", False)
    p.add_argument("--out", type=Path, default=machine.DEFAULT, metavar="FILE", help="where it is kept")
    p.add_argument("--dtype", choices=DTYPES, nargs="+", default=["fp32"], help="of the models that are timed")
    p.add_argument(
        "--ranks", type=sizes, default="1,2,4", metavar="N,N", help="how many processes at once, one thread each"
    )
    p.add_argument("--seconds", type=float, default=60, metavar="X", help="to take about")

    p = command(
        "predict",
        "The time of a training step by tp and dp on this machine; --check measures it too. Needs calibrate.",
    )
    model(p, "gpt-3m")
    p.add_argument("--choices", type=choices, default="1x1,2x1,1x2,2x2", metavar="TPxDP,..", help="what to compare")
    p.add_argument("--batch", type=positive, default=8, metavar="N", help="sequences a step, over all replicas")
    split(p, 256, 0, "fp32")
    p.set_defaults(micro_batch=None)
    p.add_argument("--machine", type=Path, default=machine.DEFAULT, metavar="FILE", help="what calibrate wrote")
    p.add_argument("--check", action="store_true", help="run the steps as well, and say how far off the prediction is")
    p.add_argument("--steps", type=positive, default=8, metavar="N", help="of --check: measured steps a choice")

    p = command("pipeline", "What each rank of a pipeline does, how long a step takes and how much of it is waiting.")
    p.add_argument("--stages", type=positive, default=4, metavar="N", help="ranks that the layers are spread over")
    p.add_argument("--micro-batches", type=positive, default=8, metavar="N", help="parts of a step's batch")
    p.add_argument("--schedule", metavar="NAME,...", help="gpipe, 1f1b, ... (default: all, beside each other)")
    p.add_argument("--chunks", type=positive, metavar="N", help="stages a rank, of those schedules that leave it open")
    for name, what in (
        ("forward", "a forward pass"),
        ("input", "the gradient of inputs"),
        ("weight", "the gradient of weights"),
    ):
        p.add_argument(
            f"--{name}", type=seconds, default=1.0, metavar="X", help=f"seconds of {what} of all layers of a rank"
        )
    p.add_argument("--communication", type=float, default=0.0, metavar="X", help="seconds from a rank to the next")

    p = command("collectives", "Which all-reduce is the fastest, over sizes and numbers of ranks.")
    powers = ",".join(str(4**k) for k in range(1, 7))
    p.add_argument("--ranks", type=sizes, default=powers, metavar="N,..", help="ranks that sum")
    kilobytes = ",".join(str(2**k) for k in range(10, 31, 2))
    p.add_argument("--sizes", type=sizes, default=kilobytes, metavar="BYTES,..", help="bytes on each rank")
    p.add_argument("--latency", type=seconds, default=5e-6, metavar="X", help="seconds a message is under way")
    p.add_argument("--overhead", type=seconds, default=1e-6, metavar="X", help="seconds a message keeps a rank busy")
    p.add_argument("--bandwidth", type=rate, default=25.0, metavar="GB/S", help="of a rank's link, each way")

    p = command("topology", "What eight networks of as many accelerators cost, and what they carry. Needs networkx.")
    p.add_argument("--accelerators", type=positive, default=1024, metavar="N", help="that each network joins")

    p = command(
        "layouts", "How each op of a block is laid out on a mesh of ranks: the fastest way.", more=options.LAYOUTS
    )
    model(p)
    options.layouts(p)

    options.plan(named("plan", "The fastest ways to split a model's training over devices, and why.", options.PLAN))

    p = command(
        "doctor", "What this installation is, what runs where, and whether it works; by torchrun, of all ranks.", False
    )
    p.add_argument(
        "--folder", type=Path, default=Path("."), metavar="DIR", help="where disk and sharedness are looked at"
    )

    options.bench(
        named(
            "bench", "Kernels alone, at any shape: against plain torch, torch.compile and Liger Kernel.", options.BENCH
        )
    )
    return top
