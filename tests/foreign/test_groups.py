"""Tools that send parameters over a group: refused where its ranks hold different slices, and right where not."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate as replicate_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from tests.models.common import GPT_CONFIG
from tpfuse import TensorParallel, as_dtensor
from tpfuse.layers import ColumnParallelLinear
from tpfuse.models import GPT

CONFIG = replace(GPT_CONFIG, num_layers=1)  # 97 words: ranks have slices of two shapes
EQUAL = replace(CONFIG, vocab_size=96)


class Deep(nn.Module):
    """A user's module with a parallel layer somewhere inside."""

    def __init__(self, tp):
        super().__init__()
        self.plain = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), ColumnParallelLinear(4, 8, tp=tp))})


class Mine(DistributedDataParallel):
    def __init__(self, module, **options):
        super().__init__(module, **options)


def frozen(model):
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name)
    return model


def delayed(model):
    named = [(name, p) for name, p in model.named_parameters() if "norm" not in name]
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in named]
    return dict(delay_all_reduce_named_params=named, param_to_hook_all_reduce=model.norm_in.weight)


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


def parametrized(model):
    parametrize.register_parametrization(model.blocks[0].mlp.fc1, "weight", Halved())
    for p in model.parameters():
        p.requires_grad_(False)
    inner = model.blocks[0].mlp.fc1.parametrizations
    return nn.ModuleList([inner.requires_grad_()])


def default_group(model, mesh):
    return DistributedDataParallel(model)


WRONG = {
    "ddp": default_group,
    "ddp by position": lambda model, mesh: DistributedDataParallel(model, None, None, 0, None, True, dist.group.WORLD),
    "ddp without a first sync": lambda model, mesh: DistributedDataParallel(model, init_sync=False),
    "ddp over tp": lambda model, mesh: DistributedDataParallel(model, process_group=mesh["tp"].get_group()),
    "ddp over tp's mesh": lambda model, mesh: DistributedDataParallel(model, device_mesh=mesh["tp"]),
    "a subclass": lambda model, mesh: Mine(model),
    "compiled": lambda model, mesh: DistributedDataParallel(torch.compile(model)),
    "a copy": lambda model, mesh: DistributedDataParallel(copy.deepcopy(model)),
    "a pickle": lambda model, mesh: DistributedDataParallel(pickle.loads(pickle.dumps(model))),
    "moved": lambda model, mesh: DistributedDataParallel(model.to(torch.bfloat16)),
    "frozen": lambda model, mesh: DistributedDataParallel(frozen(model)),
    "delayed": lambda model, mesh: DistributedDataParallel(model, **delayed(model)),
    "parametrized": lambda model, mesh: DistributedDataParallel(parametrized(model)),
    "deep": lambda model, mesh: DistributedDataParallel(Deep(model.tp)),
    "replicate": lambda model, mesh: replicate_ddp(model),
    "replicate over tp": lambda model, mesh: replicate_ddp(model, device_mesh=mesh["tp"]),
    "the newer replicate": lambda model, mesh: replicate_fsdp(model),
    "the newer replicate over tp": lambda model, mesh: replicate_fsdp(model, mesh=mesh["tp"]),
    "fully_shard": lambda model, mesh: fully_shard(model),
    "fully_shard over both": lambda model, mesh: fully_shard(model, mesh=mesh),
    "fully_shard of a list": lambda model, mesh: fully_shard([model.blocks[0], model.embedding], mesh=mesh["tp"]),
    "fully_shard of DTensors": lambda model, mesh: fully_shard(as_dtensor(model, mesh), mesh=mesh["tp"]),
    "fsdp1": lambda model, mesh: FullyShardedDataParallel(model),
    "fsdp1 over dp": lambda model, mesh: FullyShardedDataParallel(model, process_group=mesh["dp"].get_group()),
    "distribute_tensor": lambda model, mesh: distribute_tensor(model.embedding.weight, mesh["tp"], [Shard(0)]),
    "distribute replicated": lambda model, mesh: distribute_tensor(
        model.embedding.weight.data, mesh, [Replicate()] * 2
    ),
    "distribute_module": lambda model, mesh: distribute_module(model, mesh["tp"]),
}


def made(world, dp, config):
    mesh = world.mesh(dp, world.size // dp)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True)
    return GPT(config, tp=tp, dp=mesh["dp"]), mesh


def refused(world, wrong, dp, config):
    """-> the error, and whether every parameter is what it was and the model still runs"""
    model, mesh = made(world, dp, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    hooks = len(model._forward_pre_hooks)
    with pytest.raises(ValueError) as caught:
        WRONG[wrong](model, mesh)
    after = dict(model.named_parameters())
    kept = [
        torch.equal(before[name], getattr(p, "_local_tensor", p).detach())
        for name, p in after.items()
        if name in before
    ]
    return str(caught.value), all(kept) and len(kept) > 5, len(model._forward_pre_hooks) == hooks


@pytest.mark.parametrize("config", [CONFIG, EQUAL], ids=["two shapes", "one shape"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_group_that_holds_several_slices(ranks, wrong, config):
    every = ranks(2, refused, wrong, 1, config)
    message, kept, clean = every[0]
    assert all(each == (message, kept, clean) for each in every)
    assert (kept or wrong == "moved") and clean and "hold different slices of" in message
    cure = "tpfuse.as_dtensor(model, mesh)" if "distribute" in wrong or "fsdp1" in wrong else 'mesh["dp"]'
    assert cure in message
    assert ("as_dtensor(model, mesh) first" in message) == (wrong in AS_DTENSOR)


AS_DTENSOR = {
    "the newer replicate",
    "the newer replicate over tp",
    "fully_shard",
    "fully_shard over both",
    "fully_shard of a list",
}


@pytest.mark.parametrize("wrong", ["ddp", "ddp over tp", "fully_shard over both", "replicate"])
def test_the_error_is_one_on_a_mesh_of_two_dimensions(ranks, wrong):
    every = ranks(4, refused, wrong, 2, CONFIG)
    assert all(kept and clean and "hold different slices of embedding.weight" in m for m, kept, clean in every)
    assert len({message for message, *_ in every}) == (2 if wrong == "ddp over tp" else 1)  # whose groups are two
