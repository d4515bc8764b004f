"""Where the plans that Korthikanti et al. 2022 (arXiv:2205.05198) ran stand among all that the search finds.

    python -m bench.plan.places

The search is over Megatron-LM's own costs (bench/plan/megatron.py, with sequence parallelism) on the papers' devices:
every tp x pp, micro-batch, recomputation, 1F1B or interleaved with any number of chunks that shares the layers evenly;
mixed precision with fp32 states, replicas as DDP has them.  A few of each schedule are ranked, by seconds.
"""

from typing import NamedTuple

import torch

from bench.plan.megatron import MegatronCosts
from bench.plan.published import CHUNKS
from tpfuse.tools.ledger.mfu import PUBLISHED, Published
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.means import means_of
from tpfuse.tools.plan.search import search
from tpfuse.tools.plan.split import Job, Split
from tpfuse.tools.plan.step import Step


class Place(NamedTuple):
    """A paper's own plan among ``of`` ranked ones, the first being 1."""

    model: str
    place: int
    of: int
    own: Step
    best: Step

    @property
    def behind(self) -> float:
        """How much longer its step takes than the best one's, in %."""
        return 100 * (self.own.seconds / self.best.seconds - 1)


def theirs(p: Published) -> Split:
    """Returns the plan that the paper ran, with selective recomputation."""
    chunks = CHUNKS.get(p.name, 1)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return Split(1, p.tp, p.pp, schedule, chunks, micro_batch=4 if p.name == "22b" else 1, saving="smallest")


def place(p: Published, keep: int = 40) -> Place:
    """Ranks the ``keep`` fastest of both schedules; ValueError where the paper's own is not among them."""
    cluster = preset("a100-80gb", p.devices)
    means = means_of(cluster, costs=MegatronCosts(cluster, sequence_parallel=True))
    job = Job(p.config, p.batch, 2048, torch.float16, optimizer="adamw-fp32")
    found = [
        step
        for schedule in ("1f1b", "interleaved")
        for step in search(job, p.devices, means, fixed=dict(schedule=schedule, sharded=False), keep=keep).steps
    ]
    ranked = sorted(found, key=lambda step: step.seconds)
    for i, step in enumerate(ranked):
        if step.split._replace(layers=None) == theirs(p):
            return Place(p.name, i + 1, len(ranked), step, ranked[0])
    raise ValueError(f"{theirs(p)} of {p.name} is not among the {keep} fastest of its schedule")


def line(found: Place) -> str:
    """Returns a row of the table in the docs."""
    cells = (_words(step.split) for step in (found.own, found.best))
    own, best = cells
    return f"| {found.model} | {own} | {found.place} of {found.of} | {found.behind:+.1f} % | {best} |"


def _words(split: Split) -> str:
    chunks = f", {split.chunks} chunks" if split.chunks > 1 else ""
    kept = "full" if split.full else {"smallest": "selective", "fastest": "none"}[split.saving]
    return f"tp {split.tp}, pp {split.pp}{chunks}, micro-batch {split.micro_batch}, {kept}"


HEAD = "| model | the paper's plan, recomputation | its place | behind the best | the best |\n|---|---|---|---|---|"


def main() -> None:
    print(HEAD)
    for p in PUBLISHED:
        print(line(place(p)), flush=True)


if __name__ == "__main__":
    main()
