"""The ledger on the command line: ``ledger``, ``memory`` and ``dryrun``."""

import itertools
from argparse import Namespace
from dataclasses import asdict
from typing import Any, NamedTuple

from ...kernels.runtime.launch import pretending
from ...layers.block import SAVING
from ...models.config.model import ModelConfig
from ...models.stack import FULL, RECOMPUTE, saving_of
from ...parallel import CP_KINDS
from ...pipeline.schedules import TRAINED
from .. import command as cli
from ..command import CommandParser, Options
from ..options import DTYPES, MODEL_HELP, add_any_optimizer, add_arch, add_dtype, add_model
from . import dryrun, layer, page, plots, stages
from .presets import load_config
from .recorder import mue
from .shapes import Shape, layers_by_mlp
from .text import quantity, table

SEQ, LAYER_SEQ, STEP_SEQ = 2048, 512, 256  # positions, where neither a call nor the model says less

# ---- options of several commands ----


def _add_sizes(p: Options) -> None:
    """Adds --tp, --dp and the options of a pipeline."""
    cli.add_count(p, "--tp", "tensor-parallel size", 1)
    cli.add_count(p, "--dp", "number of replicas (data-parallel size)", 1)
    cli.add_count(p, "--pp", "ranks that the layers are spread over", 1)
    p.add_argument(
        "--schedule", choices=TRAINED, default="1f1b", help="schedule of the pipeline, where --pp is above 1"
    )
    cli.add_count(p, "--micro-batches", "micro-batches in a step of the pipeline", 8)
    cli.add_count(p, "--chunks", "stages on a rank, of interleaved and zero-bubble (default: 2)")


def add_context(p: Options) -> None:
    cli.add_count(p, "--cp", "context-parallel size: ranks with a piece of each sequence", 1)
    p.add_argument(
        "--cp-kind",
        choices=CP_KINDS,
        default="auto",
        help="what attention exchanges over --cp: heads, or all keys and values (default: auto, what sends less)",
    )


def _add_imbalance(p: Options) -> None:
    cli.add_number(
        p,
        "--imbalance",
        cli.bounded(float, lambda x: x >= 1, "a number of at least 1"),
        "of a model with experts: count the rank whose experts have the most rows, X times the mean (default: 1)",
        default=1.0,
    )


def add_saving(p: Options) -> None:
    """Adds the options of what a step keeps for backward."""
    cli.add_flag(
        p,
        "--no-sequence-parallel",
        "keep all rows on every tensor-parallel rank between GEMMs, in place of a share of them",
    )
    p.add_argument(
        "--saving", choices=SAVING, help="keep for backward what is fastest, or what is smallest (default: fastest)"
    )
    p.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        help="recompute in backward what is cheap (selective: --saving smallest) or whole blocks (full; default: none)",
    )


def _add_step(p: Options) -> None:
    """Adds the options of a micro-batch on a rank of any world."""
    _add_sizes(p)
    add_context(p)
    _add_imbalance(p)
    add_settled_seq(p)
    cli.add_count(p, "--micro-batch", "sequences that a replica runs at once", 1)
    add_over_replicas(p)
    add_dtype(p)
    add_saving(p)
    add_any_optimizer(p)


def add_over_replicas(p: Options) -> None:
    cli.add_flag(p, "--over-replicas", "divide experts among the ranks of all replicas, not of each")


def plan_of(args: Namespace, tp: int, dp: int, micro_batch: int, optimizer: str = "adamw") -> dryrun.Plan:
    return dryrun.Plan(
        tp,
        dp,
        args.seq,
        micro_batch,
        sequence_parallel=not args.no_sequence_parallel,
        saving=saving_of("python -m tpfuse", args.saving, args.recompute),
        dtype=DTYPES[args.dtype],
        optimizer=optimizer,
        full=args.recompute == FULL,
        cp=args.cp,
        cp_kind=args.cp_kind,
        over_replicas=args.over_replicas,
    )


def add_settled_seq(p: Options, usual: int = SEQ) -> None:
    """Adds --seq without a default, for :func:`settled_config`."""
    cli.add_seq(p, None, f" (default: {usual}, or fewer where the model has no more)")


def settled_config(args: Namespace, usual: int = SEQ) -> ModelConfig:
    """Returns the model's config.  Where --seq is not said it becomes as many positions as the model has, at most
    ``usual``; ValueError where the model has fewer than are said."""
    config = load_config(args.model)
    most = config.most_positions
    if args.seq is None:
        args.seq = min(usual, most or usual)
    if most is not None and args.seq > most:
        raise ValueError(f"{args.command}: {args.seq} positions are more than the model's max_positions={most}")
    return config


def _step_plan(args: Namespace) -> dryrun.Plan:
    plan = plan_of(args, args.tp, args.dp, args.micro_batch, optimizer=args.optimizer)
    return plan._replace(imbalance=args.imbalance)


def _pipe(args: Namespace) -> stages.Pipe:
    return stages.Pipe(args.pp, args.schedule, args.micro_batches, args.chunks)


# ---- ledger ----


def register_ledger(p: CommandParser) -> None:
    p.runs(_run_ledger)
    p.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    cli.add_count(p, "--batch", "number of sequences", 8)
    add_settled_seq(p, LAYER_SEQ)
    add_dtype(p)
    cli.add_count(
        p, "--tp", "tensor-parallel size, with sequence parallelism; above 1, as of --cp, tpfuse's columns alone", 1
    )
    add_context(p)
    _add_imbalance(p)
    index = cli.bounded(int, lambda x: x >= 0, "a number of at least 0")
    p.add_argument(
        "--layer", type=index, default=0, metavar="N", help="number of the layer that is counted (default: 0)"
    )
    add_arch(p)
    cli.add_flag(p, "--ops", "list every op of tpfuse's layer too")
    cli.add_number(
        p,
        "--ms",
        cli.milliseconds,
        "measured time of tpfuse's layer (fastest), in ms, for its memory usage efficiency; needs --bandwidth",
    )
    cli.add_number(p, "--bandwidth", cli.rate, "peak bandwidth of the memory, in GB/s; needs --ms")
    cli.add_html(p, "a page too, with sliders for sizes, splits, devices and links")
    cli.add_output(p)


def _run_ledger(args: Namespace) -> None:
    if (args.ms is None) != (args.bandwidth is None):
        raise ValueError("--ms and --bandwidth go together")
    config = settled_config(args, LAYER_SEQ)
    plan = dryrun.Plan(args.tp, cp=args.cp, cp_kind=args.cp_kind, dtype=DTYPES[args.dtype], imbalance=args.imbalance)
    if args.html:
        subject = page.Subject(args.model, config, plan, args.batch, seq=args.seq, arch=args.arch, layer=args.layer)
        page.write(subject, args.html)
    with pretending(args.arch), dryrun.fake_world(plan.tp, cp=plan.cp) as mesh:
        tp = dryrun.ranks_of(plan, mesh)
        sizes = dict(batch=args.batch, seq=args.seq)
        comparison = layer.compare(
            config, **sizes, dtype=DTYPES[args.dtype], tp=tp, imbalance=args.imbalance, layer=args.layer
        )
    text, values = [str(comparison)], comparison.json()
    fastest = comparison.traces["tpfuse fastest"]
    if args.ms is not None:
        row = fastest.total()
        efficiency = mue(row.least, row.moved, args.ms / 1e3, args.bandwidth * 1e9)
        text.append(f"\nMUE of tpfuse fastest in {args.ms} ms at {args.bandwidth:g} GB/s: {efficiency:.1f} %")
        values["MUE"] = efficiency
    if args.ops:
        rows = [
            (*key, r.calls, quantity(r.read, "B"), quantity(r.written, "B"), quantity(r.flops, "flop"))
            for key, r in fastest.sums("op", "kind", "phase").items()
        ]
        header = "op", "kind", "phase", "calls", "read", "written", "computed"
        text += ["\ntpfuse fastest, op by op:", table(header, rows)]
    cli.present(args, "\n".join(text), values, lambda path: plots.layer_map(comparison, path))


# ---- memory ----


def register_memory(p: CommandParser) -> None:
    p.runs(_run_memory)
    add_model(p)
    _add_step(p)
    cli.add_output(p)


class _Case(NamedTuple):
    """A row of the table of activations; ``recompute`` and ``full`` as :func:`activation_bytes` takes them."""

    name: str
    tp: int
    sequence_parallel: bool
    recompute: str
    full: bool = False
    cp: int = 1

    def plan(self, plan: dryrun.Plan) -> dryrun.Plan:
        """Returns ``plan`` with these choices; without replicas, unless experts are divided among them, and of a plain
        layer, which has no experts, without imbalance."""
        dp = plan.dp if plan.over_replicas else 1
        return plan._replace(
            tp=self.tp, dp=dp, sequence_parallel=self.sequence_parallel, saving=self.recompute, full=self.full,
            cp=self.cp, imbalance=plan.imbalance if self.recompute in SAVING else 1.0,
        )  # fmt: skip


def _cases(plan: dryrun.Plan) -> list[_Case]:
    tp, cp = plan.tp, plan.cp
    pieces = f", CP {cp} ({plan.cp_kind})" if cp > 1 else ""
    plain = [_Case("no parallelism", 1, False, "none"), _Case("full recompute", 1, False, "full")]
    ours: list[_Case] = []
    for sp in (False, True):
        name = f"TP {tp}{' + SP' if sp else ''}"
        plain += [_Case(name, tp, sp, "none"), _Case(f"{name}, selective", tp, sp, "selective")]
        ours += [_Case(f"tpfuse, {name}{pieces}, {saving}", tp, sp, saving, cp=cp) for saving in SAVING]
        ours += [_Case(f"tpfuse, {name}{pieces}, full recompute", tp, sp, SAVING[0], full=True, cp=cp)]
    return plain + ours


def _run_memory(args: Namespace) -> None:
    config = settled_config(args)
    plan = _step_plan(args).settled(config)
    kinds, unit = layers_by_mlp(config).values(), plan.seq * plan.micro_batch * config.hidden_size
    rows, values, bars = [], {}, {}
    for first, case in itertools.product((layers[0] for layers in kinds), _cases(plan)):
        s = Shape.of(config, first)
        if s.experts is not None and case.recompute not in SAVING:
            continue  # a plain layer has one MLP
        name = case.name if len(kinds) == 1 else f"{s.mlp_name}: {case.name}"
        on = case.plan(plan)
        n = dryrun.layer_bytes(config, on, first)
        measured = dryrun.measured_layer(config, on, first) if case.recompute in SAVING else None
        sizes = quantity(n, "B"), s.L, quantity(n * s.L, "B"), quantity(measured, "B") if measured else ""
        rows.append((name, f"{n / unit:.2f}", *sizes))
        bars[name] = {"a layer": n / unit}
        values[name] = dict(a_layer=n, all_layers=n * s.L, measured_a_layer=measured)
    state, numbers = _rank_memory(args, config, plan)
    head = f"saved for backward by one layer on one rank; sbh = {unit:,}, bytes of {args.dtype}"
    saved = table(("", "sbh", "a layer", "layers", "all of them", "measured a layer"), rows)
    cli.present(
        args,
        f"{head}\n{saved}\n\n{state}",
        dict(activations=values) | numbers,
        lambda path: plots.bars(
            bars, path, title=f"{args.model}: {head}", axis="bytes / sbh (sequence x micro-batch x width)"
        ),
    )


def _rank_memory(args: Namespace, config: ModelConfig, plan: dryrun.Plan) -> tuple[str, dict[str, Any]]:
    """Returns a table and plain numbers of what a rank holds, or each rank of a pipeline."""
    if args.pp == 1:
        counted = dryrun.run(config, plan)
        return dryrun.memory_table(counted), dryrun.as_json(plan, counted.held, counted.work)
    ranks = stages.run(config, plan, _pipe(args))
    return stages.memory_table(ranks), dict(ranks=stages.as_json(ranks))


# ---- dryrun ----


def register_dryrun(p: CommandParser) -> None:
    p.runs(_run_dryrun)
    add_model(p)
    _add_step(p)
    add_arch(p)
    cli.add_flag(p, "--sweep", "show how each cost grows with --tps and --ranks, in place of --tp and --dp")
    cli.add_numbers(p, "--tps", cli.positive, "tensor-parallel sizes of --sweep", default="1,2,4,8,16,32,64")
    cli.add_numbers(p, "--ranks", cli.positive, "numbers of ranks of --sweep", default="1,8,64,512,4096")
    cli.add_output(p)


def _run_dryrun(args: Namespace) -> None:
    config = settled_config(args)
    if args.sweep and (args.pp > 1 or args.cp > 1):
        raise ValueError("dryrun: --sweep is of tp and dp alone; leave out --pp and --cp")
    if args.sweep and (args.tp > 1 or args.dp > 1):
        raise ValueError("dryrun: --sweep takes --tps and --ranks in place of --tp and --dp")
    if args.sweep and (args.imbalance > 1 or args.over_replicas):
        raise ValueError("dryrun: --sweep is of even experts over tp; leave out --imbalance and --over-replicas")
    if args.plot and args.pp > 1:
        raise ValueError("dryrun: --plot draws one rank, and --pp asks for several")
    run = _run_sweep if args.sweep else _run_stages if args.pp > 1 else _run_rank
    run(args, config)


def _run_sweep(args: Namespace, config: ModelConfig) -> None:
    with pretending(args.arch):
        points = dryrun.sweep(
            config, plan_of(args, 1, 1, args.micro_batch, optimizer=args.optimizer), args.tps, args.ranks
        )
    undivided = "divides none of the numbers of ranks"
    notes = {tp: f"tp {tp}: {undivided}" for tp in args.tps if all(n % tp for n in args.ranks)}
    if not any(p.held for p in points):
        errors = dict.fromkeys([*(f"tp {p.plan.tp}: {p.error}" for p in points), *notes.values()])
        raise ValueError(f"dryrun: no size of the sweep can be split: {'; '.join(errors)}")
    values = [
        dict(error=p.error, tp=p.plan.tp)
        if p.held is None or p.work is None
        else dryrun.as_json(p.plan, p.held, p.work)
        for p in points
    ]
    values += [dict(error=undivided, tp=tp) for tp in notes]
    text = "\n".join([dryrun.sweep_table(points), *notes.values()])
    cli.present(args, text, values, lambda path: plots.growth(points, path))


def _run_stages(args: Namespace, config: ModelConfig) -> None:
    with pretending(args.arch):
        ranks = stages.run(config, _step_plan(args), _pipe(args))
    cli.print_result(args, stages.report(ranks), dict(config=asdict(config), ranks=stages.as_json(ranks)))


def _run_rank(args: Namespace, config: ModelConfig) -> None:
    with pretending(args.arch):
        r = dryrun.run(config, _step_plan(args))
    bars = {name: state._asdict() | {"activations": r.work.peak} for name, state in r.held.states.items()}
    formulas = {name: dict(counted=n, formula=formula) for name, n, formula, _ in dryrun.against_formulas(r)}
    values = dict(config=asdict(config)) | dryrun.as_json(r.plan, r.held, r.work) | dict(formulas=formulas)
    title = f"{args.model}, {r.plan.axes}: memory of a rank"
    draw = lambda path: plots.bars(bars, path, title=title, axis="at the peak", unit="B")
    cli.present(args, dryrun.report(r), values, draw)
