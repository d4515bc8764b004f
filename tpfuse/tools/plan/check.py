"""Plans against real steps on this machine's processes: the best, and three others."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ...parallel import TensorParallel
from ...pipeline.placement import Stage
from ...pipeline.step import schedule
from ..ledger import steptime
from ..ledger.dryrun import Plan
from ..ledger.layer import build
from ..ledger.processes import on_ranks
from ..ledger.text import duration, progress, table
from .report import Planned
from .search import search
from .split import Job, Split
from .step import Means, Step, micro_batches

COUNT = 4


def chosen(plans: Planned, means: Means) -> list[Step]:
    """Returns the best plan and three others: of every dp x tp x pp its best, evenly from the fastest to the
    slowest."""
    job, devices, found = plans.job, plans.scale.devices, []
    for pp in range(1, devices + 1):
        for tp in range(1, devices // pp + 1):
            if devices % (tp * pp) == 0:
                fixed = dict(plans.fixed, dp=devices // tp // pp, tp=tp, pp=pp, sharded=False)
                try:
                    found += search(job, devices, means, fixed=fixed, keep=1).steps
                except ValueError:  # which the model, or the batch, does not allow
                    continue
    found.sort(key=lambda step: step.seconds)
    count = min(COUNT, len(found))
    return [found[round(i * (len(found) - 1) / max(1, count - 1))] for i in range(count)]


def checked(plans: Planned, means: Means) -> str:
    """Runs them, and returns predicted and measured seconds, and whether their order is right."""
    steps = chosen(plans, means)
    took = measure(plans.job, [step.split for step in steps])
    rows = [
        (
            f"dp {s.split.dp} x tp {s.split.tp} x pp {s.split.pp}",
            s.split.schedule if s.split.pp > 1 else "-",
            s.split.micro_batch,
            duration(s.seconds),
            duration(t),
            f"{100 * (s.seconds / t - 1):+.1f} %",
        )
        for s, t in zip(steps, took, strict=True)
    ]
    text = table(("split", "schedule", "micro-batch", "predicted", "measured", "error"), rows)
    return f"{text}\nrank correlation (Spearman): {correlation([s.seconds for s in steps], took):.2f}"


def correlation(predicted: list[float], measured: list[float]) -> float:
    """Returns Spearman's rank correlation; ValueError where scipy is missing."""
    try:
        from scipy.stats import spearmanr  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ValueError("plan: --check needs scipy: pip install tpfuse[plan]") from None
    return float(spearmanr(predicted, measured).statistic) if len(predicted) > 1 else float("nan")


def measure(job: Job, splits: list[Split], *, steps: int = 5) -> list[float]:
    """Returns the seconds of a step, the median of ``steps``, of splits over as many ranks each, one after another on
    processes of this machine of one thread each."""
    return on_ranks(splits[0].ranks, functools.partial(_each, job, splits, steps))


def _each(job: Job, splits: list[Split], steps: int) -> list[float]:
    shown = progress(splits, "measuring", long=True) if dist.get_rank() == 0 else splits
    return [_measure(job, split, steps) for split in shown]


def _measure(job: Job, split: Split, steps: int) -> float:
    if split.pp > 1:
        return _train(job, split, steps)
    how: dict[str, Any] = dict(saving=split.saving, full=split.full, dtype=job.dtype)
    plan = Plan(split.tp, split.dp, job.seq, split.micro_batch, **how)
    return steptime.train(job.config, plan, batch=job.batch, steps=steps)


def _train(job: Job, split: Split, steps: int) -> float:
    mesh = init_device_mesh("cpu", (split.pp, split.dp, split.tp), mesh_dim_names=("pp", "dp", "tp"))
    tp = TensorParallel(mesh["tp"], sequence_parallel=True, overlap="off")
    stage = Stage(mesh["pp"].get_local_rank(), split.pp, split.schedule, split.chunks, layers=split.layers)
    how: dict[str, Any] = dict(saving=split.saving, full=split.full, dtype=job.dtype, device="cpu")
    model = build(job.config, tp=tp, dp=mesh["dp"] if split.dp > 1 else None, stage=stage, **how)
    pipeline = schedule(model, mesh["pp"], split.schedule, micro_batches(job, split))
    optimizer = torch.optim.AdamW(model.parameters())
    rows, generator = job.batch // split.dp, torch.Generator().manual_seed(0)
    ids = torch.randint(job.config.vocab_size, (rows, job.seq), generator=generator)

    def step() -> None:
        pipeline.step(ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()

    return steptime.timed(step, steps)
