"""KFAC over pipeline stages: the weights of one process, and the bits of the same pieces run after the passes."""

import pytest
import torch

from tests.common import error
from tests.models.common import default_dtype
from tests.pipeline.common import GPT2, batches, check_said, made, said
from tests.planted import planted
from tpfuse import KFAC, TensorParallel
from tpfuse.layers.shards import named_specs
from tpfuse.pipeline import fill, schedule, simulate

F64 = torch.float64


def one_process(world, steps=3):
    with default_dtype(F64):
        model = made(GPT2)
        kfac = KFAC(model, lr=0.01)
        others = torch.optim.SGD(kfac.remaining(model), lr=0.1)
        losses = []
        for ids, labels in batches(steps):
            loss = model(ids, labels=labels).loss
            loss.backward()
            losses.append(loss.item())
            _update(model, kfac, others)
        return losses, {name: p.detach() for name, p in model.named_parameters()}


def _update(model, kfac, others):
    kfac.step()
    others.step()
    model.zero_grad()


def staged(mesh, name):
    place = (mesh["pp"].get_local_rank(), mesh["pp"].size(), name)
    dp = mesh["dp"] if mesh["dp"].size() > 1 else None
    model = made(GPT2, tp=TensorParallel(mesh["tp"]), stage=place, dp=dp)
    pipeline, kfac = schedule(model, mesh["pp"], name, 4), KFAC(model, lr=0.01)
    return model, pipeline, kfac, torch.optim.SGD(kfac.remaining(model), lr=0.1)


def over_stages(world, layout, name, steps=3):
    """-> losses, and the largest error of a weight that is passed in."""
    mesh = world.stages(*layout)
    with default_dtype(F64):
        model, pipeline, kfac, others = staged(mesh, name)
        rows = slice(*(8 // mesh["dp"].size() * (mesh["dp"].get_local_rank() + i) for i in (0, 1)))
        losses = []
        for ids, labels in batches(steps):
            losses.append(pipeline.step(ids[rows], labels=labels[rows]).item())
            _update(model, kfac, others)
    return losses, {name: (spec.local(tp), p.detach()) for name, p, spec, tp in named_specs(model)}


@pytest.mark.parametrize(
    "layout, name",
    [
        ((2, 1, 1), "zbv"),
        *(
            pytest.param(layout, name, marks=pytest.mark.slow)
            for layout, name in [
                ((2, 1, 1), "1f1b"),
                ((2, 1, 2), "zbv"),
                ((2, 1, 2), "1f1b"),
                ((2, 2, 1), "zero-bubble"),
            ]
        ),
    ],
)
def test_stages_step_as_one_process(ranks, layout, name):
    ((losses, weights),) = ranks(1, one_process)
    for found, parts in ranks(layout[0] * layout[1] * layout[2], over_stages, layout, name):
        assert found == pytest.approx(losses, rel=1e-12)
        assert max(error(p, weights[key][place]) for key, (place, p) in parts.items()) < 1e-12


def filled(world, layout, name, how):
    """Steps with the work "in bubbles", or "after" the passes of the step that it is planned in -> losses, weights,
    steps of the filling, and how many rows of matrices wait at most."""
    mesh = world.stages(*layout)
    model, pipeline, kfac, others = staged(mesh, name)
    data = list(batches(6))
    pipeline.step(data[0][0], labels=data[0][1])
    _update(model, kfac, others)
    work = kfac.work(pipeline)
    work = [piece._replace(seconds=0.4) for piece in work]  # as measured they would be planned otherwise in each run
    kfac._work = work
    plan = fill(simulate(pipeline.order, 1.0, 1.0, 1.0), work)
    silent = [piece._replace(run=None) for piece in work]
    losses, waiting = [], 0
    if how == "after":
        kfac._work = silent
    pipeline.fill(plan if how == "in bubbles" else plan._replace(work=tuple(silent)))
    for i, (ids, labels) in enumerate(data[1:]):
        losses.append(pipeline.step(ids, labels=labels).item())
        if how == "after":
            for placed in plan.placed[pipeline.group.rank()]:
                if placed.step == i % plan.steps:
                    work[placed.number].run()
        waiting = max(waiting, sum(len(c.held) for c in kfac._curvature.values()))
        _update(model, kfac, others)
    return losses, [p.detach() for p in model.parameters()], plan.steps, waiting


@pytest.mark.parametrize(
    "layout, name",
    [((2, 1, 1), "1f1b"), *(pytest.param((2, 1, 2), name, marks=pytest.mark.slow) for name in ("1f1b", "zbv"))],
)
def test_work_in_bubbles_has_the_bits_of_the_same_work_after_them(ranks, layout, name):
    size = layout[0] * layout[1] * layout[2]
    inside, after = (ranks(size, filled, layout, name, how) for how in ("in bubbles", "after"))
    for (losses, weights, steps, waiting), (later_losses, later_weights, _, _) in zip(inside, after, strict=True):
        assert steps > 1 and 0 < waiting
        assert losses == later_losses and all(map(torch.equal, weights, later_weights))


def interrupted(world, fails, filling):
    """Six steps of two batches each, the second of those of ``fails`` again after an error in its end -> weights, and
    the number of failures."""
    model, pipeline, kfac, others = staged(world.stages(2, 1, 1), "1f1b")
    data, failed = list(batches(6)), 0
    if filling:
        pipeline.step(data[0][0], labels=data[0][1])
        _update(model, kfac, others)
        work = kfac._work = [piece._replace(seconds=0.4) for piece in kfac.work(pipeline)]
        pipeline.fill(fill(simulate(pipeline.order, 1.0, 1.0, 1.0), work))
    for i, (ids, labels) in enumerate(data):
        pipeline.step(ids, labels=labels)  # of two whose gradients are added up
        if i in fails:
            with planted("tpfuse.pipeline.step.Pipeline._complete", failing):
                failed += said(lambda ids=ids, labels=labels: pipeline.step(ids, labels=labels), Planted) == "planted"
        pipeline.step(ids, labels=labels)
        _update(model, kfac, others)
    return [p.detach() for p in model.parameters()], failed


class Planted(Exception):
    pass


def failing(right, *args):
    raise Planted("planted")


@pytest.mark.slow
@pytest.mark.parametrize("filling", [False, True])
def test_a_step_that_fails_leaves_no_rows(ranks, filling):
    """Neither those that are added at once, nor those that wait for a bubble; and what bubbles have refreshed is as it
    was."""
    exact, found = (ranks(2, interrupted, fails, filling) for fails in ((), (0, 1, 2, 4)))
    for (weights, none), (again, failed) in zip(exact, found, strict=True):
        assert none == 0 and failed == 4 and all(map(torch.equal, weights, again))


def measured(world, layout):
    """What a user writes, over tensor-parallel ranks and replicas -> the plan, and whether factors have changed."""
    mesh = world.stages(*layout)
    model, pipeline, kfac, others = staged(mesh, "1f1b")
    rows = slice(*(8 // mesh["dp"].size() * (mesh["dp"].get_local_rank() + i) for i in (0, 1)))
    data = [(ids[rows], labels[rows]) for ids, labels in batches(2)]
    pipeline.step(data[0][0], labels=data[0][1])
    _update(model, kfac, others)
    plan = fill(simulate(pipeline.order, 1.0, 1.0, 1.0), kfac.work(pipeline))
    pipeline.fill(plan)
    before = {p: state["output_inverse"] for p, state in kfac.state.items()}
    for _ in range(plan.steps):
        pipeline.step(data[1][0], labels=data[1][1])
        _update(model, kfac, others)
    changed = all(not torch.equal(kfac.state[p]["output_inverse"], x) for p, x in before.items())
    return [[tuple(p) for p in row] for row in plan.placed], plan.steps, changed


@pytest.mark.parametrize("layout", [(2, 1, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_measured_work_is_one_plan(ranks, layout):
    first, *others = ranks(layout[0] * layout[1] * layout[2], measured, layout)
    assert all(other == first for other in others)
    placed, _, changed = first
    assert changed and len(placed[0]) > 0


def refusals(world):
    mesh = world.stages(2, 1, 1)
    model, pipeline, kfac, others = staged(mesh, "1f1b")
    timeline = simulate(pipeline.order, 1.0, 1.0, 1.0)
    errors = {"early": said(lambda: kfac.work(pipeline))}
    ((ids, labels),) = batches(1)
    pipeline.step(ids, labels=labels)
    _update(model, kfac, others)
    work = kfac.work(pipeline)
    assert len(work) == 2 * 8 * (4 + 2)  # of 8 weights on each rank, with 4 micro-batches
    pipeline.fill(fill(timeline, work[:-1]))
    pipeline.step(ids, labels=labels)
    errors["dropped"] = said(kfac.step)
    errors["twice"] = said(lambda: staged(mesh, "chimera"))
    return errors


def test_what_is_refused_says_why(ranks):
    words = {
        "early": "KFAC.work: make a step first, which tells the sizes of blocks.",
        "twice": "KFAC: two ranks of the pipeline hold blocks.0.attention.qkv.weight",
        "dropped": "filling has not all pieces of the latest KFAC.work",
    }
    check_said(ranks(2, refusals), words)
