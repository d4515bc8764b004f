"""``python -m tpfuse pipeline``: schedules beside each other."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ...kernels.runtime.errors import check
from ...pipeline.schedules import EVERY, Order, order
from ...pipeline.simulator import Timeline, simulate
from .. import html
from ..command import CommandParser, add_count, add_html, add_number, add_output, bounded, present, seconds
from ..ledger.text import progress, table
from . import gantt, page

_ROOM = 1500  # micro-batches of all ranks, over all numbers of them that a page offers
_MOST = 1 << 15  # micro-batches of all ranks
_HEADER = "schedule", "stages a rank", "copies of the weights", "seconds", "bubble %", "in flight"

ranks = bounded(int, lambda n: 1 <= n <= 1024, "an integer from 1 to 1024")
delay = bounded(float, lambda s: 0 <= s <= 1e9, "a number of seconds, 0 to 1e9")


def register(p: CommandParser) -> None:
    p.runs(_run)
    p.add_argument("--stages", type=ranks, default=4, metavar="N", help="ranks that the layers are spread over")
    add_count(p, "--micro-batches", "micro-batches in a step", 8)
    p.add_argument("--schedule", metavar="NAME,..", help="schedules such as gpipe,1f1b (default: all that fit)")
    add_count(p, "--chunks", "stages on a rank, of interleaved and zero-bubble (default: 2)")
    for name, kind in (("forward", "forward"), ("input", "input-gradient"), ("weight", "weight-gradient")):
        text = f"time of the {kind} pass of all layers of a rank, in seconds"
        add_number(p, f"--{name}", seconds, text, default=1.0)
    add_number(p, "--communication", delay, "time from a rank to the next, in seconds", default=0.0)
    add_html(p, "a page too, whose sliders make passes and messages slower, and choose among micro-batches")
    add_output(p)


def _run(args: Namespace) -> None:
    compared = compare(args, args.schedule.split(",") if args.schedule else None)
    if args.html:
        html.write(page_of(args, compared), args.html)
    present(args, compared.text(), compared.json(), lambda path: gantt.draw(compared.timelines, path))


class ComparedSchedules(NamedTuple):
    """Timelines by schedule, and of the schedules that cannot do these numbers, why."""

    timelines: Mapping[str, Timeline]
    left_out: Mapping[str, str]

    def text(self) -> str:
        rows = [
            (
                name,
                t.order.chunks,
                t.order.copies,
                f"{t.seconds:.4g}",
                f"{100 * t.bubble:.1f}",
                f"{max(t.in_flight) / t.order.chunks:.3g}",
            )
            for name, t in self.timelines.items()
        ]
        notes = [f"left out: {why}" for why in self.left_out.values()]
        note = "in flight: the most micro-batches whose activations a rank keeps, of all its layers"
        return "\n".join((table(_HEADER, rows), note, *notes))

    def json(self) -> dict[str, Any]:
        return {name: _values(name, t) for name, t in self.timelines.items()} | {"left_out": dict(self.left_out)}


def compare(args: Namespace, schedules: Sequence[str] | None) -> ComparedSchedules:
    """Runs schedules by the clock; ValueError where one that is named cannot do these numbers, and for too many."""
    check(
        args.stages * args.micro_batches <= _MOST,
        f"pipeline: --stages times --micro-batches must be at most {_MOST:,}, got {args.stages} x {args.micro_batches}",
    )
    timelines, left_out = {}, {}
    for name in progress(list(EVERY) if schedules is None else schedules, "pipeline: schedule"):
        try:
            timelines[name] = _timeline(name, args)
        except ValueError as error:
            if schedules is not None:
                raise
            left_out[name] = str(error).removeprefix("pipeline: ")
    return ComparedSchedules(timelines, left_out)


def _timeline(name: str, args: Namespace) -> Timeline:
    actions = _order(name, args, args.micro_batches)
    return simulate(actions, *_passes(args, actions), communication=args.communication)


def _order(name: str, args: Namespace, micro_batches: int) -> Order:
    open_ = name in EVERY and len(EVERY[name].chunks) > 1
    backward = (args.input + args.weight) / args.forward
    return order(name, args.stages, micro_batches, chunks=args.chunks if open_ else None, backward=backward)


def _passes(args: Namespace, actions: Order) -> tuple[float, float, float]:
    """Returns the seconds of a stage's F, I and W."""
    forward, input_, weight = (seconds / actions.chunks for seconds in (args.forward, args.input, args.weight))
    return forward, input_, weight


def page_of(args: Namespace, compared: ComparedSchedules) -> str:
    """Returns the schedules as a page, at several numbers of micro-batches."""
    counts = [args.micro_batches]
    for count in (times * args.stages for times in (1, 2, 4, 8)):
        if count not in counts and args.stages * (sum(counts) + count) <= _ROOM:
            counts.append(count)
    messages = sorted({args.communication, *(args.forward * share for share in (0, 1 / 8, 1 / 4, 1 / 2, 1))})
    cases = []
    for name, timeline in compared.timelines.items():
        orders = {args.micro_batches: timeline.order}
        for count in counts:
            with suppress(ValueError):  # a schedule that cannot run so many
                orders[count] = _order(name, args, count)
        stages = timeline.order.stages
        seconds = {kind: [s] * stages for kind, s in zip(page.PASSES, _passes(args, timeline.order), strict=True)}
        cases.append(page.Case(name, orders, seconds, messages))
    about = (
        f"{args.stages} ranks, each schedule's own actions run by a clock. Chimera's order is the one chosen for passes"
        f" of {args.forward:g}, {args.input:g} and {args.weight:g} s."
    )
    names, message = [case.name for case in cases], messages.index(args.communication)
    opening = page.Opening("Pipeline schedules", about, args.micro_batches, message=message, selected=names)
    return page.render(cases, opening, "pipeline", advice="; choose fewer schedules with --schedule")


def _values(name: str, t: Timeline) -> dict[str, Any]:
    return dict(
        stages_a_rank=t.order.chunks,
        copies=t.order.copies,
        seconds=t.seconds,
        bubble=t.bubble,
        in_flight=[n / t.order.chunks for n in t.in_flight],
        actions=[[dict(action=str(e.action), start=e.start, end=e.end) for e in events] for events in t.events],
    )
