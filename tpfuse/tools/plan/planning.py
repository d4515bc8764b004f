"""``python -m tpfuse plan``, and the same from Python: the fastest splits of a job over a cluster."""

import gc
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from ...kernels.runtime.errors import check
from .. import html
from ..command import INTERRUPTED, CommandParser, add_count, add_flag, add_html, add_number, bounded
from ..ledger.commands import STEP_SEQ, add_settled_seq, settled_config
from ..ledger.machine import DEFAULT, Machine
from ..ledger.text import quantity
from ..options import DTYPES, add_model, add_optimizer
from .cluster import Cluster, Level, preset, read, this_machine
from .costs import MEMORY_SHARE, cost_model
from .devices import DEVICES, Device
from .explain import explain
from .report import Plans, draw, page_of
from .search import NOTHING_FIXED, Fixed, check_fixed, fits, search
from .spans import SpanCache
from .split import Job, Split

LOCAL = "here"  # the device that is this machine's CPUs
KEEP = 10  # plans
_MOST = 64  # largest multiple of the devices at which a model that fits nowhere is tried


def best_plans(
    job: Job, cluster: Cluster, *, fixed: Fixed = NOTHING_FIXED, keep: int = KEEP, memory_share: float = MEMORY_SHARE
) -> Plans:
    """Returns the ``keep`` fastest plans of a job on a cluster, the fastest at the front.

    ``fixed``: fields of Split that plans must have, such as dict(tp=8).  ``memory_share``: of a device's memory, what a
    plan may fill.

    ValueError for a job that cannot be planned: a dtype without a peak, no split allowed by the model, the batch and
    ``fixed``, or none that fits (then with a number of devices that would do).  After Ctrl-C, the fastest so far; a
    KeyboardInterrupt where there is none.  Call it in a process that is in no process group.
    """
    if isinstance(cluster.device, Device):
        cluster.device.peak_of(job.dtype)
    costs, cache = cost_model(cluster, share=memory_share), SpanCache()
    result = search(job, cluster.devices, costs, fixed=fixed, keep=keep, cache=cache)
    plans = Plans(job, cluster, costs, result, fixed=fixed, cache=cache)
    if not plans.steps:
        if not plans.result.complete:
            raise KeyboardInterrupt
        raise ValueError(_nothing_fits(plans))
    return plans


def _nothing_fits(plans: Plans) -> str:
    """Returns the error for a job that fits nowhere, with a number of devices that would do."""
    job, cluster, costs = plans.job, plans.cluster, plans.costs
    enough = None
    for times in range(2, _MOST + 1):
        devices = times * cluster.devices
        levels = (*cluster.levels, Level(devices, cluster.levels[-1].bandwidth, cluster.levels[-1].latency))
        larger = cost_model(cluster._replace(devices=devices, levels=levels), pieces=costs.pieces)
        try:
            if fits(job, devices, larger._replace(limit=costs.limit), plans.fixed):
                enough = devices
                break
        except ValueError:  # a number of devices that this batch cannot be split over
            continue
    advice = f"; {enough} would do" if enough else f"; nor do up to {_MOST} times as many"
    return (
        f"plan: no split of {cluster.devices} devices holds the model: a rank needs"
        f" {quantity(plans.result.least, 'B')} at least, and may hold {quantity(costs.limit, 'B')}{advice}"
    )


# ---- the command ----

DETAILS = """Searches every dp x cp x tp x pp, schedule, chunks, micro-batch, saving, recompute, FSDP or DDP, and the
ranks that divide experts, for the fastest step that fits into memory, and prints the ten best with where time goes.
Passes are costed op by op from dry runs of the model's own stages, and run by a clock over the schedule's own list of
actions. Such as: plan --model gpt3-175b --devices 512 --device a100-80gb --global-batch 1536 --seq 2048 --explain 1"""
share = bounded(float, lambda x: 0 < x <= 1, "above 0 and at most 1")


def register(p: CommandParser) -> None:
    p.runs(run, DETAILS)
    add_model(p)
    hardware = p.add_argument_group("hardware")
    add_count(hardware, "--devices", "number of devices (default: those of --cluster)")
    hardware.add_argument(
        "--device",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}, or {LOCAL} for these CPUs (default: those of --cluster)",
    )
    hardware.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="TOML file of devices and links, in place of --devices and --device",
    )
    hardware.add_argument(
        "--machine", type=Path, default=DEFAULT, metavar="FILE", help="file that calibrate wrote, of --device here"
    )
    add_number(hardware, "--memory-share", share, "share of a device's memory that may be filled", default=0.9)
    training = p.add_argument_group("training")
    add_count(training, "--global-batch", "sequences in a step, over all ranks", 8)
    add_settled_seq(training, STEP_SEQ)
    training.add_argument(
        "--dtype", choices=DTYPES, help="dtype of weights and activations (default: bf16; of --device here fp32)"
    )
    add_optimizer(training)
    training.add_argument(
        "--fix",
        metavar="FIELD=VALUE,..",
        help="fields that are not searched: dp, cp, cp_kind=heads|keys, tp, pp, schedule, chunks, micro_batch, saving,"
        " full=yes|no, sharded=yes|no, over_replicas=yes|no (experts), layers=3-4-4-3; all of them: cost that plan"
        " (default: search them all)",
    )
    output = p.add_argument_group("output")
    add_count(output, "--explain", "print plan N part by part, and what would change the choice")
    text = "run the fastest plans without FSDP of up to four dp x cp x tp x pp that --fix allows, of --device here"
    add_flag(output, "--check", text)
    output.add_argument("--plot", type=Path, metavar="PNG", help="draw the plans to this file (needs matplotlib)")
    add_html(output, "the plans' parts and passes as a page to this file, whose sliders make passes slower")
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write the plans to this file, for examples/train_gpt.py --plan FILE"
    )


def run(args: Namespace) -> int:
    """Prints, draws, writes, explains and checks plans; returns 130 where Ctrl-C has ended the search, 0 otherwise."""
    check(not args.check or args.device == LOCAL, "plan: --check runs plans on this machine: give --device here")
    check((args.explain or 1) <= KEEP, f"plan: --explain is one of the {KEEP} fastest plans, got {args.explain}")
    config, fixed, cluster = settled_config(args, STEP_SEQ), fixed_of(args.fix), cluster_of(args)
    if args.check:
        from .check import check_possible, checked

        check_possible(fixed, cluster.devices)
    dtype = DTYPES[args.dtype or ("fp32" if cluster.device.name == LOCAL else "bf16")]
    job = Job(config, args.global_batch, args.seq, dtype, optimizer=args.optimizer)
    gc.freeze()  # otherwise each collection visits all objects so far, and a search makes many
    try:
        plans = best_plans(job, cluster, fixed=fixed, memory_share=args.memory_share)
    finally:
        gc.unfreeze()  # what is garbage by now would stay for good
    print(plans.text())
    if args.plot:
        draw(plans, args.plot)
        print(f"\ndrawn to {args.plot}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(plans.json(), indent=1))
        print(f"\nwritten to {args.json}")
    too_large = None
    if args.html:
        try:
            html.write(page_of(plans), args.html)
            print(f"\nwritten to {args.html}")
        except ValueError as error:  # which is raised after everything else
            too_large = error
    if plans.result.complete and args.explain is not None:
        print(f"\n{explain(plans, args.explain)}")
    if plans.result.complete and args.check:
        print(f"\n{checked(plans)}")
    if too_large is not None:
        raise too_large
    return 0 if plans.result.complete else INTERRUPTED


def cluster_of(args: Namespace) -> Cluster:
    if args.cluster is not None:
        check(args.devices is None and args.device is None, "plan: --cluster says the devices; leave out --device(s)")
        return read(args.cluster)
    check(
        args.devices is not None and args.device is not None,
        "plan: say what it runs on: --devices and --device, or --cluster",
    )
    if args.device == LOCAL:
        return this_machine(Machine.load(args.machine), args.devices, DTYPES[args.dtype or "fp32"])
    return preset(args.device, args.devices)


def fixed_of(text: str | None) -> Fixed:
    """Returns the fields of "tp=8,schedule=zbv,full=yes,layers=3-4-4-3"; ValueError for an unknown field or value."""
    fixed = dict[str, object]()
    for field in filter(None, (text or "").split(",")):
        name, equals, value = (x.strip() for x in field.partition("="))
        check(bool(equals), f"plan: --fix is FIELD=VALUE,.., got {field!r}")
        check(name in Split._fields, f"plan: --fix knows {', '.join(Split._fields)}, got {name!r}")
        check(name not in fixed, f"plan: --fix says {name} twice, {text!r}")
        fixed[name] = _value(name, value)
    check_fixed(fixed)
    return fixed


def _value(name: str, value: str) -> Any:
    if name in ("schedule", "saving", "cp_kind"):
        return value
    if name in ("full", "sharded", "over_replicas"):
        return {"yes": True, "no": False, "true": True, "false": False}.get(value.lower(), value)
    try:
        return tuple(int(n) for n in value.split("-")) if name == "layers" else int(value)
    except ValueError:
        rule = "blocks of each stage, such as 3-4-4-3" if name == "layers" else "a positive integer"
        raise ValueError(f"plan: --fix {name} must be {rule}, got {value!r}") from None
