"""Rank of the plans that Korthikanti et al. 2022 (arXiv:2205.05198) ran among all that the search finds.

    python -m bench.plan.places

The search is over Megatron-LM's own costs (bench/plan/megatron.py, with sequence parallelism) on the papers' devices:
every tp x pp, micro-batch, recomputation, 1F1B or interleaved with any number of chunks that shares the layers evenly;
mixed precision with fp32 states, replicas as DDP has them.  A few of each schedule are ranked, by seconds.
"""

from typing import NamedTuple

import torch

from bench.plan.megatron import MegatronCosts, optimizer
from bench.plan.published import CHUNKS
from tpfuse.tools.ledger.mfu import PUBLISHED, Published
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.costs import cost_model
from tpfuse.tools.plan.search import search
from tpfuse.tools.plan.split import Job, Split
from tpfuse.tools.plan.step import StepEstimate


class Place(NamedTuple):
    """A paper's own plan among ``of`` ranked ones, the fastest being 1."""

    model: str
    place: int
    of: int
    published: StepEstimate
    best: StepEstimate

    @property
    def behind(self) -> float:
        """Seconds of its step beyond the best one's, in %."""
        return 100 * (self.published.seconds / self.best.seconds - 1)


def published_split(p: Published) -> Split:
    """Returns the plan that the paper ran, with selective recomputation."""
    chunks = CHUNKS.get(p.name, 1)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return Split(1, p.tp, p.pp, schedule, chunks, micro_batch=4 if p.name == "22b" else 1, saving="smallest")


def place(p: Published, keep: int = 40) -> Place:
    """Ranks the ``keep`` fastest of both schedules; ValueError where the paper's own is not among them."""
    cluster = preset("a100-80gb", p.devices)
    costs = cost_model(cluster, pieces=MegatronCosts(cluster, sequence_parallel=True, overlapped=True))
    update = lambda job, elements: sum(cluster.device.seconds(e, job.dtype) for e in optimizer(elements))
    costs = costs._replace(update=update)
    job = Job(p.config, p.batch, 2048, torch.float16, optimizer="adamw-fp32")
    steps = [
        step
        for schedule in ("1f1b", "interleaved")
        for step in search(job, p.devices, costs, fixed=dict(schedule=schedule, sharded=False, cp=1), keep=keep).steps
    ]
    ranked = sorted(steps, key=lambda step: step.seconds)
    for i, step in enumerate(ranked):
        if step.split._replace(layers=None) == published_split(p):
            return Place(p.name, i + 1, len(ranked), step, ranked[0])
    raise ValueError(f"{published_split(p)} of {p.name} is not among the {keep} fastest of its schedule")


def line(plan: Place) -> str:
    """Returns a row of the table in the docs."""
    published, best = (_text(step.split) for step in (plan.published, plan.best))
    return f"| {plan.model} | {published} | {plan.place} of {plan.of} | {plan.behind:+.1f} % | {best} |"


def _text(split: Split) -> str:
    chunks = f", {split.chunks} chunks" if split.chunks > 1 else ""
    recompute = "full" if split.full else {"smallest": "selective", "fastest": "none"}[split.saving]
    return f"tp {split.tp}, pp {split.pp}{chunks}, micro-batch {split.micro_batch}, {recompute}"


HEAD = "| model | the paper's plan, recomputation | its place | behind the best | the best |\n|---|---|---|---|---|"


def main() -> None:
    print(HEAD)
    for p in PUBLISHED:
        print(line(place(p)), flush=True)


if __name__ == "__main__":
    main()
