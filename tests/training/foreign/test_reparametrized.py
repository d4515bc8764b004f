"""weight_norm, spectral_norm, orthogonal and prune need the whole of a weight: refused where it is split."""

import copy
import warnings

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import LlamaConfig, LlamaForCausalLM

from tests.common import assert_equal, make_tp
from tests.training.foreign.common import Double
from tpfuse import parallelize
from tpfuse.kernels import Routing
from tpfuse.layers import (
    ColumnParallelLinear,
    ParallelMoE,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    KINDS = {
        "weight_norm": (parametrizations.weight_norm, torch.nn.utils.weight_norm),
        "spectral_norm": (parametrizations.spectral_norm, torch.nn.utils.spectral_norm),
        "orthogonal": (parametrizations.orthogonal,),
    }


def refused(world):
    layer, norm = ColumnParallelLinear(4, 8, tp=make_tp(world, False)), RMSNorm(4, tp=make_tp(world, False))
    before, names = dict(layer.named_parameters()), layer.__dict__.keys()
    for first in (False, True):  # the second: beside a parametrization that may stay
        for name, functions in KINDS.items():
            for function in functions[: 1 if first else None]:
                with pytest.raises(ValueError, match=f"{name}: weight of .*Linear is split over {world.size} ranks"):
                    function(layer)
                assert not layer._forward_pre_hooks or len(layer._forward_pre_hooks) == 1  # the comparison of calls
        if not first:
            assert dict(layer.named_parameters()).keys() == before.keys() and layer.__dict__.keys() == names
            assert all(layer.get_parameter(k) is p for k, p in before.items())
            parametrize.register_parametrization(layer, "weight", Double())
    x = torch.randn(3, 4)
    twice = torch.nn.functional.linear(x, 2 * layer.parametrizations.weight.original, layer.bias)
    torch.testing.assert_close(layer(x), twice)
    parametrize.register_parametrization(norm, "weight", Double())  # replicated: as torch has it
    assert (norm.weight == 2).all()
    return True


def test_a_split_weight_is_refused(ranks):
    assert all(ranks(2, refused))


LAYERS = {
    "embedding": lambda tp: (VocabParallelEmbedding(10, 8, tp=tp), ["weight"]),
    "head": lambda tp: (VocabParallelHead(8, 10, bias=True, tp=tp), ["weight", "bias"]),
    "experts": lambda tp: (
        ParallelMoE(8, 6, 4, Routing(2), shared_size=4, shared_gate=True, tp=tp),
        ["router", "fc1", "fc2", "shared_fc1", "shared_fc2", "shared_gate"],
    ),
    "linear": lambda tp: (ColumnParallelLinear(8, 4, tp=tp), ["weight", "bias"]),
}


def doubled(world, name, parametrized):
    """-> a layer's results and gradients, of parameters that are doubled, or parametrized so."""
    layer, names = LAYERS[name](make_tp(world, False))
    layer.double()
    x = (
        torch.arange(6)
        if name == "embedding"
        else torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).double()
    )
    for leaf in names:
        if parametrized:
            parametrize.register_parametrization(layer, leaf, Double())
        else:
            layer.get_parameter(leaf).data.mul_(2)
    y = layer(x)
    y.square().sum().backward()
    inner = [
        getattr(layer.parametrizations, leaf).original if parametrized else layer.get_parameter(leaf) for leaf in names
    ]
    return {"y": y.detach()} | {leaf: p.grad / (1 + parametrized) for leaf, p in zip(names, inner, strict=True)}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_computes_with_its_parametrized_weights(ranks, name):
    for found, exact in zip(ranks(2, doubled, name, True), ranks(2, doubled, name, False), strict=True):
        assert_equal(found, exact)


def tables(world):
    """-> the loss of a model of transformers whose two tables are doubled, if torch's parametrizations can be had."""
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=10)
    torch.manual_seed(0)
    model, ids = LlamaForCausalLM(config), torch.arange(8)[None]
    doubled = copy.deepcopy(model)
    parallelize(model, make_tp(world, False))
    for layer, plain in zip(*([m.get_input_embeddings(), m.get_output_embeddings()] for m in (model, doubled))):
        if world.size == 1:
            parametrize.register_parametrization(layer, "weight", Double())
            plain.weight.data.mul_(2)
            continue
        with pytest.raises(ValueError, match="register_parametrization: weight of .* shows the whole table"):
            parametrize.register_parametrization(layer, "weight", Double())
    return model(ids, labels=ids).loss.item(), doubled(ids, labels=ids).loss.item()


@pytest.mark.parametrize("size", [1, 2])
def test_tables_that_show_the_whole(ranks, size):
    for found, exact in ranks(size, tables):
        assert abs(found - exact) < 1e-6


def pair(layer):
    return [(layer, "bias"), (layer, "weight")]


PRUNED = {
    "Identity": lambda layer: prune.identity(layer, "weight"),
    "RandomUnstructured": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "L1Unstructured": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "RandomStructured": lambda layer: prune.random_structured(layer, "weight", 0.5, dim=0),
    "LnStructured": lambda layer: prune.ln_structured(layer, name="weight", amount=4, n=2, dim=0),
    "CustomFromMask": lambda layer: prune.custom_from_mask(layer, "weight", torch.ones_like(layer.weight)),
    "global_unstructured": lambda layer: prune.global_unstructured(pair(layer), prune.L1Unstructured, amount=0.5),
}


def refused_masks(world):
    layer, norm = RowParallelLinear(8, 6, tp=make_tp(world, False)), RMSNorm(6, tp=make_tp(world, False))
    before = {**layer.state_dict()}
    for name, function in PRUNED.items():
        message = f"prune.{name}: weight of RowParallelLinear is split over {world.size} ranks"
        with pytest.raises(ValueError, match=message):
            function(layer)
        assert layer.state_dict().keys() == before.keys()  # of the two of global_unstructured one is replicated
    prune.l1_unstructured(norm, "weight", 2)
    prune.global_unstructured([(layer, "bias"), (torch.nn.Linear(2, 2), "weight")], prune.L1Unstructured, amount=0.5)
    return sorted(norm.weight.tolist()), "bias_mask" in layer.state_dict()


def test_a_mask_of_a_split_weight_is_refused(ranks):
    for replicated, whole in ranks(2, refused_masks):
        assert replicated == [0, 0, 1, 1, 1, 1] and whole


@pytest.mark.parametrize("name", PRUNED)
def test_one_rank_prunes_as_torch_does(name):
    layer, plain = RowParallelLinear(8, 6), torch.nn.Linear(8, 6)
    plain.load_state_dict(layer.state_dict())
    for module in (layer, plain):
        torch.manual_seed(0)
        PRUNED[name](module)
    assert_equal(dict(layer.state_dict()), dict(plain.state_dict()))


@pytest.mark.filterwarnings("ignore")
def test_one_rank_has_them_all():
    for functions in KINDS.values():
        for function in functions:
            layer, plain = ColumnParallelLinear(4, 8, bias=False), torch.nn.Linear(4, 8, bias=False)
            plain.load_state_dict(layer.state_dict())
            torch.manual_seed(0)
            function(layer)
            torch.manual_seed(0)
            function(plain)
            assert_equal({"weight": layer.weight.detach()}, {"weight": plain.weight.detach()})
