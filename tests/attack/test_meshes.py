"""Random scripts of training steps over meshes, in which one rank, or all ranks of one replica or tensor-parallel
place, take one step otherwise: every rank gets a ValueError there, and the other steps are those of an undisturbed run.
Spans: tpfuse/pipeline/step.py, tpfuse/training and what they compare of a step.
"""

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.common import assert_equal, changed
from tests.pipeline.common import DROP, GPT2, place
from tests.pipeline.test_agreement import part
from tpfuse import MainGrad, OkTopk, TensorParallel, data_parallel, ok_topk_hook
from tpfuse.models import GPT
from tpfuse.pipeline import schedule

ROWS, SEQ, MICRO = 4, 6, 4  # of a replica's step; of all replicas
STATE = {  # name: (who shares it, what is no argument and decides a step)
    "seed": ("all", lambda m: changed(m, "seed", 77)),
    "step": ("all", lambda m: changed(m, "step", m.step + 1)),
    "autocast": ("all", lambda m: torch.autocast("cpu", torch.bfloat16)),
    "a part's mode": ("all of a stage", lambda m: changed(part(m), "training", False)),
    "a part's dropout": ("all of a stage", lambda m: changed(part(m), "dropout", 0.75)),
    "a frozen weight": ("all of a stage", lambda m: changed(next(m.parameters()), "requires_grad", False)),
    "recompute": ("tp", lambda m: changed(m, "_full", True)),
}
ARGUMENTS = {  # the same of a step's arguments
    "a step": ("all", lambda c: c | dict(step=c["step"] + 1)),
    "an id": ("all of a replica", lambda c: c | dict(input_ids=c["input_ids"].flip(1))),
    "a label": ("all of a replica", lambda c: c | dict(labels=c["labels"].flip(0))),
    "one row fewer": ("all of a replica", lambda c: c | {key: c[key][1:] for key in ("input_ids", "labels")}),
    "32 bits": ("all of a replica", lambda c: c | dict(input_ids=c["input_ids"].int())),
    "a normalizer": ("all of a replica", lambda c: c | dict(loss_normalizer=3.0)),
}
LAYOUTS = {  # (pp, dp, tp)
    "pipeline": [(2, 1, 1), (2, 2, 1), (2, 1, 2)],
    "data_parallel": [(1, 2, 1), (1, 2, 2)],
    "micro-batches": [(1, 2, 1), (1, 2, 2)],
    "MainGrad": [(1, 2, 1), (1, 2, 2)],
    "Ok-Topk": [(1, 2, 1), (1, 2, 2)],
}
REFUSED = "must be the same on every", "has been frozen or made trainable since"
SCHEDULES = "gpipe", "1f1b", "zero-bubble", "zbv", "chimera"


class Script(NamedTuple):
    """``trainer`` over ``layout`` takes ``steps``, of which the ranks at ``odd`` take number ``at`` otherwise."""

    trainer: str
    layout: tuple[int, int, int]
    schedule: str
    main: bool  # a pipeline's MainGrad
    dropout: bool
    steps: int
    at: int
    how: str
    odd: str  # "rank": the last of all; "dp", "tp": all ranks that are second on that axis

    def is_odd(self, rank):
        _, dp, tp = self.layout
        places = {"rank": rank == self.layout[0] * dp * tp - 1, "dp": rank // tp % dp == 1, "tp": rank % tp == 1}
        return places[self.odd]


def script(seed):
    draw = random.Random(seed)
    trainer = draw.choice(list(LAYOUTS))
    layout, steps = draw.choice(LAYOUTS[trainer]), draw.randint(1, 3)
    axes = [axis for axis, size in zip(("dp", "tp"), layout[1:], strict=True) if size > 1]
    odd = draw.choice(["rank", *axes] if trainer == "pipeline" else ["dp"])  # a forward sends nothing to replicas
    _, dp, tp = layout
    shared = {"all": True, "all of a stage": dp * tp > 1, "all of a replica": dp == 1, "tp": dp == 1 < tp}
    how = draw.choice([name for name, (who, _) in (STATE | ARGUMENTS).items() if shared[who]])
    name, main, dropout = draw.choice(SCHEDULES), draw.random() < 0.3, draw.random() < 0.7 or "dropout" in how
    return Script(trainer, layout, name, main, dropout, steps, draw.randrange(steps), how, odd)


class Training:
    """A model and its trainer -> of each step the loss and the gradients' norms."""

    def __init__(self, world, play):
        self.play, self.mesh = play, world.stages(*play.layout)
        pipeline = play.trainer == "pipeline"
        where = place(self.mesh, play.schedule) if pipeline else dict(dp=self.mesh["dp"])
        config = GPT2 if play.dropout else replace(GPT2, **dict.fromkeys(DROP, 0.0))
        self.model = GPT(config, tp=TensorParallel(self.mesh["tp"]), **where).train()
        self.main = None
        if play.trainer == "MainGrad" or (pipeline and play.main):
            self.main = MainGrad(self.model, self.mesh["dp"])
        if pipeline:
            self.run = schedule(self.model, self.mesh["pp"], play.schedule, 2).step
        elif play.trainer != "MainGrad":
            options = dict(bitwise_micro_batches=MICRO) if play.trainer == "micro-batches" else {}
            self.replica = data_parallel(self.model, self.mesh["dp"], **options)
        if play.trainer == "Ok-Topk":
            self.replica.register_comm_hook(OkTopk(0.05, group=self.mesh["dp"].get_group()), ok_topk_hook)

    def batch(self, step):
        ids = torch.randint(97, (2, ROWS, SEQ), generator=torch.Generator().manual_seed(step))
        mine = ids[self.mesh["dp"].get_local_rank()]
        return dict(input_ids=mine, labels=mine, step=step)

    def step(self, call):
        self.model.zero_grad()
        if self.main is not None:
            self.main.zero()
        if self.play.trainer == "micro-batches":
            self.replica.zero_grad()
            size, losses = len(call["input_ids"]) // self.replica.local_micro_batches, []
            for m in range(self.replica.local_micro_batches):
                rows = {k: v[m * size : (m + 1) * size] if torch.is_tensor(v) else v for k, v in call.items()}
                losses.append(self.replica(**rows, first_sample=self.replica.micro_batch * size).loss)
                losses[-1].backward()
            loss = torch.stack(losses).detach()
        elif self.play.trainer == "pipeline":
            loss = self.run(**call)
        else:
            loss = (self.model if self.main is not None else self.replica)(**call).loss
            loss.backward()
        if self.main is not None:
            self.main.reduce()
        gradients = [p.grad if self.main is None else p.main_grad for p in self.model.parameters()]
        return torch.stack([loss.detach().sum(), *(g.norm().to(loss.dtype) for g in gradients if g is not None)])

    def otherwise(self, call):
        how = self.play.how
        if how in ARGUMENTS:
            return self.step(ARGUMENTS[how][1](call))
        with STATE[how][1](self.model):
            return self.step(call)


def played(world, seed, disturbed):
    """-> what a rank is told, and the results of all steps but the refused one"""
    play, said, results = script(seed), "silent", []
    training = Training(world, play)
    for step in range(play.steps):
        call = training.batch(step)
        if disturbed and step == play.at:
            try:
                (training.otherwise if play.is_odd(world.rank) else training.step)(call)
            except ValueError as error:
                said = str(error)
            dist.barrier()
        results.append(training.step(call))
    dist.barrier()
    return said, results


def attack(ranks, seeds):
    """Plays scripts -> those that were not clean, with what happened."""
    bad = []
    for seed in seeds:
        play = script(seed)
        size = play.layout[0] * play.layout[1] * play.layout[2]
        every, whole = (ranks(size, played, seed, disturbed) for disturbed in (True, False))
        if not all(any(words in said for words in REFUSED) for said, _ in every):
            bad.append((seed, play, [said for said, _ in every]))
        for (_, results), (_, exact) in zip(every, whole, strict=True):
            assert_equal(dict(enumerate(results)), dict(enumerate(exact)))
    return bad


@pytest.mark.slow
def test_a_step_that_is_taken_otherwise_is_refused(ranks):
    assert attack(ranks, range(2)) == []


@pytest.mark.slow
def test_many_meshes(ranks):
    assert attack(ranks, range(1000, 1030)) == []


def test_every_way_and_trainer_is_drawn():
    every = [script(seed) for seed in range(400)]
    assert {play.how for play in every} == {*STATE, *ARGUMENTS} and {play.trainer for play in every} == {*LAYOUTS}
