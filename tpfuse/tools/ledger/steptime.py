"""Predicted time of a training step: every op and collective of the dry run, at this machine's calibrated speed.

A step is k micro-batches forward and backward, DDP's all-reduce of the gradients and AdamW.  Nothing is taken to
overlap: on CPUs gloo and GEMMs want the same cores.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ...models.config.model import ModelConfig
from ...sequence_parallel.assumed import assumed_imbalance
from ...training.data_parallel import data_parallel
from .aten import COMMUNICATION, KINDS
from .dryrun import Plan, axis_of, fake_world, held_by, planned_model, ranks_of
from .layer import build, token_ids
from .machine import Machine, key
from .processes import check_count, on_ranks
from .recorder import Entry, Ledger
from .text import duration, progress, table


class Prediction(NamedTuple):
    """Seconds of a step, and where they go: a kind of op, "optimizer", "dp" or "overhead" -> seconds."""

    plan: Plan
    batch: int
    seconds: float
    parts: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.batch * self.plan.seq / self.seconds


def micro_batches(plan: Plan, batch: int) -> int:
    """Returns how many micro-batches a replica runs; ValueError where the batch is not divisible."""
    if batch % (plan.dp * plan.micro_batch):
        raise ValueError(f"predict: batch={batch} is not divisible by dp {plan.dp} x micro_batch {plan.micro_batch}")
    return batch // (plan.dp * plan.micro_batch)


def predict(config: ModelConfig, plan: Plan, machine: Machine, *, batch: int) -> Prediction:
    """Returns the time of a step over ``batch`` sequences.

    ValueError for sizes that cannot be split, or a dtype that the machine was not calibrated for.
    """
    k = micro_batches(plan, batch)
    speeds, shared = machine.table(plan.dtype, plan.ranks)
    with fake_world(plan.tp, plan.dp, cp=plan.cp) as mesh:
        model = planned_model(config, plan, mesh)
        buckets, sent = held_by(model, plan).reduced
        optimizer = torch.optim.AdamW(model.parameters())
        ids = token_ids(plan.micro_batch, plan.seq)
        with Ledger() as micro, assumed_imbalance(plan.imbalance):
            model(ids, labels=ids).loss.backward()
        with Ledger() as update:
            optimizer.step()

    def seconds(e: Entry) -> float:
        communication = e.kind == COMMUNICATION
        ranks = e.ranks or (plan.cp if axis_of(e.group, model.tp) == "cp" else plan.tp)
        line = speeds.message(e.op, ranks) if communication else speeds.ops.get(key(e)) or speeds.ops.get(e.kind)
        if line is None:
            raise ValueError(
                f"machine: {e.op} over {ranks} ranks was not calibrated; run python -m tpfuse calibrate --ranks {ranks}"
            )
        return line.seconds(e.flops, e.wire if communication else e.moved, e.scores)

    parts = {kind: k * sum(seconds(e) for e in micro.entries if e.kind == kind) for kind in KINDS}
    parts["optimizer"] = sum(map(seconds, update.entries))
    parts["overhead"] = speeds.overhead * (k * len(micro.entries) + len(update.entries))
    if plan.dp > 1:
        line = speeds.message("all_reduce", plan.ranks)
        if line is None:
            raise ValueError(f"machine: all_reduce over {plan.ranks} ranks was not calibrated")
        parts["dp"] = buckets * line.alpha + sent * line.per_byte
    parts = {name: shared * value for name, value in parts.items() if value}
    return Prediction(plan, batch, sum(parts.values()), parts)


# ---- against real steps ----


def measure(config: ModelConfig, plan: Plan, *, batch: int, steps: int = 8) -> float:
    """Returns the seconds of a step, the median of ``steps``, on as many processes of this machine as the plan has
    ranks.

    Each has one thread, and overlap is off, as predicted.
    """
    micro_batches(plan, batch)
    return on_ranks(plan.ranks, functools.partial(train, config, plan, batch=batch, steps=steps))


def train(config: ModelConfig, plan: Plan, *, batch: int, steps: int) -> float:
    """Returns the seconds of a step on the processes of this world; each rank calls it."""
    mesh = init_device_mesh("cpu", (plan.dp, plan.cp, plan.tp), mesh_dim_names=("dp", "cp", "tp"))
    tp = ranks_of(plan, mesh, overlap="off")
    experts = mesh["dp", "tp"] if plan.over_replicas else None
    model = build(
        config, tp=tp, dp=mesh["dp"], experts=experts, saving=plan.saving, full=plan.full, dtype=plan.dtype,
        device="cpu",
    )  # fmt: skip
    replica: Any = model
    if plan.dp > 1 and plan.over_replicas:  # which leaves experts out
        replica = data_parallel(model, mesh["dp"])
    elif plan.dp > 1:
        replica = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(config.vocab_size, (plan.micro_batch, plan.seq), generator=torch.Generator().manual_seed(0))
    k = micro_batches(plan, batch)

    def step() -> None:
        for i in range(k):
            if plan.dp > 1:
                replica.require_backward_grad_sync = i == k - 1
            replica(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, steps)


def timed(step: Callable[[], None], steps: int) -> float:
    """Returns the seconds of a step on the slowest rank, the median of ``steps`` after two; each rank calls it."""
    times = []
    for _ in range(steps + 2):
        dist.barrier()
        start = time.perf_counter()
        step()
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(float(slowest))
    return statistics.median(times[2:])


class Checked(NamedTuple):
    """A prediction beside the measured seconds, where there are some."""

    prediction: Prediction
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """The error of the prediction, in %."""
        return None if self.measured is None else 100 * (self.prediction.seconds / self.measured - 1)


def check(config: ModelConfig, plans: list[Plan], machine: Machine, *, batch: int, steps: int = 8) -> list[Checked]:
    """Predicts the steps and then measures them; ValueError at once for more ranks than may be measured."""
    check_count("predict", max(plan.ranks for plan in plans))
    predicted = [predict(config, plan, machine, batch=batch) for plan in plans]
    return [
        Checked(p, measure(config, p.plan, batch=batch, steps=steps))
        for p in progress(predicted, "measuring", long=True)
    ]


def ranking_is_right(checked: list[Checked]) -> bool:
    """Returns True where the choices are predicted in their measured order."""
    ranking = lambda seconds: [c.prediction.plan for c in sorted(checked, key=seconds)]
    return ranking(lambda c: c.prediction.seconds) == ranking(lambda c: c.measured)


def report(checked: list[Checked]) -> str:
    names = [n for n in (*KINDS, "optimizer", "dp", "overhead") if any(n in c.prediction.parts for c in checked)]
    errors = [c.error for c in checked if c.error is not None]
    header = ["tp", "cp", "dp", "micro-batch", "a step", "tokens/s", *(["measured", "error"] if errors else []), *names]
    rows: list[list[object]] = []
    for c in checked:
        p = c.prediction
        sizes = p.plan.tp, p.plan.cp, p.plan.dp, p.plan.micro_batch
        row: list[object] = [*sizes, duration(p.seconds), f"{p.tokens_per_s:,.0f}"]
        if c.measured is not None:
            row += [duration(c.measured), f"{c.error:+.1f} %"]
        rows.append([*row, *(duration(p.parts[n]) if n in p.parts else "-" for n in names)])
    text = table(header, rows)
    if errors:
        ranking = "right" if ranking_is_right(checked) else "wrong"
        text += f"\nlargest error {max(map(abs, errors)):.1f} %; ranking of the choices {ranking}"
    return text
