"""The tensors of a run in the order of execution; at one rank and several bits part in the op that is named."""

import pytest
import torch
from torch import nn

from tests.bitwise.training import KINDS
from tpfuse import TensorParallel, check_parity
from tpfuse.collectives import collect, split
from tpfuse.kernels.runtime import op
from tpfuse.kernels.runtime.function import is_observed, observed
from tpfuse.layers import ColumnParallelLinear, ParallelMLP, RMSNorm, RowParallelLinear, TransformerBlock
from tpfuse.models import GPT, Bert, BertConfig
from tpfuse.sequence_parallel.forms import leafwise
from tpfuse.tools.bits.trace import Key, trace

IDS = torch.arange(39).view(3, 13)
CALL = dict(input_ids=IDS, labels=IDS, step=0, first_sample=0)


def _loss(outputs):
    return outputs["loss"]


def _make(kind, **options):
    cls, more = (Bert, dict(masked_lm=True)) if isinstance(KINDS[kind], BertConfig) else (GPT, {})
    return lambda tp: cls(KINDS[kind], tp=tp, seed=3, **more, **options)


@pytest.mark.parametrize("saving", [dict(saving="fastest"), dict(saving="smallest"), dict(recompute="full")], ids=str)
def test_the_order_of_execution(saving):
    keys = list(trace(_make("gpt2", **saving)(None), CALL, TensorParallel(), loss=_loss, ops=True))
    place = lambda kind, name, number=0: keys.index(Key(kind, name, number))
    names = "blocks.0.attention.qkv gather_linear", "blocks.0 attention", "blocks.0.attention.out linear_exchange"
    names += ("blocks.0.mlp gather_mlp_exchange", "blocks.1.attention.qkv gather_linear")
    forward, backward = ([place(kind, name) for name in names] for kind in ("op", "gradient of op"))
    loss = place("loss", "loss")
    assert forward == sorted(forward) and backward == sorted(backward, reverse=True)
    assert place("weight", "embedding.weight") < forward[0] and forward[-1] < loss < backward[-1]
    # a layer's weights have their gradients before what ran before it has its own
    assert place("gradient", "blocks.1.mlp.fc1.weight") < place(
        "gradient of op", "blocks.1.attention.out linear_exchange"
    )
    assert place("gradient", "embedding.weight") > backward[0]


def test_a_run_is_as_without():
    """Observed, a block on one rank runs its ops one by one, with the same bits; afterwards all is as before."""
    model = _make("gpt2")(None)
    traced = trace(model, CALL, TensorParallel(), loss=_loss, ops=True)
    gradients = [p.grad.clone() for p in model.parameters()]
    hooks = lambda: [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    before = hooks()
    model.zero_grad()
    loss = model(**CALL).loss
    loss.backward()
    assert torch.equal(loss, traced[Key("loss", "loss")].tensor) and not is_observed()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    trace(model, CALL, TensorParallel(), loss=_loss, ops=True)
    assert hooks() == before


def test_observers_see_calls_and_go():
    calls = []
    with observed(lambda function, args, outputs: calls.append(function.__name__)):
        _make("gpt2")(None)(**CALL)
    assert "GatherLinear" in calls and "_BlockNode" not in calls
    seen = len(calls)
    _make("gpt2")(None)(**CALL)
    assert len(calls) == seen


# ---- where bits part ----


class Own(nn.Module):
    """A model as a user writes one."""

    def __init__(self, tp):
        super().__init__()
        self.block = TransformerBlock(64, 8, tp=tp)
        self.tp = self.block.tp
        self.norm, self.mlp = RMSNorm(64, tp=self.tp), ParallelMLP(64, 128, tp=self.tp)
        self.up, self.down = ColumnParallelLinear(64, 96, tp=self.tp), RowParallelLinear(96, 64, tp=self.tp)

    def forward(self, x):
        h = split(x, self.tp) if self.tp.row_shards > 1 else x
        h = self.mlp(self.norm(self.block(h, batch=2, seq=8)))
        h = self.down(torch.relu(self.up(h)))
        return collect(h, self.tp) if self.tp.row_shards > 1 else h


def _own(world, sequence_parallel, bitwise):
    tp = TensorParallel(world.group, sequence_parallel=sequence_parallel, bitwise=bitwise)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    return check_parity(Own, dict(x=x), tp, bitwise=True)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no sp"])
def test_a_users_modules(ranks, sequence_parallel):
    for parity in ranks(4, _own, sequence_parallel, 8):
        assert parity.same and not parity.skipped and str(parity).endswith("the same bits"), str(parity)
        names = {(row.kind, row.name) for row in parity.rows}
        assert {("op", "down linear_exchange"), ("gradient of output", "up"), ("input gradient", "x")} <= names
    (first, *_) = (parity.first_difference for parity in ranks(4, _own, sequence_parallel, None))
    assert (first.kind, first.name) == ("op", "block.attention.out linear_exchange")
    assert 0 < first.differ <= first.elements == 16 * 64 and first.ulps > 0


def _parity(world, kind, bitwise, mistake):
    where, name, replacement = FAULTS[mistake]
    right = getattr(where, name)
    tp = TensorParallel(world.group, sequence_parallel=True, bitwise=bitwise)
    setattr(where, name, replacement)
    try:
        return check_parity(_make(kind), CALL, tp, bitwise=True)
    finally:
        setattr(where, name, right)


# By what is wrong: where it stands, and in its place.
FAULTS = {
    "nothing": (op, "tree", op.tree),
    "a row-parallel GEMM": (leafwise, "row_fwd", lambda x, w, leaf, tile: x @ w.t()),
    "a dgrad": (leafwise, "column_dgrad", lambda dy, w, leaf: dy @ w),
}
FIRST = {
    "a row-parallel GEMM": ("op", "blocks.0.attention.out linear_exchange"),
    "a dgrad": ("gradient of op", "blocks.1 reduce_bias_dropout_add_norm (4)"),
}


@pytest.mark.parametrize("mistake", ["a row-parallel GEMM", pytest.param("a dgrad", marks=pytest.mark.slow)])
def test_the_first_op_is_named(ranks, mistake):
    for parity in ranks(4, _parity, "gpt2 odd", 8, mistake):
        first = parity.first_difference
        assert (first.kind, first.name) == FIRST[mistake] and f"the first that differs: {first}" in str(parity)


# without leaves, a model with fewer kv heads than ranks has other parameters there
COMPARED = [(kind, bitwise) for kind, config in KINDS.items() for bitwise in (8, None)
            if bitwise or getattr(config, "kv_heads", 4) >= 4]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind, bitwise", COMPARED)
def test_kinds(ranks, kind, bitwise):
    for parity in ranks(4, _parity, kind, bitwise, "nothing"):
        assert not parity.skipped and (parity.same == (bitwise == 8)), str(parity)
        if bitwise is None:
            of_all_heads = getattr(KINDS[kind], "qk_norm_all", False)  # norms whose means are over ranks come before
            first = "blocks.0 attention" if of_all_heads else "blocks.0.attention.out linear_exchange"
            assert parity.first_difference.name == first
