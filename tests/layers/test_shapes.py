"""Shapes of layers: one default a thing, in a block, in its parts and in their records; names that shadow nothing."""

import builtins
import functools
import inspect
import sys

import pytest
import torch

from tpfuse import layers
from tpfuse.layers import AttentionShape, MLPShape, ParallelAttention, ParallelMLP, TransformerBlock


def defaults(of):
    parameters = inspect.signature(of).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@pytest.mark.parametrize("part", [ParallelAttention, ParallelMLP, AttentionShape, MLPShape])
def test_a_part_has_the_defaults_of_a_block(part):
    block, of_part = defaults(TransformerBlock), defaults(part)
    common = block.keys() & of_part.keys()
    assert {"causal", "activation"} & common
    assert {name: of_part[name] for name in common} == {name: block[name] for name in common}


def test_a_block_of_parts_is_the_block():
    torch.manual_seed(0)
    block, x = TransformerBlock(16, 4), torch.randn(6, 16)
    attention, mlp = ParallelAttention(16, 4), ParallelMLP(16, 64)
    attention.load_state_dict(block.attention.state_dict())
    mlp.load_state_dict(block.mlp.state_dict())
    h = x + attention(block.input_norm(x), batch=2)
    torch.testing.assert_close(h + mlp(block.attention_norm(h)), block(x, batch=2))


def test_a_star_import_shadows_nothing_of_python():
    of_python = {*dir(builtins), *sys.stdlib_module_names, *dir(functools)}
    assert of_python & set(layers.__all__) == set() and {"collect", "gather", "scatter_sum"} <= set(layers.__all__)
