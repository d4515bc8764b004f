"""``python -m tpfuse``: where the bytes go, what a model needs at any scale, how near the limit it runs, how long a
pipeline waits, which split of a model is fastest, which all-reduce is, what networks cost and carry, how a block is
laid out over ranks, whether the installation works, and how fast the kernels are."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .kernels.runtime.launch import pretending
from .layers.block import SAVING
from .models.config.gpt import ModelConfig
from .models.stack import FULL, saving_of
from .parallel import TensorParallel
from .tools.bench import command as bench
from .tools.doctor import doctor
from .tools.doctor.launched import world
from .tools.ledger import dryrun, layer, machine, memory, mfu, plots, stages, steptime
from .tools.ledger.arguments import make_parser
from .tools.ledger.options import DTYPES
from .tools.ledger.presets import load_config
from .tools.ledger.recorder import mue
from .tools.ledger.shapes import Shape
from .tools.ledger.text import quantity, table
from .tools.pipeline import command as pipeline
from .tools.pipeline import gantt
from .tools.plan import command as collectives
from .tools.plan import planning
from .tools.plan.intra import command as layouts
from .tools.plan.topology import command as topology

OURS_FULL = "full recompute"


def plan(args: Namespace, tp: int, dp: int, micro_batch: int) -> dryrun.Plan:
    """Returns the plan that the options describe."""
    return dryrun.Plan(
        tp,
        dp,
        args.seq,
        micro_batch,
        sequence_parallel=not args.no_sequence_parallel,
        saving=saving_of("python -m tpfuse", args.saving, args.recompute),
        dtype=DTYPES[args.dtype],
        optimizer=getattr(args, "optimizer", "adamw"),
        full=args.recompute == FULL,
    )


def pipe(args: Namespace) -> stages.Pipe:
    """Returns the pipeline that the options describe."""
    return stages.Pipe(args.pp, args.schedule, args.micro_batches, args.chunks)


def show(args: Namespace, text: str, values: object) -> None:
    """Prints the text, or with --json the values."""
    print(json.dumps(values, indent=1, default=str) if args.json else text)


def drawn(args: Namespace) -> None:
    """Prints which file --plot wrote."""
    if args.plot and not args.json:
        print(f"\ndrawn to {args.plot}")


def present(args: Namespace, found: Any, draw: Callable[[Any, Path], None]) -> None:
    """Prints what a command found, which has ``text()`` and ``json()``, and with --plot draws it."""
    if args.plot:
        draw(found, args.plot)
    show(args, found.text(), found.json())
    drawn(args)


# ---- the commands ----


def run_ledger(args: Namespace) -> None:
    if (args.ms is None) != (args.bandwidth is None):
        raise ValueError("--ms and --bandwidth go together")
    with pretending(args.arch), dryrun.fake_world(args.tp) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=True)
        comparison = layer.compare(
            load_config(args.model), batch=args.batch, seq=args.seq, dtype=DTYPES[args.dtype], tp=tp
        )
    text, values = [str(comparison)], comparison.json()
    traced = comparison.traces["tpfuse fastest"]
    if args.ms is not None:
        row = traced.total()
        efficiency = mue(row.least, row.moved, args.ms / 1e3, args.bandwidth * 1e9)
        text.append(f"\nMUE of tpfuse fastest in {args.ms} ms at {args.bandwidth:g} GB/s: {efficiency:.1f} %")
        values["MUE"] = efficiency
    if args.ops:
        sums = traced.by("op", "kind", "phase").items()
        rows = [
            (*key, r.calls, quantity(r.read, "B"), quantity(r.written, "B"), quantity(r.flops, "flop"))
            for key, r in sums
        ]
        text += [
            "\ntpfuse fastest, op by op:",
            table(("op", "kind", "phase", "calls", "read", "written", "computed"), rows),
        ]
    if args.plot:
        plots.layer_map(comparison, args.plot)
    show(args, "\n".join(text), values)
    drawn(args)


def run_memory(args: Namespace) -> None:
    config = load_config(args.model)
    s, chosen = Shape.of(config), plan(args, args.tp, args.dp, args.micro_batch)
    unit = args.seq * args.micro_batch * s.D
    size = dict(seq=args.seq, batch=args.micro_batch, element_size=chosen.dtype.itemsize)
    ways = [("no parallelism", 1, False, "none"), ("full recompute", 1, False, "full")]
    modes = [(f"TP {args.tp}{' + SP' if sp else ''}", args.tp, sp) for sp in (False, True)]
    ways += [
        (f"{name}{', selective' if r == 'selective' else ''}", t, sp, r)
        for name, t, sp in modes
        for r in ("none", "selective")
    ]
    ways += [(f"tpfuse, {name}, {r}", t, sp, r) for name, t, sp in modes for r in (*SAVING, OURS_FULL)]
    rows, values = [], {}
    for name, t, sp, recompute in ways:
        full = recompute == OURS_FULL
        saving, measured = SAVING[0] if full else recompute, None
        n = memory.activation_bytes(config, t, sp, saving, full=full, **size)
        if saving in SAVING:
            measured = measured_layer(config, chosen._replace(tp=t, sequence_parallel=sp, saving=saving, full=full))
        rows.append(
            (
                name,
                f"{n / unit:.2f}",
                quantity(n, "B"),
                quantity(n * s.L, "B"),
                quantity(measured, "B") if measured else "",
            )
        )
        values[name] = dict(a_layer=n, all_layers=n * s.L, measured_a_layer=measured)
    held, numbers = _held(args, config, chosen)
    text = [
        f"saved for backward by one layer on one rank; sbh = {unit:,}, bytes of {args.dtype}",
        table(("", "sbh", "a layer", f"{s.L} layers", "measured a layer"), rows),
        "",
        held,
    ]
    if args.plot:
        plots.bars(
            {name: {"a layer, bytes / sbh": v["a_layer"] / unit} for name, v in values.items()},
            "bytes / sbh",
            args.plot,
        )
    show(args, "\n".join(text), dict(activations=values, **numbers))
    drawn(args)


def _held(args: Namespace, config: ModelConfig, chosen: dryrun.Plan) -> tuple[str, dict[str, Any]]:
    """Returns what a rank holds, of a pipeline each: a table and plain numbers."""
    if args.pp == 1:
        counted = dryrun.run(config, chosen)
        return dryrun.memory_table(counted), dryrun.as_json(chosen, counted.held, counted.work)
    ranks = stages.run(config, chosen, pipe(args))
    return stages.memory_table(ranks), dict(ranks=stages.as_json(ranks))


def measured_layer(config: ModelConfig, chosen: dryrun.Plan) -> int:
    """Returns the bytes that one more layer of the real model saves."""
    with dryrun.fake_world(chosen.tp) as mesh:
        tp = TensorParallel(mesh["tp"], sequence_parallel=chosen.sequence_parallel)
        return memory.measured_layer(
            config,
            tp=tp,
            seq=chosen.seq,
            batch=chosen.micro_batch,
            saving=chosen.saving,
            full=chosen.full,
            dtype=chosen.dtype,
        )


def run_dryrun(args: Namespace) -> None:
    config = load_config(args.model)
    if args.sweep and args.pp > 1:
        raise ValueError("dryrun: --sweep is of tp and dp alone; leave out --pp")
    if args.sweep:
        with pretending(args.arch):
            points = dryrun.sweep(config, plan(args, 1, 1, args.micro_batch), args.tps, args.ranks)
        if args.plot:
            plots.growth(points, args.plot)
        every = [
            dict(error=p.error, tp=p.plan.tp)
            if p.held is None or p.work is None
            else dryrun.as_json(p.plan, p.held, p.work)
            for p in points
        ]
        show(args, dryrun.sweep_table(points), every)
    elif args.pp > 1:
        if args.plot:
            raise ValueError("dryrun: --plot draws one rank, and --pp asks for several")
        with pretending(args.arch):
            ranks = stages.run(config, plan(args, args.tp, args.dp, args.micro_batch), pipe(args))
        show(args, stages.report(ranks), dict(config=asdict(config), ranks=stages.as_json(ranks)))
    else:
        with pretending(args.arch):
            done = dryrun.run(config, plan(args, args.tp, args.dp, args.micro_batch))
        if args.plot:
            states = {"DDP": done.held.state, "data_parallel": done.held.viewed, "FSDP": done.held.sharded}
            rows = {name: state._asdict() | {"activations": done.work.peak} for name, state in states.items()}
            plots.bars(rows, "bytes a rank", args.plot)
        values = dryrun.as_json(done.plan, done.held, done.work)
        values["formulas"] = {
            what: dict(counted=n, formula=formula) for what, n, formula, _ in dryrun.against_formulas(done)
        }
        show(args, dryrun.report(done), dict(config=asdict(config), **values))
    drawn(args)


def run_mfu(args: Namespace) -> None:
    if args.model is None:
        rows, values = [], []
        for p in mfu.PUBLISHED:
            u = p.recomputed()
            rows.append((p.name, p.devices, f"{p.seconds:.2f}", f"{u.mfu:.1f}", p.mfu, f"{u.hfu:.1f}", p.hfu))
            values.append(dict(name=p.name, mfu=u.mfu, published_mfu=p.mfu, hfu=u.hfu, published_hfu=p.hfu))
        columns = ("model", "A100s", "s a step", "MFU %", "published", "HFU %", "published")
        note = "\nTP + SP + selective recompute, Korthikanti et al. 2022 (arXiv:2205.05198); seconds are its inputs"
        return show(args, table(columns, rows) + note, values)
    if args.batch is None or args.seconds is None:
        raise ValueError("mfu: --model needs --batch and --seconds too")
    config = load_config(args.model)
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
    show(args, table(("", "value"), facts), dict(model_flops=flops, **u._asdict()))


def run_calibrate(args: Namespace) -> None:
    measured = machine.calibrate([DTYPES[name] for name in args.dtype], args.ranks, seconds=args.seconds)
    measured.save(args.out)
    show(args, f"{measured}\nwritten to {args.out}", json.loads(args.out.read_text()))


def run_predict(args: Namespace) -> None:
    config, known = load_config(args.model), machine.Machine.load(args.machine)
    plans = [plan(args, tp, dp, args.micro_batch or max(1, args.batch // dp)) for tp, dp in args.choices]
    if args.check:
        checked = steptime.check(config, plans, known, batch=args.batch, steps=args.steps)
    else:
        checked = [steptime.Checked(steptime.predict(config, p, known, batch=args.batch)) for p in plans]
    values: list[dict[str, Any]] = [
        dict(tp=c.prediction.plan.tp, dp=c.prediction.plan.dp, micro_batch=c.prediction.plan.micro_batch)
        | dict(seconds=c.prediction.seconds, parts=c.prediction.parts, measured=c.measured, error_percent=c.error)
        for c in checked
    ]
    if args.plot:
        plots.bars({f"tp {v['tp']}, dp {v['dp']}": v["parts"] for v in values}, "seconds a step", args.plot)
    show(args, steptime.report(checked), values)
    drawn(args)


def run_pipeline(args: Namespace) -> None:
    compared = pipeline.compare(args, args.schedule.split(",") if args.schedule else None)
    present(args, compared, lambda found, path: gantt.draw(found.timelines, path))


def run_collectives(args: Namespace) -> None:
    present(args, collectives.compare(args), collectives.draw)


def run_topology(args: Namespace) -> None:
    present(args, topology.compare(args.accelerators), topology.draw)


def run_layouts(args: Namespace) -> None:
    present(args, layouts.solve(args), layouts.draw)


def run_doctor(args: Namespace) -> int:
    """Returns 1 where there is a fault, 0 otherwise; of several ranks the first prints."""
    with world(None) as group:
        report = doctor(args.folder, group)
        if group is None or group.rank() == 0:
            show(args, report.text, report.json())
    return 0 if report.ok else 1


COMMANDS = {
    "ledger": run_ledger,
    "memory": run_memory,
    "dryrun": run_dryrun,
    "mfu": run_mfu,
    "calibrate": run_calibrate,
    "predict": run_predict,
    "pipeline": run_pipeline,
    "collectives": run_collectives,
    "topology": run_topology,
    "layouts": run_layouts,
    "plan": planning.run,
    "doctor": run_doctor,
    "bench": bench.run,
}


def parser() -> ArgumentParser:
    """Returns the parser of the command line."""
    return make_parser(COMMANDS)


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns 2 after an error, which it prints, and 1 for a doctor's fault."""
    args = parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except (ValueError, OSError) as error:
        print(f"tpfuse {args.command}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
