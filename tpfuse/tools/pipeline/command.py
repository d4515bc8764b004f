"""``python -m tpfuse pipeline``: schedules beside each other."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...pipeline.schedules import EVERY, order
from ...pipeline.simulator import Timeline, simulate
from ..command import CommandParser, add_count, add_number, add_output, present, seconds
from ..ledger.text import table
from . import gantt

_HEADER = "schedule", "stages a rank", "copies of the weights", "seconds", "bubble %", "in flight"


def register(p: CommandParser) -> None:
    p.runs(_run)
    add_count(p, "--stages", "ranks that the layers are spread over", 4)
    add_count(p, "--micro-batches", "micro-batches in a step", 8)
    p.add_argument("--schedule", metavar="NAME,..", help="schedules such as gpipe,1f1b (default: all that fit)")
    add_count(p, "--chunks", "stages on a rank, of interleaved and zero-bubble (default: 2)")
    for name, kind in (("forward", "forward"), ("input", "input-gradient"), ("weight", "weight-gradient")):
        text = f"time of the {kind} pass of all layers of a rank, in seconds"
        add_number(p, f"--{name}", seconds, text, default=1.0)
    add_number(p, "--communication", float, "time from a rank to the next, in seconds", default=0.0)
    add_output(p)


def _run(args: Namespace) -> None:
    compared = compare(args, args.schedule.split(",") if args.schedule else None)
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
    """Runs schedules by the clock; ValueError where one that is named cannot do these numbers."""
    timelines, left_out = {}, {}
    for name in EVERY if schedules is None else schedules:
        try:
            timelines[name] = _timeline(name, args)
        except ValueError as error:
            if schedules is not None:
                raise
            left_out[name] = str(error).removeprefix("pipeline: ")
    return ComparedSchedules(timelines, left_out)


def _timeline(name: str, args: Namespace) -> Timeline:
    open_ = name in EVERY and len(EVERY[name].chunks) > 1
    backward = (args.input + args.weight) / args.forward
    actions = order(name, args.stages, args.micro_batches, chunks=args.chunks if open_ else None, backward=backward)
    F, I, W = (seconds / actions.chunks for seconds in (args.forward, args.input, args.weight))
    return simulate(actions, F, I, W, communication=args.communication)


def _values(name: str, t: Timeline) -> dict[str, Any]:
    return dict(
        stages_a_rank=t.order.chunks,
        copies=t.order.copies,
        seconds=t.seconds,
        bubble=t.bubble,
        in_flight=[n / t.order.chunks for n in t.in_flight],
        actions=[[dict(action=str(e.action), start=e.start, end=e.end) for e in events] for events in t.events],
    )
