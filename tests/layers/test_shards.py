"""Specs of parameters by name, and of every parameter that is alive."""

import copy
import pickle

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize, prune

from tests.common import fake_tp
from tpfuse.layers import ColumnParallelLinear, RMSNorm, TransformerBlock
from tpfuse.layers.module import ParallelModule
from tpfuse.layers.shards import named_specs, wholes


def test_a_plain_module_is_replicated():
    class Mixed(ParallelModule):
        def __init__(self):
            super().__init__(None)
            self.plain = torch.nn.Linear(2, 3)
            self.ours = RMSNorm(4)

    specs = {name: (spec.shape, spec.dim) for name, _, spec, _ in named_specs(Mixed())}
    assert specs == {"plain.weight": ((3, 2), None), "plain.bias": ((3,), None), "ours.weight": ((4,), None)}


def test_names_are_those_without_the_wrappers_of_torch():
    block = TransformerBlock(8, 4)
    names = [name for name, _ in block.named_parameters()]
    block.mlp = checkpoint_wrapper(block.mlp)
    block.attention = torch.compile(block.attention)
    assert [name for name, *_ in named_specs(block)] == names != [name for name, _ in block.named_parameters()]


def test_what_torch_computes_a_parameter_from_is_a_slice_as_it_is():
    pruned = ColumnParallelLinear(4, 8, device="meta")  # of one rank: prune refuses slices
    parametrized = ColumnParallelLinear(4, 8, tp=fake_tp(2), device="meta")
    prune.identity(pruned, "weight")
    parametrize.register_parametrization(parametrized, "weight", torch.nn.Identity())
    for layer, leaf in (pruned, "weight_orig"), (parametrized, "parametrizations.weight.original"):
        specs = {name: (spec.shape, spec.dim) for name, _, spec, _ in named_specs(layer)}
        assert specs == {"bias": ((8,), 0), leaf: ((8, 4), 0)}


def test_wholes_know_every_living_parameter():
    """Also those of copied and unpickled modules, and those that to_empty has put in others' places; no dead ones."""
    with torch.device("meta"):
        made = TransformerBlock(8, 4)
    made.to_empty(device="cpu")
    for block in made, copy.deepcopy(made), pickle.loads(pickle.dumps(made)):
        known = wholes()
        for name, _, spec, tp in named_specs(block):
            assert known[block.get_parameter(name)] == (spec, tp)
    gone = {id(p) for p in block.parameters()}
    del block, known
    assert gone.isdisjoint({id(p) for p in wholes()})
