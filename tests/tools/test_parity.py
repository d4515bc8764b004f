"""A model that is the same at any split is found so, and one that is not is found by its first tensor that differs."""

import pytest
import torch
from torch import nn

from tests.common import make_tp
from tests.models.common import MODELS, batch
from tpfuse import check_parity
from tpfuse.collectives import collect, gather, split
from tpfuse.layers import ColumnParallelLinear, ParallelMLP, RMSNorm, TransformerBlock

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Own(nn.Module):
    """A model as a user writes one; ``fault`` is what its author got wrong."""

    def __init__(self, tp, sp, fault=""):
        super().__init__()
        self.fault, self.sp = fault, sp
        self.enter = nn.Linear(16, 32)
        self.block = TransformerBlock(32, 4, tp=tp, dropout=0.1)
        self.norm = nn.LayerNorm(32) if fault == "plain norm" else RMSNorm(32, tp=tp)
        self.mlp = ParallelMLP(32, 64, tp=tp)
        self.head = ColumnParallelLinear(32, 20, tp=tp)
        self.tp = self.block.tp

    def forward(self, x, rng):
        h = self.enter(x)
        h = split(h, self.tp) if self.tp.row_shards > 1 else h
        h = self.norm(self.block(h, batch=2, seq=4, rng=rng))
        if self.fault == "a rank computes otherwise" and self.tp.rank == 1:
            h = h * 1.001
        h = self.mlp(h)
        out = self.head(h)
        return {
            "": out,
            "gather": gather(out, self.tp, dim=-1),
        }.get(self.fault, collect(out, self.tp, dim=-1))


def own(world, sp, dtype, fault):
    def make(tp):
        torch.set_default_dtype(dtype)
        try:
            return Own(tp, sp, fault)
        finally:
            torch.set_default_dtype(torch.float32)

    found = check_parity(make, dict(x=X.to(dtype), rng=torch.tensor([1, 2, 3])), make_tp(world, sp))
    first = None if found.first_difference is None else (found.first_difference.kind, found.first_difference.name)
    return first, found.skipped, str(found), {(row.kind, row.name): row.split / row.limit for row in found.rows}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sp", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["sp", "no sp"])
@pytest.mark.parametrize("R", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_right_model(ranks, R, sp, dtype):
    (first, skipped, text, rows), *others = ranks(R, own, sp, dtype, "")
    assert first is None and not skipped and text.endswith("the same to rounding"), text
    assert all(other[1:] == (skipped, text, rows) for other in others)
    assert {
        ("weight", "enter.weight"),
        ("output", "block"),
        ("output", "head"),
        ("output", "the result"),
        ("input gradient", "x"),
        ("gradient", "block.attention.qkv.weight"),
    } <= rows.keys()


@pytest.mark.parametrize(
    "fault, sp, first",
    [
        ("plain norm", True, ("gradient", "norm.weight")),
        ("gather", False, ("input gradient", "x")),
        ("a rank computes otherwise", False, ("output", "mlp")),
    ],
)
def test_a_fault_is_found(ranks, fault, sp, first):
    for found, _, text, _ in ranks(2, own, sp, torch.float32, fault):
        assert found == first, text


def model(world, name):
    cls, config, options = MODELS[name]
    make = lambda tp: cls(config, tp=tp, **options)
    call = batch(config, pad="right") | dict(step=0, first_sample=0)
    if name == "bert":
        del call["labels"]
    found = check_parity(make, call, make_tp(world))
    return str(found), found.same


@pytest.mark.parametrize("name", MODELS)
def test_the_models(ranks, name):
    for text, same in ranks(2, model, name):
        assert same, text


def unlike(world):
    make = lambda tp: nn.Linear(16, 4, bias=tp is None)
    with pytest.raises(
        ValueError, match="check_parity: gradient bias, weight bias is there on one rank or split, and not in both"
    ):
        check_parity(make, dict(input=X), make_tp(world))


def test_other_parameters_are_named(ranks):
    ranks(2, unlike)
