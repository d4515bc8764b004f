"""The training loop of torchtitan, by the calls it makes of torch: the model on the meta device, FSDP2 over the
replicas, weights drawn afterwards, torch's own clipping, and checkpoints by Stateful wrappers of
torch.distributed.checkpoint.

Spans: tpfuse/models/ and tpfuse/training/, under the calls of somebody else's loop.
"""

import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.common import assert_close
from tests.models.common import GPT_CONFIG, batch, whole
from tpfuse import TensorParallel, as_dtensor
from tpfuse.models import GPT

SIZE = 4  # rows of a step, over all replicas


class ModelWrapper(Stateful):
    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict):
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=True))


class OptimizerWrapper(Stateful):
    def __init__(self, model, optimizer):
        self.get = functools.partial(get_optimizer_state_dict, model, optimizer)
        self.set = functools.partial(set_optimizer_state_dict, model, optimizer)
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self):
        return self.get(options=self.options)

    def load_state_dict(self, state_dict):
        self.set(optim_state_dict=state_dict, options=self.options)


def made(world, dp):
    mesh = world.mesh(dp, world.size // dp)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True) if world.size > dp else None
    with torch.device("meta"):
        model = GPT(GPT_CONFIG, tp=tp, dp=mesh["dp"], seed=3)
    if tp is not None:
        as_dtensor(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    model.init_weights()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def trained(world, dp, folder):
    """Two steps, a checkpoint, one step more; and that step again from the checkpoint, in another model."""
    model, optimizer = made(world, dp)
    rows = slice(world.rank // (world.size // dp) * SIZE // dp, None)
    norms = []

    def step(model, optimizer, number):
        call = {k: v[rows][: SIZE // dp] for k, v in batch(GPT_CONFIG, SIZE, 8, seed=number).items()}
        labels = batch(GPT_CONFIG, SIZE, 8, seed=number)["labels"]
        total = (labels[:, 1:] != -100).sum()
        optimizer.zero_grad()
        loss = model(**call, loss_normalizer=total / dp, step=number).loss  # FSDP2 averages over the replicas
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()

    def states(model, optimizer):
        return {"model": ModelWrapper(model), "optimizer": OptimizerWrapper(model, optimizer)}

    step(model, optimizer, 0)
    step(model, optimizer, 1)
    dcp.async_save(states(model, optimizer), checkpoint_id=folder).result()
    step(model, optimizer, 2)
    again, its_optimizer = made(world, dp)
    dcp.load(states(again, its_optimizer), checkpoint_id=folder)
    step(again, its_optimizer, 2)
    assert norms[-1] == norms[-2]
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local()), name
    return whole(model) | dict(norms=torch.tensor(norms))


@pytest.mark.slow
def test_the_loop_of_torchtitan(ranks, tmp_path):
    alone = ranks(1, trained, 1, str(tmp_path / "alone"))[0]
    for found in ranks(4, trained, 2, str(tmp_path / "split")):
        assert_close(found, alone, torch.float32)
