"""Why a plan is the best: each part with its numbers, what binds it, the runner-up, what would change the choice."""

from collections.abc import Mapping
from typing import NamedTuple

from ...pipeline.schedules import SCHEDULES
from ..ledger.text import duration, quantity, table
from .report import Planned, words
from .split import PARTS
from .step import DP, OPTIMIZER, PP, Step


class Changed(NamedTuple):
    """The best plan where one thing is different; None: nothing fits."""

    what: str
    best: Step | None


def formulas(planned: Planned, step: Step) -> str:
    """Returns each part of a step as its sum, of the rank that ends last."""
    job, split = planned.job, step.split
    size, m = job.dtype.itemsize, step.micro_batches
    once = {part: step.parts[part] / m for part in PARTS}
    says = {part: f"{m} micro-batches x {duration(seconds)}" for part, seconds in once.items()}
    busy = sum(step.parts[part] for part in PARTS)
    share = 100 * step.parts[PP] / step.seconds
    says[PP] = (
        f"{duration(step.seconds)} by the clock less {duration(step.seconds - step.parts[PP])} at work: {share:.1f} %"
        f" of the step waiting; a message takes {duration(step.hop)}"
        if split.pp > 1
        else "no pipeline"
    )
    gradients = quantity(step.parameters * size, "B")
    how = "FSDP's gathers and scatters" if split.sharded else "all-reduces"
    says[DP] = (
        f"{how} of {gradients} of gradients over {split.dp}, what nothing hides" if split.dp > 1 else "no replicas"
    )
    says[OPTIMIZER] = f"{job.optimizer} over {quantity(step.parameters / (split.dp if split.sharded else 1))} elements"
    rows = [
        (part, duration(step.parts[part]), f"{100 * step.parts[part] / step.seconds:.1f} %", says[part])
        for part in step.parts
    ]
    fullest = max(range(len(step.memory)), key=lambda r: step.memory[r].total)
    memory = step.memory[fullest]
    notes = [
        f"place {step.rank} of {split.pp} ends last; passes of a micro-batch take it {duration(busy / m)}",
        f"place {fullest} holds most: state {quantity(memory.state, 'B')} + activations"
        f" {quantity(memory.activations, 'B')} of {quantity(planned.scale.limit, 'B')}"
        + (", two copies of its stages" if SCHEDULES[split.schedule].chains == 2 else ""),
    ]
    return "\n".join([table(("part", "seconds", "share", "what"), rows), *notes])


def runner_up(planned: Planned, step: Step) -> str:
    """Returns the next plan of another split of the ranks, and where it loses."""
    same = lambda s: (s.split.dp, s.split.tp, s.split.pp) == (step.split.dp, step.split.tp, step.split.pp)
    others = [s for s in planned.found.steps if s is not step]
    other = next((s for s in others if not same(s)), next(iter(others), None))
    if other is None:
        return "no runner-up: no other plan fits"
    loses = {part: other.parts[part] - step.parts[part] for part in step.parts}
    most = max(loses, key=lambda part: loses[part])
    text = f"runner-up: {named(other)}: {duration(other.seconds)}, {100 * (other.seconds / step.seconds - 1):+.1f} %"
    return text + (f", mostly in {most} (+{duration(loses[most])})" if loses[most] > 0 else "")


def binding(step: Step, changed: Mapping[str, Changed]) -> str:
    """Returns what the best plan would be fastest rid of: memory, where twice as much makes another faster; else its
    largest part."""
    free = changed["memory"].best
    if free is not None and free.seconds < 0.999 * step.seconds:
        return f"memory binds: with twice as much {named(free)} takes {duration(free.seconds)}"
    largest = max(step.parts, key=lambda part: step.parts[part])
    share = 100 * step.parts[largest] / step.seconds
    return f"memory does not bind; {largest} does, with {share:.0f} % of the step"


def changes(step: Step, changed: Mapping[str, Changed]) -> str:
    """Returns the best plan under each change, searched again."""
    rows = []
    for what, best in changed.values():
        if best is None:
            rows.append((what, "-", "nothing fits"))
        else:
            stays = best.split._replace(layers=None) == step.split._replace(layers=None)
            rows.append((what, duration(best.seconds), "the same" if stays else named(best)))
    return table(("with", "a step", "best plan"), rows)


def named(step: Step) -> str:
    """Returns a plan in words."""
    split, micro_batch, kept, by, schedule = words(step.split)
    return f"{split}, {schedule}, micro-batch {micro_batch}, {kept}, {by}"
