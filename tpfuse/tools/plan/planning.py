"""``python -m tpfuse plan``: the fastest splits of a model over a cluster, why, and whether they run so."""

import gc
import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...kernels.runtime.errors import check
from ...pipeline.simulator import Timeline
from ..command import DTYPES, Commands, add_model, add_optimizer, add_seq, bounded, positive
from ..ledger.machine import DEFAULT, Machine
from ..ledger.presets import load_config
from ..ledger.text import Progress, quantity
from .cluster import Cluster, Level, preset, read, this_machine
from .devices import Device
from .explain import Changed, binding, changes, formulas, named, runner_up
from .known import Known
from .means import means_of
from .pieces import LedgerCosts
from .report import Planned, Scale, draw
from .search import Fixed, check_fixed, fits, search
from .split import Job, Split
from .step import Load, Means, Step

HERE = "here"
_MOST = 64  # times the devices at which a model that fits nowhere is tried


class Nothing(NamedTuple):
    """A search that found nothing: the fewest bytes of a fullest rank, and the fields that were given."""

    least: float
    fixed: Fixed


class Searched(NamedTuple):
    """Plans, and what they were searched with."""

    plans: Planned
    means: Means
    cluster: Cluster
    known: Known


def planned(args: Namespace) -> Searched:
    """Searches what the options ask for.  ValueError of one line for what cannot be planned."""
    config, fixed = load_config(args.model), fixed_of(args.fix)
    cluster = cluster_of(args)
    dtype = DTYPES[args.dtype or ("fp32" if cluster.device.name == HERE else "bf16")]
    job = Job(config, args.global_batch, args.seq, dtype, optimizer=args.optimizer)
    means = means_of(cluster, share=args.memory_share)
    gc.freeze()  # what stands by now is looked through at every collection otherwise, and orders are many objects
    known = Known()
    found = search(job, cluster.devices, means, fixed=fixed, known=known)
    if not found.steps:
        check(found.complete, "plan: interrupted before the first plan")
        raise ValueError(_nowhere(job, cluster, means, Nothing(found.least, fixed)))
    device = cluster.device
    peak = device.peak.get(str(dtype).removeprefix("torch.")) if isinstance(device, Device) else None
    plans = Planned(job, Scale(cluster.devices, peak, means.limit), found, fixed)
    return Searched(plans, means, cluster, known)


def cluster_of(args: Namespace) -> Cluster:
    """Returns the cluster of --cluster, or of --device and --devices."""
    if args.cluster is not None:
        check(args.devices is None and args.device is None, "plan: --cluster says the devices; leave out --device(s)")
        return read(args.cluster)
    check(
        args.devices is not None and args.device is not None,
        "plan: say what it runs on: --devices and --device, or --cluster",
    )
    if args.device == HERE:
        return this_machine(Machine.load(args.machine), args.devices, DTYPES[args.dtype or "fp32"])
    return preset(args.device, args.devices)


def fixed_of(text: str | None) -> dict[str, Any]:
    """Returns the fields of "tp=8,schedule=zbv,full=yes,layers=3-4-4-3"; ValueError for one that is none."""
    fixed: dict[str, Any] = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, value = (x.strip() for x in part.partition("="))
        check(bool(equals), f"plan: --fix is FIELD=VALUE,.., got {part!r}")
        check(name in Split._fields, f"plan: --fix knows {', '.join(Split._fields)}, got {name!r}")
        fixed[name] = _value(name, value)
    check_fixed(fixed)
    return fixed


def _value(name: str, value: str) -> Any:
    if name in ("schedule", "saving"):
        return value
    if name in ("full", "sharded"):
        return {"yes": True, "no": False, "true": True, "false": False}.get(value.lower(), value)
    try:
        return tuple(int(n) for n in value.split("-")) if name == "layers" else int(value)
    except ValueError:
        raise ValueError(f"plan: --fix {name} must be a positive integer, got {value!r}") from None


def _nowhere(job: Job, cluster: Cluster, means: Means, nothing: Nothing) -> str:
    """Returns why nothing fits, and how many devices would do."""
    enough = None
    for times in range(2, _MOST + 1):
        devices = times * cluster.devices
        levels = (*cluster.levels, Level(devices, cluster.levels[-1].bandwidth, cluster.levels[-1].latency))
        wider = means_of(cluster._replace(devices=devices, levels=levels), costs=means.costs)
        try:
            if fits(job, devices, wider._replace(limit=means.limit), nothing.fixed):
                enough = devices
                break
        except ValueError:  # a number of devices that this batch cannot be split over
            continue
    advice = f"; {enough} would do" if enough else f"; nor do up to {_MOST} times as many"
    return (
        f"plan: no split of {cluster.devices} devices holds the model: a rank needs {quantity(nothing.least, 'B')} at"
        f" least, and may hold {quantity(means.limit, 'B')}{advice}"
    )


# ---- the command ----

DETAILS = """Searches every dp x tp x pp, schedule, chunks, micro-batch, saving, recompute, and FSDP or DDP for the
fastest step that fits into memory, and prints the ten best with where their time goes. Passes are costed op by op from
dry runs of the model's own stages, and run by a clock over the schedule's own list of actions. Such as: plan --model
gpt3-175b --devices 512 --device a100-80gb --global-batch 1536 --seq 2048 --explain 1"""
share = bounded(float, lambda x: 0 < x <= 1, "above 0 and at most 1")


def register(commands: Commands) -> None:
    """Adds the command ``plan``."""
    p = commands.add("plan", "the fastest splits of a model's training over devices, and why", run, DETAILS)
    add_model(p)
    hardware = p.add_argument_group("hardware")
    hardware.add_argument(
        "--devices", type=positive, metavar="N", help="number of devices (default: those of --cluster)"
    )
    hardware.add_argument(
        "--device",
        metavar="NAME",
        help="v100, a100-80gb, h100, h200, mi300x, or here for these CPUs (default: those of --cluster)",
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
    hardware.add_argument(
        "--memory-share", type=share, default=0.9, metavar="X", help="share of a device's memory that may be filled"
    )
    training = p.add_argument_group("training")
    training.add_argument(
        "--global-batch", type=positive, default=8, metavar="N", help="sequences in a step, over all ranks"
    )
    add_seq(training, 256)
    training.add_argument(
        "--dtype", choices=DTYPES, help="dtype of weights and activations (default: bf16; of --device here fp32)"
    )
    add_optimizer(training)
    training.add_argument(
        "--fix",
        metavar="FIELD=VALUE,..",
        help="fields that are not searched: dp, tp, pp, schedule, chunks, micro_batch, saving, full=yes|no,"
        " sharded=yes|no, layers=3-4-4-3; all of them: cost that plan (default: search them all)",
    )
    output = p.add_argument_group("output")
    output.add_argument(
        "--explain", type=positive, metavar="N", help="print plan N part by part, and what would change the choice"
    )
    output.add_argument("--check", action="store_true", help="run the best plan and three others, of --device here")
    output.add_argument("--plot", type=Path, metavar="PNG", help="draw the plans to this file (needs matplotlib)")
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write the plans to this file, for examples/train_gpt.py --plan FILE"
    )


def run(args: Namespace) -> None:
    """Prints, draws, writes and checks plans."""
    check(not args.check or args.device == HERE, "plan: --check runs plans on this machine: give --device here")
    searched = planned(args)
    plans = searched.plans
    print(plans.text())
    if args.explain is not None:
        print(f"\n{explained(searched, args.explain)}")
    if args.plot:
        draw(plans, args.plot, best_timeline(searched))
        print(f"\ndrawn to {args.plot}")
    if args.json:
        write(plans, args.json)
        print(f"\nwritten to {args.json}")
    if args.check:
        from .check import checked

        print(f"\n{checked(plans, searched.means)}")


def best_timeline(searched: Searched) -> Timeline | None:
    """Returns when the passes of the best plan run; None where it is no pipeline."""
    job, best = searched.plans.job, searched.plans.found.steps[0].split
    if best.pp == 1:
        return None
    spans = searched.known.spans(job, best, searched.means.costs)
    return Load(job, best, searched.means, spans).timeline()


def write(plans: Planned, path: Path) -> None:
    """Writes the plans' numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plans.json(), indent=1))


def explained(searched: Searched, number: int) -> str:
    """Returns why plan ``number`` takes what it takes, and what would change the choice."""
    plans, steps = searched.plans, searched.plans.found.steps
    check(number <= len(steps), f"plan: --explain is one of the {len(steps)} plans, got {number}")
    step, best = steps[number - 1], steps[0]
    changed = other_worlds(searched)
    return "\n\n".join(
        [
            f"plan {number}: {named(step)}",
            formulas(plans, step),
            f"{binding(best, changed)}\n{runner_up(plans, step)}",
            changes(best, changed),
        ]
    )


def other_worlds(searched: Searched) -> Mapping[str, Changed]:
    """Searches again with links, memory and batch of twice and half the size, by the same dry runs."""
    (plans, means, cluster, known), found = searched, dict[str, Changed]()
    job, shown = plans.job, Progress(long=True)
    assert isinstance(same := means.costs, LedgerCosts)
    for word, factor in (("twice", 2.0), ("half", 0.5)):
        levels = tuple(level._replace(bandwidth=factor * level.bandwidth) for level in cluster.levels)
        wider = cluster._replace(levels=levels)
        links = means_of(wider, costs=same.on(wider))._replace(limit=means.limit)
        room = means._replace(limit=factor * means.limit)
        batch = job._replace(batch=max(1, int(factor * job.batch)))
        for key, what, world in (
            ("links", "the bandwidth of links", (job, links, Known())),
            ("memory", "the memory", (job, room, known)),
            ("batch", "the batch", (batch, means, known)),
        ):
            shown.show(f"plan: explaining, {len(found) + 1} of 6: {word} {what}")
            found[key if factor > 1 else f"half {key}"] = Changed(f"{word} {what}", _best(plans, *world))
    shown.done()
    return found


def _best(plans: Planned, job: Job, means: Means, known: Known) -> Step | None:
    try:
        found = search(job, plans.scale.devices, means, fixed=plans.fixed, keep=1, known=known)
    except ValueError:  # a batch that the devices cannot share
        return None
    return next(iter(found.steps), None)
