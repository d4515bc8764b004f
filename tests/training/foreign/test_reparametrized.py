"""weight_norm, spectral_norm, orthogonal and prune need the whole of a weight: refused where it is split."""

import warnings

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune

from tests.common import assert_equal, make_tp
from tests.training.foreign.common import Double
from tpfuse.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear

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
