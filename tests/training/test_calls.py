"""What decides the calls of a step is compared over replicas before their gradients are added: one ValueError on every
rank, nothing changed, and no message for calls that add to no gradient."""

import pytest
import torch
import torch.distributed as dist

from tests.models.common import STEP_CONFIG, batch
from tpfuse import MainGrad, TensorParallel, data_parallel
from tpfuse.models import GPT
from tpfuse.ranks.messages import channel

CALL = batch(STEP_CONFIG, size=2)


class Run:
    """A replica that makes steps of some micro-batches."""

    def __init__(self, world, wrapper, micro_batches=2):
        self.micro_batches = micro_batches
        self.mesh, self.wrapper, self.rank = world.mesh(world.size, 1), wrapper, world.rank
        self.model = self.called = GPT(STEP_CONFIG, tp=TensorParallel(), dp=self.mesh["dp"])
        if wrapper == "MainGrad":
            self.main = MainGrad(self.model, self.mesh["dp"])
        else:
            trees = dict(bitwise_micro_batches=micro_batches * world.size) if wrapper == "trees" else {}
            self.called = data_parallel(self.model, self.mesh["dp"], **trees)

    def step(self, wrong=lambda run, micro: {}):
        """``wrong(self, m)`` before a micro-batch returns arguments of its call"""
        self.zero()
        for micro in range(self.micro_batches):
            given = dict(step=5, first_sample=self.rank) | wrong(self, micro)
            for _ in range(given.pop("again", 0)):  # each adds to a gradient
                self.called.require_backward_grad_sync = False
                self.called(**CALL, **given).loss.backward()
            self.called.require_backward_grad_sync = micro == self.micro_batches - 1
            with torch.autocast("cpu", torch.bfloat16, enabled=given.pop("autocast", False)):
                loss = self.called(**CALL, **given).loss
            loss.backward()
        if self.wrapper == "MainGrad":
            self.main.reduce()
        return [g.clone() for g in self.gradients()]

    def zero(self):
        self.main.zero() if self.wrapper == "MainGrad" else self.called.zero_grad()

    def gradients(self):
        weights = self.main.parameters() if self.wrapper == "MainGrad" else self.model.parameters()
        return [p.grad for p in weights if p.grad is not None]


def seeded(run, micro):
    run.model.seed = micro
    return {}


def counted(run, micro):
    run.model.step += 1
    return {}


def evaluated(run, micro):
    run.model.blocks[0].train(micro == 0)
    return {}


def dropped(run, micro):
    run.model.blocks[0].attention.dropout = 0.25
    return {}


MISTAKES = {  # of rank 1, and what the error says beside "must be the same on every data-parallel rank"
    seeded: "model.seed of call 2",
    counted: "model.step of call 1",
    evaluated: "parts in another mode of call 2",
    dropped: "parts with dropout=0.25 of call 1",
    (lambda run, micro: {"step": 5 + micro}): "step of call 2",
    (lambda run, micro: {"autocast": micro == 1}): "autocast of call 2",
    (lambda run, micro: {"again": micro == 0}): "the number of calls since gradients were last reduced",
}


def compared(world, wrapper):
    """-> the error of each mistake, and what rank 0 held of gradients beside those of its own; then a right step"""
    run, said = Run(world, wrapper), []
    right, parts = run.step(), {name: m.dropout for name, m in run.model.named_modules() if hasattr(m, "dropout")}
    for mistake in MISTAKES:
        if wrapper == "trees" and MISTAKES[mistake].startswith("the number"):
            continue  # it knows how many there are
        before = int(run.model.step)
        with pytest.raises(ValueError) as caught:
            run.step(mistake if world.rank else lambda run, micro: {})
        said.append((MISTAKES[mistake], str(caught.value), wrapper))
        run.model.train()
        run.model.seed = 0
        run.model.step.fill_(before)
        for name, dropout in parts.items():
            run.model.get_submodule(name).dropout = dropout
    return said, all(map(torch.equal, run.step(), right)) and len(right) > 4


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "trees", "MainGrad"])
def test_replicas_that_differ(ranks, wrapper):
    first, second = ranks(2, compared, wrapper)
    assert first == second and first[1]
    name = "MainGrad" if wrapper == "MainGrad" else "data_parallel"
    for what, text, _ in first[0]:
        assert text.startswith(f"{name}: "), text
        assert what in text and " must be the same on every data-parallel rank, got" in text, text


def alone(world, wrapper):
    """-> that rank 0 was not waited for in passes of its own; bytes that a step sends each other replica"""
    run = Run(world, wrapper, micro_batches=1)
    right = [run.step() for _ in range(2)][-1]  # DDP makes its buckets anew in the second
    run.zero()
    if world.rank == 0:
        run.model.eval()
        for _ in range(3):
            run.called.eval()
            run.called(**CALL).loss.detach()
        run.called.train()
        rows = run.model.input_embeddings(CALL["input_ids"]).detach().requires_grad_()
        if wrapper == "DistributedDataParallel":
            torch.autograd.grad(
                run.called(inputs_embeds=rows, labels=CALL["labels"], step=5, first_sample=0).loss, rows
            )
        run.model.step.zero_()
    links, sent = channel(run.mesh["dp"].get_group()), []
    heads = links._from_all
    links._from_all = lambda row: sent.append(row.nbytes) or heads(row)
    again = run.step()
    del links._from_all
    dist.barrier()
    return all(map(torch.equal, again, right)), sent


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "trees", "MainGrad"])
def test_passes_of_one_replica_alone_and_bytes(ranks, wrapper):
    assert ranks(2, alone, wrapper) == [(True, [24])] * 2
