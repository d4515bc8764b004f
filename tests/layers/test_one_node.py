"""A block as one autograd node is bitwise the block whose ops are nodes of their own."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.common import make_tp
from tests.planted import planted
from tpfuse import TensorParallel
from tpfuse.kernels import replay
from tpfuse.kernels.gemm.op import activation_bwd, activation_fwd, linear_dgrad_act, linear_fwd
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import Normed, Rope, TransformerBlock, one_node
from tpfuse.tools.ledger import saved_bytes

D, HEADS, BATCH, SEQ = 16, 4, 2, 6
KINDS = {
    "post-norm": dict(wiring="post", causal=False, activation="gelu"),
    "pre-norm": dict(),
    "stack": dict(place="inner"),
    "stack, post-norm": dict(place="inner", wiring="post", causal=False),
    "llama": dict(norm="rms", gated=True, activation="silu", bias=False, num_kv_heads=2, place="inner"),
    "no dropout": dict(dropout=0.0, attention_dropout=0.0),
    "parallel": dict(wiring="parallel"),
    "stack, parallel": dict(wiring="parallel", place="inner", norm="rms", bias=False),
    "sandwich": dict(wiring="sandwich"),
    "stack, sandwich": dict(
        wiring="sandwich", place="inner", norm="gemma_rms", bias=False, activation="gelu_tanh", gated=True
    ),
    "branch norms": dict(wiring="branch", norm="rms"),
    "stack, branch norms": dict(wiring="branch", place="inner", norm="rms"),
    "last, branch norms": dict(wiring="branch", place="last"),
    "by leaves": dict(tp=TensorParallel(bitwise=4)),
    "llama by leaves": dict(
        tp=TensorParallel(bitwise=2),
        norm="rms",
        gated=True,
        activation="silu",
        bias=False,
        num_kv_heads=2,
        place="inner",
    ),
    "branch norms by leaves": dict(wiring="branch", norm="rms", tp=TensorParallel(bitwise=4)),
}


def counting(calls):
    def counted(right, *args):
        calls.append(1)
        return right(*args)

    return counted


@pytest.fixture
def nodes(planted):
    """A list with an element for each block that ran as one node."""
    calls = []
    planted("tpfuse.layers.block.one_node", counting(calls))
    return calls


def make(kind, dtype=torch.float64, **more):
    torch.manual_seed(0)
    options = dict(dropout=0.1, attention_dropout=0.1) | KINDS[kind] | more
    made = TransformerBlock(D, HEADS, dtype=dtype, layer=2, **options)
    for p in made.parameters():
        nn.init.normal_(p, std=0.3)
    return made


def inputs(kind, dtype=torch.float64, rows=SEQ * BATCH):
    torch.manual_seed(1)
    count = 2 if "place" in KINDS[kind] else 1
    return [torch.randn(rows, D, dtype=dtype, requires_grad=True) for _ in range(count)]


def call(block, xs, **options):
    options = dict(batch=BATCH, rng=make_rng(3, 5)) | options
    if len(xs) == 1:
        return [block(xs[0], **options)]
    h, normed = block(xs[0], Normed(xs[1][None]), **options)
    return [h, normed.n]


def gradients(outputs, wanted):
    g = [torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y) for y in outputs]
    return torch.autograd.grad(outputs, wanted, g, allow_unused=True)


def run(block, xs, **options):
    outputs = call(block, xs, **options)
    wanted = [t for t in (*xs, *block.parameters()) if t.requires_grad]
    return [*outputs, *gradients(outputs, wanted)]


def by_ops(function, *args, **options):
    """The function's result where blocks never run as one node."""
    with planted("tpfuse.layers.block.TransformerBlock._is_one_node", lambda *_: False):
        return function(*args, **options)


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(nodes, kind, dtype):
    block, xs = make(kind, dtype), inputs(kind, dtype)
    ours = run(block, xs)
    assert len(nodes) == 1
    assert_same(ours, by_ops(run, block, xs))
    assert len(nodes) == 1 and all(y.abs().max() > 0.01 for y in ours)


ROPE = Rope(torch.randn(SEQ, 2), torch.randn(SEQ, 2))
CALLS = {
    "rows beyond the positions": dict(seq=SEQ - 1),
    "attention_mask": dict(attention_mask=torch.ones(BATCH, SEQ, dtype=torch.long).index_fill(1, torch.tensor(2), 0)),
    "packed": dict(batch=1, cu_seqlens=torch.tensor([0, 5, 12], dtype=torch.int32), max_seqlen=7),
    "rope": dict(rope=ROPE),
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kind", ["pre-norm", "llama"])
def test_arguments(nodes, kind, options):
    block, xs = make(kind), inputs(kind)
    assert_same(run(block, xs, **options), by_ops(run, block, xs, **options))
    assert len(nodes) == 1


FREEZE = "qkv.weight", "qkv.bias", "out.weight", "fc1.weight", "fc1.bias", "fc2.weight", "attention_norm.weight"


@pytest.mark.parametrize("frozen", [*itertools.combinations(FREEZE, 1), FREEZE, ("",)], ids="+".join)
@pytest.mark.parametrize("kind", ["pre-norm", "stack"])
def test_frozen(kind, frozen):
    block, xs = make(kind), inputs(kind)
    for name, p in block.named_parameters():
        p.requires_grad_(not name.endswith(frozen))
    assert_same(run(block, xs), by_ops(run, block, xs))


@pytest.mark.parametrize("kind", ["pre-norm", "stack", "post-norm"])
def test_inputs_without_a_gradient(kind):
    block, xs = make(kind), [x.detach() for x in inputs(kind)]
    assert_same(run(block, xs), by_ops(run, block, xs))


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_of_two_is_used(used):
    block, xs = make("stack"), inputs("stack")

    def one():
        wanted = [*xs, *block.parameters()]
        made = gradients(call(block, xs)[used : used + 1], wanted)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(made, wanted, strict=True)]

    assert_same(one(), by_ops(one))


def test_gradcheck():
    block = make("stack", dropout=0.2)
    names, parameters = zip(*((n, p.detach().clone().requires_grad_()) for n, p in block.named_parameters()))

    def forward(h, n, *weights):
        made = torch.func.functional_call(block, dict(zip(names, weights)), (h, Normed(n[None])), call_options)
        return made[0], made[1].n

    call_options = dict(batch=BATCH, rng=make_rng(3, 5))
    assert torch.autograd.gradcheck(forward, (*inputs("stack", rows=4), *parameters), fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_saved_are_the_same(kind):
    block, xs = make(kind), inputs(kind)

    def bytes_of():
        with saved_bytes(block) as saved:
            kept = call(block, xs)  # noqa: F841  # alive while they are counted
        return saved()

    assert bytes_of() <= by_ops(bytes_of)


@pytest.mark.parametrize("frozen", ["", "fc1.weight"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "leaves" not in kind])  # ways of a CPU are tried out
def test_a_replay_of_the_whole_block(monkeypatch, kind, frozen):
    """Bitwise the block itself, on other tensors than those it was recorded with; a CPU's ops stand for kernels."""
    monkeypatch.setattr(replay.calls, "LAUNCHED", {"cpu"})
    monkeypatch.setattr(replay.calls, "stream_of", lambda device: 0)
    functions = one_node._forward, one_node._backward
    for function in functions:
        monkeypatch.setattr(function, "tapes", {})
        monkeypatch.setattr(function, "guarded", {})
    # a CPU's masks are made in NumPy, its gelu_tanh has a constant and its pairs of gate and up are words: a tape holds
    # none of these
    for op in activation_fwd, activation_bwd, linear_dgrad_act, linear_fwd:
        monkeypatch.setattr(op, "cpu", op.reference)
    options = dict(dropout=0.0, attention_dropout=0.0, activation=KINDS[kind].get("activation", "relu"))
    for seed in range(3):
        block, xs = make(kind, torch.float32, **options), inputs(kind, torch.float32)
        for name, t in [*block.named_parameters(), *(("", x) for x in xs)]:
            nn.init.normal_(t, std=0.3 + seed)
            t.requires_grad_(not frozen or not name.endswith(frozen))
        ours = run(block, xs)
        assert [len(function.tapes) for function in functions] == [1, 1]
        assert all(tape is not None for function in functions for tape in function.tapes.values())
        monkeypatch.setattr(replay, "REPLAY", False)
        assert_same(ours, run(block, xs))
        monkeypatch.setattr(replay, "REPLAY", True)


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


def test_a_parametrized_weight():
    block, xs = make("pre-norm"), inputs("pre-norm")
    parametrize.register_parametrization(block.mlp.fc1, "weight", Doubled())
    assert_same(run(block, xs), by_ops(run, block, xs))


def test_where_ops_are_nodes_of_their_own(nodes):
    """Recomputed n, autocast, a compiler, an adapter beside a weight, query and key norms, another rank."""
    call(make("pre-norm", saving="smallest"), inputs("pre-norm"))
    call(make("pre-norm", qk_norm=True), inputs("pre-norm"))
    with torch.autocast("cpu", torch.bfloat16):
        call(make("pre-norm", torch.float32), inputs("pre-norm", torch.float32))
    assert not nodes
    call(make("pre-norm"), inputs("pre-norm"))
    assert len(nodes) == 1


def _nodes_on_two(world):
    calls = []
    with planted("tpfuse.layers.block.one_node", counting(calls)):
        TransformerBlock(D, HEADS, tp=make_tp(world, False))(torch.randn(4, D), batch=2)
    return len(calls)


def test_several_ranks_exchange(ranks):
    assert ranks(2, _nodes_on_two) == [0, 0]
