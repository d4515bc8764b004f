"""Tools that send parameters over a group: refused where its ranks hold different slices, and right where not."""

import copy
import os
import pickle
import unittest.mock
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

from tests.common import assert_close, make_tp
from tests.models.common import GPT_CONFIG, batch, whole
from tests.training.foreign.common import Double
from tpfuse import TensorParallel, as_dtensor, clip_grad_norm_
from tpfuse.layers import ColumnParallelLinear, LayerNorm, ParallelAttention
from tpfuse.layers.shards import SplitParameter
from tpfuse.models import GPT
from tpfuse.training.foreign import groups

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
    return dict(delay_all_reduce_named_params=named, param_to_hook_all_reduce=model.input_norm.weight)


def parametrized(model):
    parametrize.register_parametrization(model.blocks[0].mlp.fc1, "weight", Double())
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


def of_dtensors(world):
    """-> the errors of DDP over the right group."""
    errors = []
    for wrap in (
        lambda model, mesh: DistributedDataParallel(model, process_group=mesh["dp"].get_group()),
        lambda model, mesh: DistributedDataParallel(model, device_mesh=mesh["dp"]),
        lambda model, mesh: replicate_ddp(model, device_mesh=mesh["dp"]),
    ):
        model, mesh = made(world, 1, EQUAL)
        as_dtensor(model, mesh)
        with pytest.raises(ValueError) as caught:
            wrap(model, mesh)
        errors.append(str(caught.value))
    return errors


def test_ddp_of_dtensors(ranks):
    for errors in ranks(2, of_dtensors):
        for name, message in zip(
            ("DistributedDataParallel", "DistributedDataParallel", "replicate"), errors, strict=True
        ):
            assert message.startswith(f"{name}: embedding.weight, ")
            assert message.endswith("is a DTensor, which FSDP2 takes; leave tpfuse.as_dtensor off")


CASES = [pytest.param(wrong, EQUAL, marks=[pytest.mark.slow] * (wrong == "compiled")) for wrong in WRONG]
CASES += [(wrong, CONFIG) for wrong in ("ddp", "fully_shard", "distribute_module")]  # slices of two shapes


@pytest.mark.parametrize("wrong, config", CASES)
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


# ---- what is right stays right ----


def over_dp(cls):
    return lambda model, mesh: cls(model, process_group=mesh["dp"].get_group())


def fsdp(model, mesh, *, tool=fully_shard, over="dp", dtensor=True):
    if dtensor:
        as_dtensor(model, mesh)
    for module in (*model.blocks, model):
        tool(module, mesh=mesh[over])
    return model


def after_a_refusal(model, mesh):
    for tool in fully_shard, replicate_fsdp, replicate_ddp:
        with pytest.raises(ValueError, match="hold different slices"):
            tool(model)
    return fsdp(model, mesh)


def the_rest_ignored(model, mesh):
    """What DDP is told to leave alone may differ."""
    model._ddp_params_and_buffers_to_ignore = [n for n, p in model.named_parameters() if "norm" not in n]
    return DistributedDataParallel(model)


RIGHT = {
    "ddp": over_dp(DistributedDataParallel),
    "a subclass": over_dp(Mine),
    "ddp over dp's mesh": lambda model, mesh: DistributedDataParallel(model, device_mesh=mesh["dp"]),
    "the rest ignored": the_rest_ignored,
    "replicate": lambda model, mesh: replicate_ddp(model, process_group=mesh["dp"].get_group()),
    "the newer replicate": lambda model, mesh: fsdp(model, mesh, tool=replicate_fsdp),
    "fully_shard": fsdp,
    "fully_shard of plain shards": lambda model, mesh: fsdp(model, mesh, dtensor=False),
    "fully_shard after a refusal": after_a_refusal,
}


def gradients(world, right, dp):
    """-> full gradients of a batch that is every replica's"""
    model, mesh = made(world, dp, replace(CONFIG, dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0))
    replica = RIGHT[right](model.double(), mesh) if right else model.double()
    replica(**batch(CONFIG), first_sample=0).loss.backward()
    if right != "fully_shard of plain shards":
        return whole(model, grad=True)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if "norm" in name}


@pytest.mark.parametrize("right", RIGHT)
def test_ranks_that_hold_the_same_slices(ranks, right):
    exact = ranks(1, gradients, None, 1)[0]
    for found in ranks(4, gradients, right, 2):
        assert len(found) > 4
        assert_close(found, {name: exact[name] for name in found}, torch.float64)


def hybrid(world):
    """HSDP: a mesh of two dimensions, neither of them tp's."""
    mesh = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = GPT(CONFIG, tp=TensorParallel(mesh["tp"]))
    as_dtensor(model, mesh)
    fully_shard(model, mesh=mesh["replicate", "shard"])
    with pytest.raises(ValueError, match="fully_shard: .*rank 0, rank 1, rank 2, rank 3"):
        fully_shard(as_dtensor(GPT(CONFIG, tp=model.tp), mesh), mesh=mesh["replicate", "tp"])
    return model(**batch(CONFIG), first_sample=0).loss.item()


def test_a_mesh_of_replicas_of_two_kinds(ranks):
    assert len({round(loss, 4) for loss in ranks(4, hybrid)}) == 1


def plain(world):
    """Over every rank: modules without split parameters, beside a model that has some."""
    kept, mesh = made(world, 1, CONFIG)
    alone = GPT(CONFIG, seed=0)
    for model in nn.Linear(4, 4), LayerNorm(4, tp=kept.tp), alone:
        DistributedDataParallel(copy.deepcopy(model))
        fully_shard(copy.deepcopy(model))
        with pytest.raises(RuntimeError, match="accelerator"):  # torch's own, on a machine without one
            FullyShardedDataParallel(copy.deepcopy(model), device_mesh=mesh["tp"])
        replicate_ddp(copy.deepcopy(model))
        distribute_module(copy.deepcopy(model), mesh["tp"])
    for wrong, error in (
        (dict(module=nn.Linear(2, 2), nonsense=1), TypeError),
        (dict(module=kept, nonsense=1), TypeError),
    ):
        with pytest.raises(error, match="nonsense"):
            DistributedDataParallel(**wrong)


def test_whole_parameters_are_wrapped_as_ever(ranks):
    ranks(2, plain)


def copies(world):
    """Two kv heads on four ranks: ranks 0 and 1 hold one slice of them, ranks 1 and 2 two."""
    tp = make_tp(world)
    with torch.device("meta"):
        attention = ParallelAttention(48, 12, num_kv_heads=2, tp=tp)
    kv = [(name, SplitParameter(spec, tp)) for name, spec in attention.qkv.specs.items() if spec.copies > 1]
    assert kv
    return [groups._differ(whole, ranks) for _, whole in kv for ranks in ([0, 1], [2, 3], [1, 2], [0], [0, 1, 2, 3])]


def test_ranks_with_one_slice_between_them(ranks):
    every = ranks(4, copies)
    assert every[0][:5] == [False, False, True, False, True] and every == every[:1] * 4


def accelerated(world):
    """-> the error of accelerate where every rank is a replica to it, and the norms by which it and we clip"""
    accelerate = pytest.importorskip("accelerate")
    rank = {key: str(world.rank) for key in ("RANK", "LOCAL_RANK")}
    with unittest.mock.patch.dict(os.environ, WORLD_SIZE=str(world.size), LOCAL_WORLD_SIZE=str(world.size), **rank):
        accelerator = accelerate.Accelerator(cpu=True)
        try:
            assert accelerator.num_processes == world.size
            model, _ = made(world, 1, CONFIG)
            with pytest.raises(ValueError, match="accelerate.Accelerator.prepare: the model is split") as caught:
                accelerator.prepare(model)
            model(**batch(CONFIG)).loss.backward()
            return str(caught.value), accelerator.clip_grad_norm_(model.parameters(), 1e9), clip_grad_norm_(model, 1e9)
        finally:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
def test_accelerate(ranks):
    for message, theirs, ours in ranks(2, accelerated):
        assert "tpfuse.AcceleratorMixin" in message and torch.equal(theirs, ours)
