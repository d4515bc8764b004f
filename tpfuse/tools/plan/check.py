"""Plans against real steps on this machine's processes: the best plan and three others."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ...pipeline.placement import Stage
from ...pipeline.scheduled import schedule
from ..ledger import steptime
from ..ledger.dryrun import ranks_of
from ..ledger.layer import build
from ..ledger.processes import on_ranks
from ..ledger.text import duration, progress, table
from .report import Plans
from .search import candidates, search
from .split import Job, Split
from .step import StepEstimate, micro_batches

COUNT = 4


def chosen(plans: Plans) -> list[StepEstimate]:
    """Returns the best plan and three others: of the best of each dp x cp x tp x pp, evenly from the fastest to the
    slowest."""
    job, devices, steps = plans.job, plans.cluster.devices, list[StepEstimate]()
    for dp, cp, tp, pp in dict.fromkeys((s.dp, s.cp, s.tp, s.pp) for s in candidates(job, devices, {})):
        fixed = dict(plans.fixed, dp=dp, cp=cp, tp=tp, pp=pp, sharded=False)
        try:
            steps += search(job, devices, plans.costs, fixed=fixed, keep=1).steps
        except ValueError:  # the model, or the fixed values, do not allow it
            continue
    steps.sort(key=lambda step: step.seconds)
    count = min(COUNT, len(steps))
    return [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]


def checked(plans: Plans) -> str:
    """Runs the chosen plans, and returns a table of predicted and measured seconds with their rank correlation."""
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
    return f"{text}\nrank correlation (Spearman): {correlation([s.seconds for s in steps], measured):.2f}"


def correlation(predicted: list[float], measured: list[float]) -> float:
    """Returns Spearman's rank correlation; ValueError where scipy is missing."""
    try:
        from scipy.stats import spearmanr  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ValueError("plan: --check needs scipy: pip install tpfuse[plan]") from None
    return float(spearmanr(predicted, measured).statistic) if len(predicted) > 1 else float("nan")


def measure(job: Job, splits: list[Split], *, steps: int = 5) -> list[float]:
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
