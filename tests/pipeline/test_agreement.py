"""A step that one rank, or all ranks of one place on an axis, take otherwise: a ValueError on every rank of every stage
and replica, before anything of the step is sent, and the next step goes on.

Spans: tpfuse/pipeline/step.py and tpfuse/models/stages.py, the two sides of a step, over tpfuse/ranks.
"""

import functools
import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.common import changed
from tests.pipeline.common import GPT2, batches, made, mine, place
from tpfuse import TensorParallel, clip_grad_norm_
from tpfuse.layers import ParallelModule
from tpfuse.models import GPT
from tpfuse.pipeline import schedule
from tpfuse.pipeline.step import Pipeline
from tpfuse.ranks.messages import channel


def part(model):
    """A layer that is on every stage."""
    return next(m for name, m in model.named_modules() if name.endswith("attention") and isinstance(m, ParallelModule))


class Here(NamedTuple):
    """What the calls are made on."""

    model: GPT
    pipeline: Pipeline
    spare: Pipeline  # of the same model


def call(here, ids, labels, kind="step", **more):
    return getattr(here.pipeline, kind)(ids, labels=labels, **more)


def within(context):
    def run(here, ids, labels):
        with context(here.model):
            call(here, ids, labels)

    return run


OTHERWISE = {  # what is done, and words of the error
    "seed": (within(lambda m: changed(m, "seed", 7)), "seed"),
    "step": (within(lambda m: changed(m, "step", m.step + 1)), "step"),
    "a part's mode": (within(lambda m: changed(part(m), "training", False)), "parts in another mode"),
    "a part's dropout": (within(lambda m: changed(part(m), "dropout", 0.75)), "dropout"),
    "frozen": (within(lambda m: changed(next(m.parameters()), "requires_grad", False)), "frozen"),
    "no grad": (within(lambda m: torch.no_grad()), "grad"),
    "recompute": (within(lambda m: changed(m, "_full", True)), "recompute"),
    "autocast": (within(lambda m: torch.autocast("cpu", torch.bfloat16)), "autocast"),
    "evaluate": (functools.partial(call, kind="evaluate"), "backward"),
    "another pipeline": (lambda here, *batch: call(here._replace(pipeline=here.spare), *batch), "which pipeline"),
    "rows": (
        lambda here, ids, labels: call(here, ids[:-1], labels[:-1]),
        "labels and input_ids must|cannot be cut into 2",
    ),
    "no labels": (lambda here, ids, labels: here.pipeline.step(ids), "labels"),
    "labels": (lambda here, ids, labels: call(here, ids, labels[:-2]), "labels"),
    "an unknown argument": (functools.partial(call, typo=1), "typo"),
    "a sample": (functools.partial(call, first_sample=9), "first_sample"),
    "a step": (functools.partial(call, step=9), "step"),
}
OWN = "a sample", "recompute"  # what a replica may have of its own


def refused(world, layout, whole, names):
    mesh = world.stages(*layout)
    model = made(replace(GPT2, num_layers=2), tp=TensorParallel(mesh["tp"]), **place(mesh, "1f1b"))
    here, rows = Here(model, *(schedule(model, mesh["pp"], "1f1b", 2) for _ in range(2))), mine(mesh)
    ((ids, labels),) = batches(1)
    ids, labels, found = ids[rows], labels[rows], {}
    odd = world.rank % 2 == 1 if whole else world.rank == world.size - 1
    call(here, ids, labels)
    for name in names:
        with pytest.raises(ValueError) as caught:
            (OTHERWISE[name][0] if odd else call)(here, ids, labels)
        found[name] = f"{caught.value}"
        dist.barrier()
        assert torch.isfinite(call(here, ids, labels))
    return found, int(model.step)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["one rank", "a place on every stage"])
@pytest.mark.parametrize("layout", [(2, 1, 2), (2, 2, 1)])
def test_a_step_that_is_taken_otherwise(ranks, layout, whole):
    names = [name for name in OTHERWISE if layout[1] == 1 or name not in OWN]
    for found, steps in ranks(4, refused, layout, whole, names):
        assert steps == 1 + len(names)  # a step that is refused counts nothing
        for name in names:
            assert re.search(OTHERWISE[name][1], found[name]), (name, found[name])


def messages(world, layout):
    """-> the bytes that the second step's comparison sends to each other rank of each group; "more" for longer ones"""
    mesh = world.stages(*layout)
    model = made(GPT2, tp=TensorParallel(mesh["tp"]), **place(mesh, "1f1b"))
    pipeline, ((ids, labels),), rows, sent = schedule(model, mesh["pp"], "1f1b", 2), batches(1), mine(mesh), {}
    pipeline.step(ids[rows], labels=labels[rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpfuse.ranks.messages.gather", lambda *args, **call: sent.setdefault("more", args))
        for name in ("tp", "dp", "pp"):
            links = channel(mesh[name].get_group())
            if links is not None:
                heads, lengths = links._from_all, sent.setdefault(name, [])
                patch.setattr(links, "_from_all", lambda row, f=heads, n=lengths: n.append(row.nbytes) or f(row))
        pipeline.step(ids[rows], labels=labels[rows])
    return sent


@pytest.mark.parametrize("layout, axes", [((2, 1, 2), ["tp", "pp"]), ((2, 2, 1), ["dp", "pp"])])
def test_a_known_step_costs_48_bytes_an_axis(ranks, layout, axes):
    assert ranks(4, messages, layout) == [dict.fromkeys(axes, [24, 24])] * 4


def clipped(world, layout):
    """-> what each rank is told where the last one clips at another norm; then the norm that all find"""
    mesh = world.stages(*layout)
    model = made(GPT2, tp=TensorParallel(mesh["tp"]), **place(mesh, "1f1b"))
    ((ids, labels),) = batches(1)
    schedule(model, mesh["pp"], "1f1b", 2).step(ids, labels=labels)
    with pytest.raises(ValueError) as caught:
        clip_grad_norm_(model, 2.0 if world.rank == world.size - 1 else 1.0)
    return str(caught.value), float(clip_grad_norm_(model, 1.0))


@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 1, 2)])
def test_clipping_that_differs_over_stages(ranks, layout):
    every = ranks(layout[0] * layout[2], clipped, layout)
    assert len({norm for _, norm in every}) == 1
    for text, _ in every:
        assert text.startswith("clip_grad_norm_: max_norm must be the same on every ")
