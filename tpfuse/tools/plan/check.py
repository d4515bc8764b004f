"""Plans against real steps on this machine's processes: the best plan without FSDP and three others."""

import functools
import importlib.util

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ...kernels.runtime.errors import check
from ...pipeline.placement import Stage
from ...pipeline.scheduled import schedule
from ..ledger import steptime
from ..ledger.dryrun import ranks_of
from ..ledger.layer import build
from ..ledger.processes import check_count, on_ranks
from ..ledger.text import duration, progress, table
from .report import Plans
from .search import Fixed, candidates, search
from .split import Job, Split
from .step import StepEstimate, micro_batches

COUNT, STEPS = 4, 5


def check_possible(fixed: Fixed, ranks: int) -> None:
    """Raises ValueError where no plan of these fields over so many ranks can be run here."""
    sharded = fixed.get("sharded", False)
    check(not sharded, "plan: --check runs plans without FSDP; leave out sharded=yes of --fix")
    check_count("plan --check", ranks)
    check(importlib.util.find_spec("scipy") is not None, "plan: --check needs scipy: pip install tpfuse[plan]")


def chosen(plans: Plans) -> list[StepEstimate]:
    """Returns the best plan without FSDP and three others: of the best of each dp x cp x tp x pp that has the fixed
    fields, evenly from the fastest to the slowest.

    ValueError where there is none.
    """
    job, devices, steps = plans.job, plans.cluster.devices, list[StepEstimate]()
    fixed = {**plans.fixed, "sharded": False}
    for dp, cp, tp, pp in dict.fromkeys((s.dp, s.cp, s.tp, s.pp) for s in candidates(job, devices, fixed)):
        mesh = dict(dp=dp, cp=cp, tp=tp, pp=pp)
        try:
            result = search(job, devices, plans.costs, fixed={**fixed, **mesh}, keep=1, cache=plans.cache)
        except ValueError:  # the model does not allow it
            continue
        if not result.complete:
            raise KeyboardInterrupt
        steps += result.steps
    check(bool(steps), "plan: --check runs plans without FSDP, and no such split holds the model")
    steps.sort(key=lambda step: step.seconds)
    count = min(COUNT, len(steps))
    return [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]


def checked(plans: Plans) -> str:
    """Runs the chosen plans, and returns a table of predicted and measured seconds, of several with their rank
    correlation."""
    steps = chosen(plans)
    measured = measure(plans.job, [step.split for step in steps])
    rows = [
        (
            s.split.mesh,
            s.split.schedule if s.split.pp > 1 else "-",
            s.split.micro_batch,
            duration(s.seconds),
            duration(t),
            f"{100 * (s.seconds / t - 1):+.1f} %",
        )
        for s, t in zip(steps, measured, strict=True)
    ]
    text = table(("split", "schedule", "micro-batch", "predicted", "measured", "error"), rows)
    text = f"a step of the fastest plans of other meshes, without FSDP, median of {STEPS}:\n{text}"
    if len(steps) > 1:
        text += f"\nrank correlation (Spearman): {correlation([s.seconds for s in steps], measured):.2f}"
    return text


def correlation(predicted: list[float], measured: list[float]) -> float:
    """Returns Spearman's rank correlation."""
    from scipy.stats import spearmanr  # type: ignore[import-untyped, unused-ignore]

    return float(spearmanr(predicted, measured).statistic)


def measure(job: Job, splits: list[Split], *, steps: int = STEPS) -> list[float]:
    """Returns the seconds of a step (the median of ``steps``) of each split, one after another on processes of this
    machine of one thread each; all splits have as many ranks."""
    return on_ranks(splits[0].ranks, functools.partial(_measure_all, job, splits, steps))


def _measure_all(job: Job, splits: list[Split], steps: int) -> list[float]:
    whole = lambda split: steptime.train(job.config, split.plan(job), batch=job.batch, steps=steps)
    waiting = progress(splits, "measuring", long=True) if dist.get_rank() == 0 else splits
    return [_train(job, split, steps) if split.pp > 1 else whole(split) for split in waiting]


def _train(job: Job, split: Split, steps: int) -> float:
    sizes = dict(pp=split.pp, dp=split.dp, cp=split.cp, tp=split.tp)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    tp = ranks_of(split.plan(job), mesh, overlap="off")
    stage = Stage(mesh["pp"].get_local_rank(), split.pp, split.schedule, split.chunks, layers=split.layers)
    model = build(
        job.config,
        tp=tp,
        dp=mesh["dp"] if split.dp > 1 else None,
        experts=mesh["dp", "tp"] if split.over_replicas else None,
        saving=split.saving,
        full=split.full,
        dtype=job.dtype,
        device="cpu",
        stage=stage,
    )
    pipeline = schedule(model, mesh["pp"], split.schedule, micro_batches(job, split))
    optimizer = torch.optim.AdamW(model.parameters())
    rows, generator = job.batch // split.dp, torch.Generator().manual_seed(0)
    ids = torch.randint(job.config.vocab_size, (rows, job.seq), generator=generator)

    def step() -> None:
        pipeline.step(ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()

    return steptime.timed(step, steps)
