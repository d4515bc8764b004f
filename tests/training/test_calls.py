"""What decides the calls of a step is compared over replicas before their gradients are added: one ValueError on every
rank, nothing changed, and no message for calls that add to no gradient."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import Linear

from tests.models.common import STEP_CONFIG, batch
from tpfuse import MainGrad, OkTopk, TensorParallel, clip_grad_norm_, data_parallel, ok_topk_hook
from tpfuse.models import GPT
from tpfuse.ranks.messages import channel
from tpfuse.training.calls import CallRecord

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


def clipped(run, micro):
    clip_grad_norm_(run.called, 0.5)
    return {}


MISTAKES = {  # of rank 1, and what the error says beside "must be the same on every data-parallel rank"
    seeded: "model.seed must",
    counted: "model.step after a call must",
    evaluated: "parts in another mode must",
    dropped: "parts with dropout=0.25 must",
    clipped: "max_norm of clip_grad_norm_ before a call must",
    (lambda run, micro: {"step": 5 + micro}): "step must",
    (lambda run, micro: {"autocast": micro == 1}): "autocast must",
}


def compared(world, wrapper):
    """-> the error of each mistake, and what rank 0 held of gradients beside those of its own; then a right step"""
    run, said = Run(world, wrapper), []
    right, parts = run.step(), {name: m.dropout for name, m in run.model.named_modules() if hasattr(m, "dropout")}
    for mistake in MISTAKES:
        if mistake is clipped and wrapper == "MainGrad":
            continue  # gradients are there when all have reduced them
        before = int(run.model.step)
        with pytest.raises(ValueError) as caught:
            run.step(mistake if world.rank else lambda run, micro: {})
        said.append((MISTAKES[mistake], str(caught.value), wrapper))
        run.model.train()
        run.model.seed = 0
        run.model.step.fill_(before)
        if mistake is clipped:  # by all, once more
            clip_grad_norm_(run.model, 0.5)
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


def hooked(world, state):
    """-> the error where rank 1 has a communication hook, whose messages are of another length; then a right step"""
    run = Run(world, "DistributedDataParallel")
    if world.rank:
        run.called.register_comm_hook(OkTopk(0.5) if state else None, ok_topk_hook if state else fp16_compress_hook)
    with pytest.raises(ValueError) as caught:
        run.step()
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("state, name", [(False, "fp16_compress_hook"), (True, "ok_topk_hook")])
def test_a_communication_hook_on_one_replica(ranks, state, name):
    first, second = ranks(2, hooked, state)
    said = "data_parallel: communication hooks must be the same on every data-parallel rank, got rank 0: none; rank 1: "
    assert first == second == said + name


def refused_within(world):
    """One tensor-parallel rank of one replica has another seed -> what its replica is told, which calls again, and the
    gradients beside those of an undisturbed step"""
    mesh, said = world.mesh(2, 2), ""
    model = GPT(STEP_CONFIG, tp=TensorParallel(mesh["tp"]), dp=mesh["dp"])
    replica = data_parallel(model, mesh["dp"])
    found = []
    for odd in (-1, 3):
        replica.zero_grad()
        model.seed = 7 if world.rank == odd else 0
        if odd > 0 and mesh["dp"].get_local_rank() == 1:
            with pytest.raises(ValueError) as caught:
                replica(**CALL, step=0)
            said, model.seed = str(caught.value), 0
        replica(**CALL, step=0).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return said, all(map(torch.equal, *found))


def test_a_call_that_one_replica_refuses_may_be_made_again(ranks):
    first, _, *second = ranks(4, refused_within)
    assert first == ("", True)
    for said, same in second:
        assert same and said.startswith("GPT: model.seed must be the same on every tensor-parallel rank")


def unequal(world, wrapper):
    """-> that gradients of one and of two micro-batches are added up; the error where each call counts as a step"""
    run = Run(world, wrapper, micro_batches=1 + world.rank)
    right, model = run.step(), GPT(STEP_CONFIG, tp=TensorParallel())
    for _ in range(run.micro_batches):
        model(**CALL, step=5, first_sample=world.rank).loss.backward()
    for gradient, p in zip(right, model.parameters(), strict=True):
        dist.all_reduce(p.grad)
        torch.testing.assert_close(gradient, p.grad / world.size)
    with pytest.raises(ValueError) as caught:
        run.step(lambda run, micro: {"step": None})
    run.model.step.zero_()
    return all(map(torch.equal, run.step(), right)), str(caught.value)


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "MainGrad"])
def test_replicas_with_different_numbers_of_micro_batches(ranks, wrapper):
    first, second = ranks(2, unequal, wrapper)
    assert first == second and first[0]
    assert "got rank 0: 1; rank 1: 1, 2; a call with dropout and without step= counts as a step;" in first[1]
    assert "model.step after a call must be the same on every data-parallel rank" in first[1]


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


def paired_otherwise(world):
    """Each value occurs on both ranks, in another call"""
    record = CallRecord("MainGrad", world.mesh(2, 1)["dp"].get_group())
    layer = Linear(2, 2)
    for training, step in ((True, 5), (world.rank == 0, 6), (False, 6)):
        layer.train(training)
        record.add(record.describe(layer, {"step": step}))
    with pytest.raises(ValueError, match="what goes together in a call must .*rank 0.*training=True step=6") as caught:
        record.compare(lambda: None)
    assert record.compare(lambda: 7) == 7
    return str(caught.value)


def test_values_that_go_together_otherwise(ranks):
    assert len(set(ranks(2, paired_otherwise))) == 1
