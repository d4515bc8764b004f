"""Modules made on the meta device: the weights are those of direct construction, bitwise, at every split."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from tests.common import assert_equal, make_tp
from tests.models.common import GPT_CONFIG, whole
from tpfuse import TensorParallel, as_dtensor, init_weights
from tpfuse.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    ParallelModule,
    TransformerBlock,
    VocabParallelEmbedding,
)
from tpfuse.models import GPT

LLAMA = replace(
    GPT_CONFIG,
    family="llama",
    norm="rms",
    gated=True,
    num_kv_heads=2,
    activation="silu",
    rope=dict(rope_type="default", rope_theta=1e4),
)


class Mine(torch.nn.Module):
    """A user's own: layers of tpfuse, of torch, a parallel layer of the user's, kv heads fewer than ranks."""

    def __init__(self, tp):
        super().__init__()
        self.embedding = VocabParallelEmbedding(97, 16, tp=tp)
        self.plain = torch.nn.Linear(16, 16)
        self.block = TransformerBlock(16, 8, num_kv_heads=2, out_init_std=0.01, tp=tp)
        self.mlp = ParallelMLP(16, 20, gated=True, tp=tp)
        self.own = Own(tp)
        self.head = ColumnParallelLinear(16, 96, tp=tp)


class Own(ParallelModule):
    def __init__(self, tp):
        super().__init__(tp)
        self.attention = ParallelAttention(16, 4, tp=tp)
        self.add_parameter("scale", (8,), 0, 0.1)
        self.initialize_alone()


def on_meta(make):
    with torch.device("meta"):
        module = make()
    assert all(p.is_meta for p in module.parameters())
    with pytest.raises(ValueError, match="init_weights: .*weight is on the meta device; call to_empty before"):
        init_weights(module, seed=3)
    module.to_empty(device="cpu")
    for p in module.parameters():
        p.data.fill_(torch.nan)
    return module


def own_module(world):
    tp = make_tp(world, False)
    torch.manual_seed(3)
    exact = Mine(tp)
    module, state = on_meta(lambda: Mine(tp)), torch.get_rng_state()
    assert init_weights(module, seed=3) is module and torch.equal(torch.get_rng_state(), state)
    assert_equal(dict(module.named_parameters()), dict(exact.named_parameters()))
    compares = lambda m: [n for n, x in m.named_modules() if getattr(x, "_agreement", None) is not None]
    assert compares(module) == compares(exact)
    for layer in (module.head, module.embedding):
        torch.manual_seed(5)
        layer.reset_parameters()
        torch.manual_seed(5)
        again = type(layer)(*((16, 96) if layer is module.head else (97, 16)), tp=tp)
        assert torch.equal(again.weight, layer.weight)
    init_weights(module, seed=3)
    return whole(module)


def test_a_module_of_layers(ranks):
    exact = ranks(1, own_module)[0]
    for R in (2, 4):
        for found in ranks(R, own_module):
            same = {k: v for k, v in found.items() if "qkv" not in k or R == 2 or "own" in k}
            assert_equal(same, {k: exact[k] for k in same})


def models(world, config):
    tp = make_tp(world)
    exact = GPT(config, tp=tp, seed=5)
    module = on_meta(lambda: GPT(config, tp=tp, seed=5))
    module.init_weights()
    assert_equal(dict(module.named_parameters()), dict(exact.named_parameters()))
    inside = on_meta(lambda: torch.nn.ModuleList([GPT(config, tp=tp, seed=5)]))
    assert_equal(dict(init_weights(inside, seed=3)[0].named_parameters()), dict(exact.named_parameters()))
    ids = torch.arange(14).view(2, 7)
    assert torch.equal(module.eval()(ids).logits, exact.eval()(ids).logits)
    half = exact.bfloat16()
    for other in (copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        assert_equal(dict(other.named_parameters()), dict(half.named_parameters()))
        assert type(other.state_dict()["embedding.weight"]) is type(half.state_dict()["embedding.weight"])
    return True


@pytest.mark.parametrize("config", [GPT_CONFIG, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("R", [1, 4])
def test_models(ranks, R, config):
    assert all(ranks(R, models, config))


def parallelized(world, config, dp):
    """Meta, parallelize, to_empty, init_weights."""
    mesh = world.mesh(dp, world.size // dp)
    with torch.device("meta"):
        model = GPT(config, tp=TensorParallel(mesh["tp"]), dp=mesh["dp"], seed=5)
    as_dtensor(model, mesh)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    model.init_weights()
    exact = GPT(config, tp=TensorParallel(mesh["tp"]), dp=mesh["dp"], seed=5)
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, exact.eval()(ids).logits)
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):  # after a forward: the root's are gathered
        assert p.to_local().shape == q.shape or dp > 1
    model.unshard()
    for block in model.blocks:
        block.unshard()
    assert_equal(
        {n: p.to_local().detach() for n, p in model.named_parameters()},
        {n: p.detach() for n, p in exact.named_parameters()},
    )
    return True


@pytest.mark.parametrize("config, dp", [(GPT_CONFIG, 2), (LLAMA, 1), (LLAMA, 4)])
def test_parallelized_on_meta(ranks, config, dp):
    assert all(ranks(4, parallelized, config, dp))


def test_a_module_without_reset_parameters():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.bare = torch.nn.Module()
            self.bare.scale = torch.nn.Parameter(torch.ones(2))

    module = Bare()
    before = copy.deepcopy(module)
    with pytest.raises(ValueError, match="init_weights: Module bare has scale of its own and no reset_parameters"):
        init_weights(module, seed=0)
    assert_equal(dict(module.named_parameters()), dict(before.named_parameters()))


def test_a_layer_with_a_parameter_that_no_spec_describes():
    class Scaled(ColumnParallelLinear):
        def __init__(self):
            super().__init__(2, 2)
            self.scale = torch.nn.Parameter(torch.ones(2))

    class Reset(Scaled):
        def reset_parameters(self):
            super().reset_parameters()
            torch.nn.init.ones_(self.scale)

    with pytest.raises(ValueError, match="init_weights: Scaled 0 has scale of its own and no reset_parameters"):
        init_weights(torch.nn.Sequential(Scaled()), seed=0)
    assert torch.equal(init_weights(on_meta(Reset), seed=0).scale, torch.ones(2))
