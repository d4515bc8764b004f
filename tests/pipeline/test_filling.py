"""Work in the bubbles of real steps: where it runs, how often, and that the steps are those without it, bit for bit.

Spans: bubbles.py, step.py and runtime.py of tpfuse/pipeline: work placed in bubbles, run by real steps.
"""

import math

import pytest
import torch

from bench import pipeline_fill
from tests.models.common import default_dtype
from tests.pipeline.common import GPT2, batches, made, said
from tpfuse import TensorParallel
from tpfuse.pipeline import SCHEDULES, Action, Work, demand, fill, order, schedule, simulate
from tpfuse.ranks.messages import gather

F64 = torch.float64


class Shampoo:
    """One side of Shampoo: W -= lr L^(-1/4) G with L the sum of G G' (Gupta et al. 2018, arXiv:1802.09568)."""

    def __init__(self, model):
        self.weights = [p for p in model.parameters() if p.dim() == 2 and len(p) <= 96]
        self.statistics = [1e-3 * torch.eye(len(p)) for p in self.weights]
        self.roots = [torch.eye(len(p)) for p in self.weights]

    def refresh(self, i):
        values, vectors = torch.linalg.eigh(self.statistics[i])
        self.roots[i] = vectors @ torch.diag(values.pow(-0.25)) @ vectors.T

    @torch.no_grad()
    def step(self):
        for p, statistic, root in zip(self.weights, self.statistics, self.roots, strict=True):
            statistic += p.grad @ p.grad.T
            p -= 1e-2 * root @ p.grad
            p.grad = None


def trained(world, name, how, steps=4):
    """-> losses and weights with refreshes "in bubbles", "before" the steps that these are of, or "never"; what was
    planned, and the steps and the forward passes before each refresh."""
    mesh = world.stages(2, 1, 1)["pp"]
    rank = mesh.get_local_rank()
    with default_dtype(F64):
        model = made(GPT2, stage=(rank, 2, name))
        trainer, optimizer, log, at = schedule(model, mesh, name, 4), Shampoo(model), [], [0, 0]
        run = model.stages.run

        def counting(*args):
            at[1] += 1
            return run(*args)

        model.stages.run = counting
        timeline = simulate(trainer.order, 1.0, 1.0, 1.0)
        counts = gather(len(optimizer.weights), torch.distributed.group.WORLD)

        def piece(i):
            def run():
                log.append((i, *at))
                optimizer.refresh(i)

            return run

        work = [Work(r, 0.5, run=piece(i) if r == rank else None) for r in range(2) for i in range(counts[r])]
        filling = fill(timeline, work)
        trainer.fill(filling if how == "in bubbles" else None)
        losses = []
        for step, (ids, labels) in enumerate(batches(steps)):
            at[:] = step, 0
            for placed in filling.placed[rank] if how == "before" else ():
                if placed.step == step % filling.steps:
                    work[placed.number].run()
            losses.append(trainer.step(ids, labels=labels).item())
            grads = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            model.zero_grad()
        planned = [(p.number - rank * counts[0], p.step, p.place) for p in filling.placed[rank]]
        return losses, [p.detach() for p in model.parameters()] + grads, planned, log, filling.steps


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "zbv" else pytest.mark.slow)
        for name in SCHEDULES
        if name != "chimera"  # no bubbles over two ranks
    ],
)
def test_work_runs_in_its_bubble_and_changes_nothing_else(ranks, name):
    runs = {how: ranks(2, trained, name, how) for how in ("in bubbles", "before", "never")}
    passes = [[a.kind == "F" for a in actions] for actions in order(name, 2, 4).actions]
    for rank, (inside, before, never) in enumerate(zip(*runs.values(), strict=True)):
        assert inside[0] == before[0] and all(map(torch.equal, inside[1], before[1]))  # bit for bit
        assert inside[0] != never[0] and not never[3]
        losses, _, planned, log, steps = inside
        assert steps > 1
        forward = {place: sum(passes[rank][:place]) for _, _, place in planned}
        expected = [
            (i, step, forward[place])
            for step in range(len(losses))
            for i, planned_step, place in planned
            if planned_step == step % steps
        ]
        assert log == expected


def unread(world, name):
    """Work whose results nobody reads -> whether steps with it and without have the same bits."""
    mesh = world.stages(world.size, 1, 1)["pp"]
    found = []
    for filled in (True, False):
        model = made(GPT2, stage=(mesh.get_local_rank(), world.size, name))
        trainer = schedule(model, mesh, name, 4)
        junk = lambda: torch.linalg.eigh(torch.randn(16, 16))
        work = [Work(r, 0.5, run=junk) for r in range(world.size) for _ in range(4)]
        trainer.fill(fill(simulate(trainer.order, 1.0, 1.0, 1.0), work) if filled else None)
        losses = [trainer.step(ids, labels=labels).item() for ids, labels in batches(2)]
        found.append((losses, [p.grad for p in model.parameters()]))
    (with_work, these), (without, those) = found
    return with_work == without and all(map(torch.equal, these, those))


@pytest.mark.parametrize("name, size", [("zero-bubble", 2), pytest.param("chimera", 4, marks=pytest.mark.slow)])
def test_results_that_nobody_reads_change_no_bit(ranks, name, size):
    assert all(ranks(size, unread, name))


def measured(world, name):
    mesh = world.stages(2, 1, 2)
    model = made(GPT2, tp=TensorParallel(mesh["tp"]), stage=(mesh["pp"].get_local_rank(), 2, name))
    trainer = schedule(model, mesh["pp"], name, 4)
    ran = []
    work = [Work(r, 0.1, run=lambda: ran.append(1)) for r in range(2)]
    trainer.fill(fill(simulate(trainer.order, 1.0, 1.0, 1.0), work))
    ((ids, labels),) = batches(1)
    timeline = trainer.measure(ids, labels=labels)
    assert not ran  # a bubble with work in it is none
    trainer.step(ids, labels=labels)
    assert ran == [1]
    trainer.fill(None)
    trainer.step(ids, labels=labels)
    assert ran == [1]
    return timeline


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_step_is_measured_alike_on_every_rank(ranks, name):
    first, *others = ranks(4, measured, name)
    assert all(other == first for other in others)
    assert all(e.end > e.start for events in first.events for e in events)
    assert math.isfinite(demand(first, [Work(0, first.seconds)]))


def refusals(world):
    mesh = world.stages(2, 1, 1)["pp"]
    model = made(GPT2, stage=(mesh.get_local_rank(), 2))
    trainer = schedule(model, mesh, "1f1b", 4)
    timeline = simulate(trainer.order, 1.0, 1.0, 1.0)
    there = 1 - mesh.get_local_rank()
    tries = {
        "order": fill(simulate(order("gpipe", 2, 4), 1.0, 1.0, 1.0), []),
        "action": fill(timeline, [Work(1 - there, 0.1, (Action(there, "F", 0),))]),
        "work": fill(timeline, [Work(there, 0.1), Work(1 - there, 0.1, (0,))]),
    }
    return {key: said(lambda filling=filling: trainer.fill(filling)) for key, filling in tries.items()}


def test_what_is_refused_says_why(ranks):
    for rank, found in enumerate(ranks(2, refusals)):
        assert "the filling is of another order" in found["order"]
        assert f"cannot be run: it needs action {1 - rank}F0, of another rank" in found["action"]
        assert f"work 1 of rank {rank} cannot be run: it needs work 0, of another rank" in found["work"]


@pytest.mark.slow
def test_shampoo_of_pytorch_optimizer(ranks):
    (found, _) = ranks(2, shampoo, pipeline_fill.Options(ranks=2, micro_batches=4, layers=2, hidden=32, cycles=2))
    assert found["same"] and found["differs"]
    assert found["planned"] >= found["demand"] and found["reached"] == [found["planned"]]


def shampoo(world, asked):
    return pipeline_fill.measured(asked)
