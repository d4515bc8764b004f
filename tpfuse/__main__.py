"""``python -m tpfuse``: where the bytes go, what a model needs at any scale, how near the limit it runs.  See ``--help``."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from .kernels._launch import MULTIPROCESSORS, pretending
from .layers.block import SAVING
from .ledger import dryrun, layer, machine, memory, mfu, plots, steptime
from .ledger.presets import PRESETS, load_config
from .ledger.recorder import mue
from .ledger.shapes import Shape
from .ledger.text import quantity, table
from .parallel import TensorParallel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODEL_HELP = f"a local Hugging Face directory or config.json, or one of {', '.join(PRESETS)}"


class Help(argparse.HelpFormatter):
    """Defaults are shown, where there is one to show."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=110)

    def _get_help_string(self, action: argparse.Action) -> str:
        quiet = any(action.default is value for value in (None, False, argparse.SUPPRESS))
        return action.help if quiet else f"{action.help} (default: %(default)s)"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def sizes(text: str) -> list[int]:
    """ "1,2,4" """
    return [positive(part) for part in text.split(",")]


def choices(text: str) -> list[tuple[int, int]]:
    """ "1x1,2x1" -> (tp, dp) pairs"""
    try:
        return [(positive(tp), positive(dp)) for tp, dp in (part.split("x") for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be tp x dp pairs such as 1x1,2x1, got {text!r}") from None


def parser() -> argparse.ArgumentParser:
    what = "Where the bytes go, what a model needs at any scale, how near the limit it runs."
    top = argparse.ArgumentParser(prog="python -m tpfuse", description=what)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, what: str, plot: bool = True) -> argparse._ArgumentGroup:
        p = commands.add_parser(name, help=what, description=what, formatter_class=Help, allow_abbrev=False)
        p.set_defaults(run=run)
        out = p.add_argument_group("output")
        out.add_argument("--json", action="store_true", help="numbers for programs in place of tables")
        if plot:
            out.add_argument("--plot", type=Path, metavar="PNG", help="draw it (needs matplotlib)")
        return p

    def model(p, default: str | None = None) -> None:
        p.add_argument("--model", required=default is None, default=default, metavar="MODEL", help=MODEL_HELP)

    def split(p, seq: int, micro: int, dtype: str) -> None:
        p.add_argument("--seq", type=positive, default=seq, metavar="N", help="positions a sequence")
        p.add_argument("--micro-batch", type=positive, default=micro, metavar="N", help="sequences that a replica runs at once")
        p.add_argument("--dtype", choices=DTYPES, default=dtype, help="of weights and activations")
        p.add_argument("--no-sequence-parallel", action="store_true", help="every tensor-parallel rank holds all rows between GEMMs")
        p.add_argument("--saving", choices=SAVING, default=SAVING[0], help="for backward, keep what is fastest or what is smallest")

    p = command("ledger", run_ledger, "One layer: the bytes of plain torch, of the operator table of 2020, and of tpfuse, side by side.")
    p.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--batch", type=positive, default=8, metavar="N", help="sequences")
    p.add_argument("--seq", type=positive, default=512, metavar="N", help="positions a sequence")
    p.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations")
    p.add_argument("--tp", type=positive, default=1, metavar="N", help="one rank of N, with sequence parallelism: tpfuse's columns alone")
    p.add_argument("--arch", choices=MULTIPROCESSORS, default="sm_90", help="whose launch parameters tpfuse's kernels have")
    p.add_argument("--ops", action="store_true", help="every op of tpfuse's layer too")
    p.add_argument("--ms", type=float, metavar="X", help="a measured time of tpfuse's layer (fastest), for its MUE; with --bandwidth")
    p.add_argument("--bandwidth", type=float, metavar="GB/S", help="the memory's peak")

    p = command("memory", run_memory, "Saved activations in closed form and measured, parameters, gradients, optimizer, DDP and FSDP.")
    model(p)
    p.add_argument("--tp", type=positive, default=1, metavar="N", help="tensor-parallel size")
    p.add_argument("--dp", type=positive, default=1, metavar="N", help="replicas")
    split(p, 2048, 1, "bf16")
    p.add_argument("--optimizer", choices=memory.OPTIMIZERS, default="adamw", help="its states")

    p = command("dryrun", run_dryrun, "A rank of any world, in one process: real code on meta tensors, counted and against the formulas.")
    model(p)
    p.add_argument("--tp", type=positive, default=1, metavar="N", help="tensor-parallel size")
    p.add_argument("--dp", type=positive, default=1, metavar="N", help="replicas")
    split(p, 2048, 1, "bf16")
    p.add_argument("--optimizer", choices=memory.OPTIMIZERS, default="adamw", help="its states")
    p.add_argument("--arch", choices=MULTIPROCESSORS, default="sm_90", help="whose launch parameters tpfuse's kernels have")
    p.add_argument("--sweep", action="store_true", help="how each cost grows with --tps and --ranks, in place of one --tp and --dp")
    p.add_argument("--tps", type=sizes, default="1,2,4,8,16,32,64", metavar="N,N", help="of --sweep: tensor-parallel sizes")
    p.add_argument("--ranks", type=sizes, default="1,8,64,512,4096", metavar="N,N", help="of --sweep: ranks in all")

    p = command("mfu", run_mfu, "Model and hardware flops utilisation of a measured step; without --model, a published table again.", False)
    p.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--batch", type=positive, metavar="N", help="sequences a step, over all devices")
    p.add_argument("--seq", type=positive, default=2048, metavar="N", help="positions a sequence")
    p.add_argument("--seconds", type=float, metavar="X", help="a step's")
    p.add_argument("--devices", type=positive, default=1, metavar="N", help="how many took part")
    p.add_argument("--device", choices=mfu.PEAK, default="H100", help="for its dense 16-bit peak")
    p.add_argument("--peak-tflops", type=float, metavar="X", help="a peak of your own in place of --device's")
    p.add_argument("--recompute", choices=mfu.RECOMPUTE, default="none", help="what is computed again in backward")

    p = command("calibrate", run_calibrate, "Measures what this machine's CPUs can do, in about a minute, for predict.", False)
    p.add_argument("--out", type=Path, default=machine.DEFAULT, metavar="FILE", help="where it is kept")
    p.add_argument("--dtype", choices=DTYPES, nargs="+", default=["fp32"], help="of the models that are timed")
    p.add_argument("--ranks", type=sizes, default="1,2,4", metavar="N,N", help="how many processes at once, one thread each")
    p.add_argument("--seconds", type=float, default=60, metavar="X", help="to take about")

    p = command(
        "predict", run_predict, "The time of a training step by tp and dp on this machine; --check measures it too. Needs calibrate."
    )
    model(p, "gpt-3m")
    p.add_argument("--choices", type=choices, default="1x1,2x1,1x2,2x2", metavar="TPxDP,..", help="what to compare")
    p.add_argument("--batch", type=positive, default=8, metavar="N", help="sequences a step, over all replicas")
    split(p, 256, 0, "fp32")
    p.set_defaults(micro_batch=None)
    p.add_argument("--machine", type=Path, default=machine.DEFAULT, metavar="FILE", help="what calibrate wrote")
    p.add_argument("--check", action="store_true", help="run the steps as well, and say how far off the prediction is")
    p.add_argument("--steps", type=positive, default=8, metavar="N", help="of --check: measured steps a choice")
    return top


def plan(args, tp: int, dp: int, micro_batch: int) -> dryrun.Plan:
    shared = dict(sequence_parallel=not args.no_sequence_parallel, saving=args.saving, dtype=DTYPES[args.dtype])
    return dryrun.Plan(tp, dp, args.seq, micro_batch, **shared, optimizer=getattr(args, "optimizer", "adamw"))


def show(args, text: str, values: object) -> None:
    print(json.dumps(values, indent=1, default=str) if args.json else text)


def drawn(args) -> None:
    if args.plot and not args.json:
        print(f"\ndrawn to {args.plot}")


# ---- the commands ----


def run_ledger(args) -> None:
    if (args.ms is None) != (args.bandwidth is None):
        raise ValueError("--ms and --bandwidth go together")
    with pretending(args.arch), dryrun.fake_world(args.tp) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=True)
        comparison = layer.compare(load_config(args.model), batch=args.batch, seq=args.seq, dtype=DTYPES[args.dtype], tp=tp)
    text, values = [str(comparison)], comparison.json()
    traced = comparison.traces["tpfuse fastest"]
    if args.ms is not None:
        row = traced.total()
        efficiency = mue(row.least, row.moved, args.ms / 1e3, args.bandwidth * 1e9)
        text.append(f"\nMUE of tpfuse fastest in {args.ms} ms at {args.bandwidth:g} GB/s: {efficiency:.1f} %")
        values["MUE"] = efficiency
    if args.ops:
        sums = traced.by("op", "kind", "phase").items()
        rows = [(*key, r.calls, quantity(r.read, "B"), quantity(r.written, "B"), quantity(r.flops, "flop")) for key, r in sums]
        text += ["\ntpfuse fastest, op by op:", table(("op", "kind", "phase", "calls", "read", "written", "computed"), rows)]
    if args.plot:
        plots.layer_map(comparison, args.plot)
    show(args, "\n".join(text), values)
    drawn(args)


def run_memory(args) -> None:
    config = load_config(args.model)
    s, chosen = Shape.of(config), plan(args, args.tp, args.dp, args.micro_batch)
    unit = args.seq * args.micro_batch * s.D
    size = dict(seq=args.seq, batch=args.micro_batch, element_size=chosen.dtype.itemsize)
    ways = [("no parallelism", 1, False, "none"), ("full recompute", 1, False, "full")]
    modes = [(f"TP {args.tp}{' + SP' if sp else ''}", args.tp, sp) for sp in (False, True)]
    ways += [(f"{name}{', selective' if r == 'selective' else ''}", t, sp, r) for name, t, sp in modes for r in ("none", "selective")]
    ways += [(f"tpfuse, {name}, {r}", t, sp, r) for name, t, sp in modes for r in SAVING]
    rows, values = [], {}
    for name, t, sp, recompute in ways:
        n = memory.activation_bytes(config, t, sp, recompute, **size)
        measured = None
        if recompute in SAVING:
            measured = measured_layer(config, chosen._replace(tp=t, sequence_parallel=sp, saving=recompute))
        rows.append((name, f"{n / unit:.2f}", quantity(n, "B"), quantity(n * s.L, "B"), quantity(measured, "B") if measured else ""))
        values[name] = dict(a_layer=n, all_layers=n * s.L, measured_a_layer=measured)
    counted = dryrun.run(config, chosen)
    text = [
        f"saved for backward by one layer on one rank; sbh = {unit:,}, bytes of {args.dtype}",
        table(("", "sbh", "a layer", f"{s.L} layers", "measured a layer"), rows),
        "",
        dryrun.memory_table(counted),
    ]
    if args.plot:
        plots.bars({name: {"a layer, bytes / sbh": v["a_layer"] / unit} for name, v in values.items()}, "bytes / sbh", args.plot)
    show(args, "\n".join(text), dict(activations=values, **dryrun.as_json(config, chosen, counted.held, counted.work)))
    drawn(args)


def measured_layer(config, chosen: dryrun.Plan) -> int:
    with dryrun.fake_world(chosen.tp) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=chosen.sequence_parallel)
        return memory.measured_layer(config, tp=tp, seq=chosen.seq, batch=chosen.micro_batch, saving=chosen.saving, dtype=chosen.dtype)


def run_dryrun(args) -> None:
    config = load_config(args.model)
    if args.sweep:
        with pretending(args.arch):
            points = dryrun.sweep(config, plan(args, 1, 1, args.micro_batch), args.tps, args.ranks)
        if args.plot:
            plots.growth(points, args.plot)
        every = [dict(error=p.error, tp=p.plan.tp) if p.error else dryrun.as_json(config, p.plan, p.held, p.work) for p in points]
        show(args, dryrun.sweep_table(points), every)
    else:
        with pretending(args.arch):
            done = dryrun.run(config, plan(args, args.tp, args.dp, args.micro_batch))
        if args.plot:
            states = {"DDP": done.held.state, "FSDP": done.held.sharded}
            rows = {name: state._asdict() | {"activations": done.work.peak} for name, state in states.items()}
            plots.bars(rows, "bytes a rank", args.plot)
        values = dryrun.as_json(config, done.plan, done.held, done.work)
        values["formulas"] = {what: dict(counted=n, formula=formula) for what, n, formula, _ in dryrun.against_formulas(done)}
        show(args, dryrun.report(done), dict(config=asdict(config), **values))
    drawn(args)


def run_mfu(args) -> None:
    if args.model is None:
        rows, values = [], []
        for p in mfu.PUBLISHED:
            u = p.recomputed()
            rows.append((p.name, p.devices, f"{p.seconds:.2f}", f"{u.mfu:.1f}", p.mfu, f"{u.hfu:.1f}", p.hfu))
            values.append(dict(name=p.name, mfu=u.mfu, published_mfu=p.mfu, hfu=u.hfu, published_hfu=p.hfu))
        header = ("model", "A100s", "s a step", "MFU %", "published", "HFU %", "published")
        note = "\nTP + SP + selective recompute, Korthikanti et al. 2022 (arXiv:2205.05198); seconds are its inputs"
        return show(args, table(header, rows) + note, values)
    if args.batch is None or args.seconds is None:
        raise ValueError("mfu: --model needs --batch and --seconds too")
    config = load_config(args.model)
    peak = mfu.PEAK[args.device] if args.peak_tflops is None else args.peak_tflops * 1e12
    run = dict(seq=args.seq, batch=args.batch, seconds=args.seconds, devices=args.devices, peak=peak)
    u = mfu.utilization(config, **run, recompute=args.recompute)
    flops = mfu.model_flops(config, args.seq, args.batch)
    rows = [
        ("model flops a step", quantity(flops, "flop")),
        ("tokens a second", f"{args.batch * args.seq / args.seconds:,.0f}"),
        ("a device", quantity(u.model_rate, "flop/s")),
        ("of a peak of", quantity(peak, "flop/s")),
        ("MFU", f"{u.mfu:.1f} %"),
        ("HFU", f"{u.hfu:.1f} %"),
    ]
    show(args, table(("", "value"), rows), dict(model_flops=flops, **u._asdict()))


def run_calibrate(args) -> None:
    measured = machine.calibrate([DTYPES[name] for name in args.dtype], args.ranks, seconds=args.seconds)
    measured.save(args.out)
    show(args, f"{measured}\nwritten to {args.out}", json.loads(args.out.read_text()))


def run_predict(args) -> None:
    config, known = load_config(args.model), machine.Machine.load(args.machine)
    plans = [plan(args, tp, dp, args.micro_batch or max(1, args.batch // dp)) for tp, dp in args.choices]
    if args.check:
        checked = steptime.check(config, plans, known, batch=args.batch, steps=args.steps)
    else:
        checked = [steptime.Checked(steptime.predict(config, p, known, batch=args.batch)) for p in plans]
    values = [
        dict(tp=c.prediction.plan.tp, dp=c.prediction.plan.dp, micro_batch=c.prediction.plan.micro_batch)
        | dict(seconds=c.prediction.seconds, parts=c.prediction.parts, measured=c.measured, error_percent=c.error)
        for c in checked
    ]
    if args.plot:
        plots.bars({f"tp {v['tp']}, dp {v['dp']}": v["parts"] for v in values}, "seconds a step", args.plot)
    show(args, steptime.report(checked), values)
    drawn(args)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"tpfuse {args.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
