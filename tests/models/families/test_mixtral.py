"""A model with experts in training and in checkpoints; what every family with experts has is in test_experts.py.

Spans: models/ and training/, on a Mixtral of transformers.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers

import tpfuse
from tests.common import error, make_tp
from tests.models import common
from tests.models.common import batch, run, whole_logits
from tests.models.families.experts import their_config, theirs
from tests.routing import routed, to_the_first
from tpfuse import TensorParallel, data_parallel
from tpfuse.models import GPT, GPTConfig
from tpfuse.models.files.write import whole_tensors
from tpfuse.training.checkpoint import load_checkpoint, save_checkpoint

transformers.utils.logging.disable_progress_bar()
F64 = torch.float64


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of transformers, and its directory."""
    model, path = theirs("mixtral"), tmp_path_factory.mktemp("mixtral")
    model.save_pretrained(path)
    return model, path


def test_autocast(ranks):
    """A rounding may send a token to another expert: the loss is near."""
    config = GPTConfig.from_hf(their_config("mixtral").to_dict())
    one = run(None, GPT, config, batch(config), dtype=torch.float32)
    for found in ranks(2, run, GPT, config, batch(config), True, torch.float32, dict(autocast=True)):
        assert error(found["loss"], one["loss"]) < 2e-2
        assert {found[name].dtype for name in found if name.startswith("d ")} == {torch.float32}


def trained(world, dp, kind, micro):
    """(loss, gradient's norm) of two steps over replicas."""
    config = replace(GPTConfig.from_hf(their_config("mixtral").to_dict()), num_layers=1)
    with mock.patch.object(common, "STEP_CONFIG", config):
        return common.Training(world, dp, kind=kind).steps(0, 2, micro)


@pytest.mark.parametrize("R, dp, kind, micro", [(4, 2, "ddp", 1), (2, 1, "ddp", 3), (4, 2, "fsdp", 1)])
def test_training_over_replicas(ranks, R, dp, kind, micro):
    (one,) = ranks(1, trained, 1, "ddp", 1)
    for found in ranks(R, trained, dp, kind, micro):
        torch.testing.assert_close(torch.tensor(found, dtype=F64), torch.tensor(one, dtype=F64), rtol=1e-9, atol=0)


def flooded(world, dp, kind):
    """``trained``, where every row has the experts of one tensor-parallel rank, and the other has none."""
    with routed(to_the_first):
        return trained(world, dp, kind, 1)


@pytest.mark.parametrize(
    "R, dp, kind", [(2, 1, "ddp"), (4, 2, "ddp"), pytest.param(4, 2, "fsdp", marks=pytest.mark.slow)]
)
def test_training_with_a_flooded_rank_and_a_starved_one(ranks, R, dp, kind):
    (one,) = ranks(1, flooded, 1, "ddp")
    (usual,) = ranks(1, trained, 1, "ddp", 1)
    assert one != usual
    for found in ranks(R, flooded, dp, kind):
        torch.testing.assert_close(torch.tensor(found, dtype=F64), torch.tensor(one, dtype=F64), rtol=1e-9, atol=0)


def watched(world, path):
    """What is said of steps of two replicas of two ranks: right, with data_parallel; then with one expert's last bit
    flipped on one rank, and with one router's."""
    mesh = world.mesh(2, 2)
    model = GPT.from_pretrained(path, tp=TensorParallel(mesh["tp"], sequence_parallel=True), dtype=F64)
    replica, optimizer = data_parallel(model, mesh["dp"]), torch.optim.SGD(model.parameters(), lr=0.1)
    tpfuse.watch_replicas(model, optimizer, every=1)
    call = batch(model.config, size=2)

    def step():
        optimizer.zero_grad()
        replica(**call, step=0, first_sample=0).loss.backward()
        optimizer.step()

    found = []
    with tpfuse.checking():
        for name in (None, "fc1", "router"):
            if world.rank == 3 and name is not None:
                with torch.no_grad():
                    getattr(model.blocks[1].mlp, name).flatten()[0] += 1
            try:
                step()
                found.append("")
            except ValueError as error:
                found.append(str(error))
    return found


def test_replicas_that_differ_are_named(ranks, saved):
    for right, expert, router in ranks(4, watched, str(saved[1])):
        assert right == "" and "blocks.1.mlp.fc1" in expert and "blocks.1.mlp.router" in router


def packed(world, path, call):
    model = GPT.from_pretrained(path, tp=make_tp(world), dtype=F64)
    out = model(**call, return_logits=True)
    return whole_logits(out.logits, 97, model.tp)


def test_packed_documents(ranks, saved):
    """Two documents of 5 and 2 tokens in one row, each as alone."""
    model, path = saved
    ids = batch(model.config, size=1)["input_ids"]
    call = dict(input_ids=ids, cu_seqlens=torch.tensor([0, 5, 7], dtype=torch.int32), max_seqlen=5)
    with torch.no_grad():
        alone = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], 1)
    for logits in ranks(2, packed, str(path), call):
        assert error(logits, alone) < 1e-12


def resharded(world, path, folder, fresh):
    """A checkpoint read, or made of a first step; then a step, whose loss and weights depend on the optimizer's state;
    saved before it."""
    model = GPT.from_pretrained(path, tp=make_tp(world), dtype=F64)
    optimizer, call = torch.optim.AdamW(model.parameters(), lr=1e-2), batch(model.config)

    def step():
        optimizer.zero_grad()
        loss = model(**call).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    if fresh:
        step()
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        load_checkpoint(folder, model, optimizer)
    save_checkpoint(folder, model, optimizer, step=1 if fresh else 2 + world.size)
    weights = {name: t.clone() for name, t in whole_tensors(model.files)}
    return weights, step(), dict(whole_tensors(model.files))


@pytest.mark.slow
def test_checkpoints_at_other_sizes(ranks, saved, tmp_path):
    """1 -> 2 -> 4 -> 1: the weights' bits, and the next step's values."""
    _, path = saved
    ((weights, loss, after),) = ranks(1, resharded, str(path), tmp_path, True)
    for R in (2, 4, 1):
        for found, again, later in ranks(R, resharded, str(path), tmp_path, False):
            assert all(torch.equal(found[name], weights[name]) for name in weights)
            assert abs(again - loss) < 1e-12 and max(error(later[name], after[name]) for name in after) < 1e-9
