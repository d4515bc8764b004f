"""Speeds on the command line: ``mfu``, ``calibrate`` and ``predict``."""

from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from .. import command as cli
from ..command import CommandParser
from ..options import DTYPES, MODEL_HELP, add_dtype, add_model
from . import machine, mfu, plots, steptime
from .commands import STEP_SEQ, add_context, add_over_replicas, add_saving, add_settled_seq, plan_of, settled_config
from .text import quantity, table

_DEVICE, _RECOMPUTE = "H100", mfu.RECOMPUTE[0]

# ---- mfu ----


def register_mfu(p: CommandParser) -> None:
    p.runs(
        _run_mfu,
        "Model and hardware flops utilisation of a measured step. Without --model: a published table, computed again.",
    )
    p.add_argument("--model", metavar="MODEL", help=f"{MODEL_HELP} (default: the published table)")
    cli.add_count(p, "--batch", "sequences in a step, over all devices; needed with --model")
    add_settled_seq(p)
    cli.add_number(p, "--seconds", cli.seconds, "measured time of a step, in seconds; needed with --model")
    cli.add_count(p, "--devices", "number of devices that took part", 1)
    p.add_argument("--device", choices=mfu.PEAK, default=_DEVICE, help="device whose dense 16-bit peak is the limit")
    cli.add_number(p, "--peak-tflops", cli.rate, "peak of a device, in TFLOP/s (default: that of --device)")
    p.add_argument(
        "--recompute", choices=mfu.RECOMPUTE, default=_RECOMPUTE, help="part that is computed again in backward"
    )
    cli.add_output(p, plot=False)


def _run_mfu(args: Namespace) -> None:
    if args.model is None:
        values = args.batch, args.seq, args.seconds, args.peak_tflops
        others = args.devices > 1, args.device != _DEVICE, args.recompute != _RECOMPUTE
        if any(value is not None for value in values) or any(others):
            raise ValueError(
                "--batch, --seq, --seconds, --devices, --device, --peak-tflops and --recompute need --model too"
            )
        return _show_published(args)
    if args.batch is None or args.seconds is None:
        raise ValueError("--model needs --batch and --seconds too")
    config = settled_config(args)
    peak = mfu.PEAK[args.device] if args.peak_tflops is None else args.peak_tflops * 1e12
    u = mfu.utilization(
        config,
        seq=args.seq,
        batch=args.batch,
        seconds=args.seconds,
        devices=args.devices,
        peak=peak,
        recompute=args.recompute,
    )
    flops = mfu.model_flops(config, args.seq, args.batch)
    facts = [
        ("model flops a step", quantity(flops, "flop")),
        ("tokens a second", f"{args.batch * args.seq / args.seconds:,.0f}"),
        ("a device", quantity(u.model_rate, "flop/s")),
        ("of a peak of", quantity(peak, "flop/s")),
        ("MFU", f"{u.mfu:.1f} %"),
        ("HFU", f"{u.hfu:.1f} %"),
    ]
    cli.print_result(args, table(("", "value"), facts), dict(model_flops=flops) | u._asdict())


def _show_published(args: Namespace) -> None:
    rows, values = [], []
    for p in mfu.PUBLISHED:
        u = p.recomputed()
        rows.append((p.name, p.devices, f"{p.seconds:.2f}", f"{u.mfu:.1f}", p.mfu, f"{u.hfu:.1f}", p.hfu))
        values.append(dict(name=p.name, mfu=u.mfu, published_mfu=p.mfu, hfu=u.hfu, published_hfu=p.hfu))
    columns = ("model", "A100s", "s a step", "MFU %", "published", "HFU %", "published")
    note = "\nTP + SP + selective recompute, Korthikanti et al. 2022 (arXiv:2205.05198); seconds are its inputs"
    cli.print_result(args, table(columns, rows) + note, values)


# ---- calibrate, predict ----


def register_calibrate(p: CommandParser) -> None:
    p.runs(_run_calibrate)
    p.add_argument("--out", type=Path, default=machine.DEFAULT, metavar="FILE", help="file that is written")
    dtypes = "dtypes of the models that are timed (default: fp32)"
    p.add_argument("--dtype", choices=DTYPES, nargs="+", default=["fp32"], help=dtypes)
    cli.add_numbers(
        p, "--ranks", cli.positive, "numbers of processes that run at once, one thread each", default="1,2,4"
    )
    cli.add_number(
        p,
        "--seconds",
        cli.seconds,
        "time that it takes about, in seconds; one run of every size is the least, a minute on two cores",
        default=60,
    )
    cli.add_output(p, plot=False)


def _run_calibrate(args: Namespace) -> None:
    measured = machine.calibrate([DTYPES[name] for name in args.dtype], args.ranks, seconds=args.seconds)
    cli.print_result(args, str(measured), measured.json())
    measured.save(args.out)  # after what was measured is printed: the disk may be full
    if not args.json:
        print(f"written to {args.out}")


def register_predict(p: CommandParser) -> None:
    p.runs(_run_predict)
    add_model(p, default="gpt-3m")
    p.add_argument("--choices", type=_pairs, default="1x1,2x1,1x2,2x2", metavar="TPxDP,..", help="tp x dp to compare")
    add_context(p)
    add_over_replicas(p)
    cli.add_count(p, "--batch", "sequences in a step, over all replicas", 8)
    add_settled_seq(p, STEP_SEQ)
    cli.add_count(p, "--micro-batch", "sequences that a replica runs at once (default: all of its share)")
    add_dtype(p, "fp32")
    add_saving(p)
    p.add_argument("--machine", type=Path, default=machine.DEFAULT, metavar="FILE", help="file that calibrate wrote")
    cli.add_flag(p, "--check", "run the steps too, and print the errors of the predictions")
    cli.add_count(p, "--steps", "number of steps that --check measures", 8)
    cli.add_output(p)


def _pairs(text: str) -> list[tuple[int, int]]:
    """Returns the (tp, dp) of "1x1,2x1"."""
    pairs = [part.split("x") for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ArgumentTypeError(f"must be tp x dp pairs such as 1x1,2x1, got {text!r}")
    return [(cli.positive(tp), cli.positive(dp)) for tp, dp in pairs]


def _run_predict(args: Namespace) -> None:
    config, speeds = settled_config(args, STEP_SEQ), machine.Machine.load(args.machine)
    plans = [plan_of(args, tp, dp, args.micro_batch or max(1, args.batch // dp)) for tp, dp in args.choices]
    if args.check:
        checked = steptime.check(config, plans, speeds, batch=args.batch, steps=args.steps)
    else:
        checked = [steptime.Checked(steptime.predict(config, p, speeds, batch=args.batch)) for p in plans]
    values: list[dict[str, Any]] = [
        {name: getattr(c.prediction.plan, name) for name in ("tp", "cp", "dp", "micro_batch")}
        | dict(seconds=c.prediction.seconds, parts=c.prediction.parts, measured=c.measured, error_percent=c.error)
        for c in checked
    ]
    bars = {f"tp {v['tp']}, dp {v['dp']}": v["parts"] for v in values}
    pieces = f", cp {args.cp}" if args.cp > 1 else ""
    title = f"{args.model}, batch {args.batch} x {args.seq}{pieces}: predicted time of a step"
    draw = lambda path: plots.bars(bars, path, title=title, axis="a step", unit="s")
    cli.present(args, steptime.report(checked), values, draw)
