"""Explanation of a plan: its parts in numbers, what binds it, the runner-up, and what would change the choice."""

from collections.abc import Mapping
from typing import NamedTuple

from ...kernels.runtime.errors import check
from ...parallel import CP_KINDS
from ...pipeline.schedules import EVERY
from ..ledger.dryrun import piece_block
from ..ledger.text import Progress, duration, quantity, table
from .costs import CostModel, cost_model
from .pieces import LedgerCosts
from .report import Plans, cells
from .search import search
from .spans import SpanCache
from .split import PARTS, Job, Split
from .step import DP, OPTIMIZER, PP, StepEstimate


class Scenario(NamedTuple):
    """A change to the cluster or the job ("twice the memory"), and the best plan under it; None: nothing fits."""

    change: str
    best: StepEstimate | None


def explain(plans: Plans, number: int) -> str:
    """Returns the explanation of plan ``number``: its parts, what binds the best, and what would change the choice."""
    check(number <= len(plans.steps), f"plan: --explain is one of the {len(plans.steps)} plans, got {number}")
    step, best = plans.steps[number - 1], plans.steps[0]
    changed = scenarios(plans)
    return "\n\n".join(
        [
            f"plan {number}: {label(step)}",
            formulas(plans, step),
            f"{binding(best, changed)}\n{runner_up(plans, step)}",
            changes(best, changed),
        ]
    )


def scenarios(plans: Plans) -> Mapping[str, Scenario]:
    """Searches again with links, memory and batch of twice and half the size, by the same dry runs."""
    job, cluster, costs, cache = plans.job, plans.cluster, plans.costs, plans.cache
    results, progress = dict[str, Scenario](), Progress(long=True)
    assert isinstance(pieces := costs.pieces, LedgerCosts)
    for word, factor in (("twice", 2.0), ("half", 0.5)):
        levels = tuple(level._replace(bandwidth=factor * level.bandwidth) for level in cluster.levels)
        scaled = cluster._replace(levels=levels)
        links = cost_model(scaled, pieces=pieces.with_cluster(scaled))._replace(limit=costs.limit)
        memory = costs._replace(limit=factor * costs.limit)
        batch = job._replace(batch=max(1, int(factor * job.batch)))
        for key, change, changed in (
            ("links", "the bandwidth of links", (job, links, SpanCache())),
            ("memory", "the memory", (job, memory, cache)),
            ("batch", "the batch", (batch, costs, cache)),
        ):
            progress.update(f"plan: explaining, {len(results) + 1} of 6: {word} {change}")
            results[key if factor > 1 else f"half {key}"] = Scenario(f"{word} {change}", _best(plans, *changed))
    progress.clear()
    if plans.steps[0].split.cp > 1 and "cp" not in plans.fixed:
        results["whole"] = Scenario("whole sequences", _best(plans, job, costs, cache, cp=1))
    return results


def _best(plans: Plans, job: Job, costs: CostModel, cache: SpanCache, **fixed: int) -> StepEstimate | None:
    try:
        result = search(job, plans.cluster.devices, costs, fixed={**plans.fixed, **fixed}, keep=1, cache=cache)
    except ValueError:  # a batch that the devices cannot share
        return None
    if not result.complete:  # its best so far would be no answer
        raise KeyboardInterrupt
    return next(iter(result.steps), None)


def formulas(plans: Plans, step: StepEstimate) -> str:
    """Returns a table of how each part of a step adds up, on the rank that ends last, and notes on memory."""
    job, split = plans.job, step.split
    size, m = job.dtype.itemsize, step.micro_batches
    formula = {part: f"{m} micro-batches x {duration(step.parts[part] / m)}" for part in PARTS}
    busy = sum(step.parts[part] for part in PARTS)
    share = 100 * step.parts[PP] / step.seconds
    formula[PP] = (
        f"{duration(step.seconds)} by the clock less {duration(step.seconds - step.parts[PP])} at work: {share:.1f} %"
        f" of the step waiting; a message takes {duration(step.hop)}"
        if split.pp > 1
        else "no pipeline"
    )
    gradients = quantity((step.parameters - step.experts) * size, "B")
    collectives = "FSDP's gathers and scatters" if split.sharded else "all-reduces"
    replicas = split.shards if split.sharded else split.dp
    formula[DP] = (
        f"{collectives} of {gradients} of gradients over {replicas}, the part that nothing hides"
        if replicas > 1
        else "no replicas"
    )
    formula[OPTIMIZER] = f"{job.optimizer} over {quantity(step.updated)} elements"
    rows = [
        (part, duration(step.parts[part]), f"{100 * step.parts[part] / step.seconds:.1f} %", formula[part])
        for part in step.parts
    ]
    fullest = max(range(len(step.memory)), key=lambda r: step.memory[r].total)
    memory = step.memory[fullest]
    notes = [
        f"pipeline rank {step.rank} of {split.pp} ends last; its passes of a micro-batch take {duration(busy / m)}",
        f"pipeline rank {fullest} holds most: state {quantity(memory.state, 'B')} + activations"
        f" {quantity(memory.activations, 'B')} of {quantity(plans.costs.limit, 'B')}"
        + (", two copies of its stages" if EVERY[split.schedule].chains == 2 else ""),
    ]
    return "\n".join([table(("part", "seconds", "share", "formula"), rows), *notes, *exchanged(job, split)])


def exchanged(job: Job, split: Split) -> list[str]:
    """Returns what each rank has of a sequence, what attention exchanges, and what it would by the other kind."""
    if split.cp == 1:
        return []
    plan, sent = split.plan(job), list[str]()
    for kind in CP_KINDS[1:]:
        exchange = piece_block(job.config, plan._replace(cp_kind=kind)).attention
        cannot = kind == "heads" and not exchange.split.divides
        sent.append(f"{kind}: {'they cannot be divided' if cannot else quantity(sum(exchange.wire), 'B')}")
    return [
        f"each of {split.cp} ranks has {plan.piece:,} of {job.seq:,} positions; attention exchanges {split.cp_kind};"
        f" sent by a layer, forward and backward, with {', with '.join(sent)}"
    ]


def runner_up(plans: Plans, step: StepEstimate) -> str:
    """Returns the next plan, preferably of another mesh, and the part in which it loses most."""
    slower = [s for s in plans.steps if s is not step]
    second = next((s for s in slower if s.split.mesh != step.split.mesh), next(iter(slower), None))
    if second is None:
        return "no runner-up: no other plan fits"
    losses = {part: second.parts[part] - step.parts[part] for part in step.parts}
    worst = max(losses, key=lambda part: losses[part])
    percent = 100 * (second.seconds / step.seconds - 1)
    text = f"runner-up: {label(second)}: {duration(second.seconds)}, {percent:+.1f} %"
    return text + (f", mostly in {worst} (+{duration(losses[worst])})" if losses[worst] > 0 else "")


def binding(step: StepEstimate, scenarios: Mapping[str, Scenario]) -> str:
    """Returns what binds the best plan: memory, where twice as much makes another plan faster; else its largest
    part."""
    unbound = scenarios["memory"].best
    if unbound is not None and unbound.seconds < 0.999 * step.seconds:
        return f"memory binds: with twice as much {label(unbound)} takes {duration(unbound.seconds)}"
    largest = max(step.parts, key=lambda part: step.parts[part])
    share = 100 * step.parts[largest] / step.seconds
    return f"memory does not bind; {largest} does, with {share:.0f} % of the step"


def changes(step: StepEstimate, scenarios: Mapping[str, Scenario]) -> str:
    """Returns a table of the best plan in each scenario."""
    rows = []
    for change, best in scenarios.values():
        if best is None:
            rows.append((change, "-", "nothing fits"))
        else:
            same = best.split._replace(layers=None) == step.split._replace(layers=None)
            rows.append((change, duration(best.seconds), "the same" if same else label(best)))
    return table(("with", "a step", "best plan"), rows)


def label(step: StepEstimate) -> str:
    mesh, micro_batch, saving, replicas, schedule = cells(step.split)
    return f"{mesh}, {schedule}, micro-batch {micro_batch}, {saving}, {replicas}"
