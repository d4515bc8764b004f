"""The block: sharded and whole, what it sends, what it saves, what runs between its ops, and against torch's
DTensor."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.common import Recorder, assert_close, assert_equal, fake_tp, make_tp, my_rows, saved_bytes
from tests.layers.sharded import (
    Case,
    assert_seen,
    build,
    check,
    compare,
    data,
    run,
    sharded_is_whole,
    step,
    unsharded,
    unsummed,
)
from tpfuse.kernels.norm import norm_in
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import LayerNorm, Normed, ParallelAttention, ParallelMLP, RMSNorm, TransformerBlock
from tpfuse.layers.module import ParallelModule, replicated
from tpfuse.layers.shards import named_specs

DROPOUT = dict(dropout=0.1, attention_dropout=0.1)


class Stack(ParallelModule):
    """Blocks as a model stacks them: the entering norm makes the first n, and each block the next one's."""

    def __init__(self, hidden_size, *args, tp=None, depth=2, between=lambda n: n, dtype=torch.float32, **options):
        super().__init__(tp)
        make = RMSNorm if options.get("norm") == "rms" else LayerNorm
        self.entry = make(hidden_size, 1e-5, tp=self.tp, dtype=dtype)
        blocks = (
            TransformerBlock(hidden_size, *args, tp=self.tp, layer=i, place="inner", dtype=dtype, **options)
            for i in range(depth)
        )
        self.blocks, self.between = nn.ModuleList(blocks), between

    def states(self, x, **call):
        entry = self.entry
        how = dict(eps=entry.eps, norm=entry.kind, ranks=self.tp.row_shards, leaves=self.tp.row_leaves, recompute=True)
        h, *normed = norm_in(x, *replicated(self.tp, entry.weight, entry.bias), **how)
        for b in self.blocks:
            h, normed = b(h, Normed(self.between(normed[0]), normed[1]), **call)
        return h, normed.n

    def forward(self, x, **call):
        """h + n, so that both have a gradient; n's R gradients are one and zeros."""
        h, n = self.states(x, **call)
        return h + n[0]


# 12 heads of width 4 divide by 1, 2, 3 and 4; 8 positions of 3 samples give 24 rows, where a shard of 4 ends in the
# middle of no sample
BLOCK = Case(TransformerBlock, (48, 12, 96), (24, 48), (24, 48), DROPOUT, dict(batch=3), rng=True)
STACK = Case(Stack, (48, 12, 96), (24, 48), (24, 48), DROPOUT, dict(batch=3), rng=True)
CASES = {
    "pre-norm": BLOCK,
    "pre-norm, smallest": BLOCK(saving="smallest"),
    "post-norm": BLOCK(wiring="post"),
    "post-norm, smallest": BLOCK(wiring="post", saving="smallest"),
    "side by side": BLOCK(wiring="parallel"),
    "stack": STACK,
    "stack, side by side, smallest": STACK(wiring="parallel", saving="smallest", norm="rms", bias=False),
    "stack, smallest": STACK(saving="smallest"),
    "post-norm stack, smallest": STACK(wiring="post", saving="smallest"),
    "key mask": replace(BLOCK, call=dict(batch=3, attention_mask=torch.arange(8) < torch.tensor([[8], [5], [2]]))),
    "rms, no bias, grouped": BLOCK(norm="rms", bias=False, num_kv_heads=4, activation="gelu"),
    "branch norms, beside": BLOCK(wiring="sandwich"),
    "branch norms, in place": BLOCK(wiring="branch", norm="rms", num_kv_heads=4),
    "branch norms stack, smallest": STACK(wiring="sandwich", norm="rms", bias=False, saving="smallest"),
    "rms stack, no bias, smallest": STACK(norm="rms", bias=False, saving="smallest", activation="relu", causal=False),
}


BRIEF = tuple(name for name in CASES if name.startswith(("branch norms", "side by side", "stack, side by side")))
test_sharded_is_whole = sharded_is_whole(CASES, BRIEF)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
def test_sharded_is_whole_over_three(ranks, sp, case):
    check(ranks, case(num_kv_heads=6), 3, sp, torch.float64)


@pytest.mark.parametrize("case", ["pre-norm", "post-norm", "stack"])
@pytest.mark.parametrize("R", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_saving_less_changes_no_bit(ranks, R, case):
    for dtype in torch.float64, torch.bfloat16:
        x, dy = data(CASES[case], dtype)
        both = [ranks(R, run, CASES[case](saving=saving), True, dtype, x, dy) for saving in ("fastest", "smallest")]
        for (_, fastest, _, _), (_, smallest, _, _) in zip(*both):
            assert_equal(smallest, fastest)


def _from_the_first(right, *tensors, first_row, **options):
    """The mistake that masks count rows from this rank's first."""
    return right(*tensors, **options)


@pytest.mark.parametrize(
    "function, mistake, name",
    [("replicated", unsummed, "attention_norm.weight"), ("reduce_bias_dropout_add_norm", _from_the_first, "y")],
)
def test_a_planted_mistake_is_seen(ranks, function, mistake, name):
    assert_seen(ranks, BLOCK, f"tpfuse.layers.wiring.{function}", mistake, name)


# ---- masks ----


def _dropped(world, sp, batch, first_sample):
    """On zeros, with biases 1 and 10 and weights of zero, the output's digits are the two masks."""
    layer = TransformerBlock(16, 4, tp=make_tp(world, sp), dropout=0.5, layer=2)
    with torch.no_grad():
        for linear, value in (layer.attention.out, 1.0), (layer.mlp.fc2, 10.0):
            linear.weight.zero_(), linear.bias.fill_(value)
    x = torch.zeros(8 * batch // layer.tp.row_shards, 16)
    return layer(x, batch=batch, rng=make_rng(7, 3, first_sample)).detach()


@pytest.mark.parametrize("R", [2, 4])
def test_masks_are_bitwise_the_same(ranks, R):
    """With sequence parallelism and without, over R ranks or one, in one batch of 4 samples or two of 2."""
    (one,) = ranks(1, _dropped, True, 4, 0)
    assert sorted(one.unique().tolist()) == [0, 2, 20, 22]
    assert torch.equal(torch.cat(ranks(R, _dropped, True, 4, 0)), one)
    assert all(torch.equal(y, one) for y in ranks(R, _dropped, False, 4, 0))
    halves = [torch.cat(ranks(R, _dropped, True, 2, first)).view(8, 2, 16) for first in (0, 2)]
    assert torch.equal(torch.cat(halves, 1).view(32, 16), one) and not torch.equal(*halves)


# ---- uneven rows ----


@pytest.mark.parametrize("seq, batch", [(1, 1), (7, 1), (7, 3), (127, 1), pytest.param(127, 3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("saving", ["fastest", "smallest"])
def test_padding_adds_nothing(ranks, seq, batch, saving):
    """seq * batch rows padded to a multiple of 4, the padding full of large numbers, equal the rows alone in one
    process."""
    rows = seq * batch
    padded = -(-rows // 4) * 4
    size = padded, 16
    options, call = DROPOUT | dict(saving=saving), dict(batch=batch, seq=seq)
    case = Case(TransformerBlock, (16, 4), size, size, options, call, rng=True, valid=rows)
    x, dy = data(case, torch.float64)
    assert x[rows:].numel() == 0 or x[rows:].abs().max() > 1e3
    values, weights = unsharded(case, torch.float64, x[:rows], dy[:rows])
    values |= {name: F.pad(values[name], (0, 0, 0, padded - rows)) for name in ("x", "y")}
    compare(case, torch.float64, (values, weights), ranks(4, run, case, True, torch.float64, x, dy))


# ---- accounting ----


def _account(world, saving, between):
    """One block inside a stack, and two: messages of each direction, and what of torch's own ran over activations in
    backward."""
    tp, out = make_tp(world), {}
    D, rows = 16, 64 // world.size  # so that 6 D < m D: the packed vectors are no activation
    for depth in 1, 2:
        stack = Stack(D, 4, tp=tp, depth=depth, saving=saving, between=between, **DROPOUT)
        h = torch.randn(rows, D, requires_grad=True)
        n = torch.randn(rows, D).expand(tp.size, -1, -1).requires_grad_()
        _, _, recompute = norm_in(h.detach(), torch.ones(D), torch.zeros(D), eps=1e-5, ranks=tp.size, recompute=True)
        normed, leaves = Normed(n, recompute), [h, n, *stack.blocks.parameters()]
        with Recorder() as forward:
            for b in stack.blocks:
                h, normed = b(h, Normed(between(normed.n), normed.recompute), batch=4, rng=make_rng(7, 3))
        dh, dn = torch.randn(rows, D), torch.randn(rows, D).expand(tp.size, -1, -1)
        with Recorder() as backward:
            torch.autograd.grad([h, normed.n], leaves, [dh, dn])
        out[depth] = forward.messages(), backward.messages(), backward.passes(rows * D)
    return out


def same(n):
    return n


def times_one(n):
    return n * 1.0


def torch_expand(n):
    """What a norm that returned [m, D] would leave to autograd: its own sum over the R gradients."""
    return n[0].expand(n.shape)


@pytest.mark.parametrize("saving", ["fastest", "smallest"])
@pytest.mark.parametrize("R", [2, 4])
def test_messages_of_a_block_and_nothing_of_torch_over_activations(ranks, R, saving):
    D, m = 16, 64 // R
    shard, parts = ("all_gather", (m, D), torch.float32), ("all_to_all", (R, m, D), torch.float32)
    packed = ("all_gather", (6, D), torch.float32)
    for out in ranks(R, _account, saving, same):
        assert out[1][2] == out[2][2] == []
        forward, backward, _ = out[1]
        assert forward == [shard, parts] * 2
        assert backward == [shard, parts, shard] * 2 + [packed]
        assert out[2][0] == forward * 2 and sorted(out[2][1], key=str) == sorted(backward * 2, key=str)
        assert sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in backward) == 4 * (
            4 * m * D + 2 * R * m * D + 6 * D
        )


@pytest.mark.parametrize("between, op", [(times_one, "aten.mul.Tensor"), (torch_expand, "aten.sum.dim_IntList")])
def test_a_planted_pass_is_seen(ranks, between, op):
    for out in ranks(2, _account, "fastest", between):
        assert op in out[2][2]


def _saved(world, saving):
    """Bytes that the second of two blocks saves, over M D / R."""
    seq, batch, D = 128, 4, 128  # head width 64; statistics, logsumexp and vectors then are 2 % of the least
    saved = []
    for depth in 1, 2:
        stack = Stack(D, 2, tp=make_tp(world), depth=depth, saving=saving, dtype=torch.bfloat16, **DROPOUT)
        x = torch.randn(seq * batch // world.size, D, dtype=torch.bfloat16, requires_grad=True)
        with saved_bytes(*stack.parameters()) as total:
            out = stack.states(x, batch=batch, rng=make_rng(7, 3))
            saved.append(total())
        del out
    return (saved[1] - saved[0]) / (seq * batch * D / world.size)


@pytest.mark.parametrize("saving, expected", [("fastest", 32), ("smallest", 20)])
@pytest.mark.parametrize("R", [1, 2])
def test_saved_bytes(ranks, R, saving, expected):
    for measured in ranks(R, _saved, saving):
        assert measured == pytest.approx(expected, rel=0.03)


def test_saved_bytes_counts_a_storage_once_and_parameters_not():
    x, w = (torch.randn(100, requires_grad=True) for _ in range(2))
    with saved_bytes(w) as total:
        y = x * w, x.view(10, 10).exp(), x[:50].sin()
    assert total() == 800 and len(y) == 3  # x, and the value of exp


# ---- again: recompute, two runs ----


def _recomputed(forward):
    return lambda x, **call: checkpoint(forward, x, use_reentrant=False, **call)


def _compiled(backend):
    torch._dynamo.reset()
    return lambda forward: torch.compile(forward, fullgraph=True, backend=backend)


def _again(world, case, dtype, *backends):
    """A step; the same again, and recomputed in backward, or compiled by each backend."""
    x, dy = torch.randn(24, 48, dtype=dtype), torch.randn(24, 48, dtype=dtype)
    layer, out = build(case, make_tp(world), dtype), []
    forward = layer.forward
    changes = [_compiled(backend) for backend in backends] or [lambda forward: forward, _recomputed]
    for change in lambda forward: forward, *changes:
        layer.zero_grad()
        layer.forward = change(forward)
        out.append({name: t.clone() for name, t in step(layer, case, x, dy).items()})
    return out


@pytest.mark.parametrize("case", ["pre-norm", "post-norm, smallest", "stack, smallest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("R", [1, 2])
def test_again_and_recomputed_are_bitwise_the_same(ranks, R, dtype, case):
    for first, second, recomputed in ranks(R, _again, CASES[case], dtype):
        assert_equal(second, first)
        assert_equal(recomputed, first)


def test_another_step_has_other_masks():
    layer, x = build(BLOCK, None, torch.float32), torch.randn(24, 48)
    one, other = (layer(x, batch=3, rng=make_rng(7, i)) for i in (3, 4))
    assert not torch.equal(one, other)
    layer.eval()
    assert torch.equal(layer(x, batch=3), layer(x, batch=3, rng=make_rng(7, 3)))


# ---- precision ----


def _rms(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("case", ["pre-norm", "stack, smallest"])
def test_bf16_error_does_not_grow_with_the_ranks(ranks, case):
    """Against fp64 on the same bf16 weights and rows: at R = 2 and 4 at most 1.6 times that of one process."""
    case = CASES[case]
    x, dy = data(case, torch.bfloat16)
    layer = build(case, None, torch.bfloat16).double()
    exact = step(layer, case, x.double(), dy.double())
    one = {name: _rms(t, exact[name]) for name, t in step(build(case, None, torch.bfloat16), case, x, dy).items()}
    assert 1e-3 < one["y"] < 1e-2
    for R in 2, 4:
        many = ranks(R, run, case, True, torch.bfloat16, x, dy)
        joined = {name: torch.empty_like(t, dtype=torch.bfloat16) for name, t in exact.items()}
        for tp, got, _, slices in many:
            for name, t in got.items():
                where = slices[name] if name in slices else slice(tp.rank * 24 // R, (tp.rank + 1) * 24 // R)
                joined[name][where] = t
        worse = {
            name: (e, one[name]) for name, t in joined.items() if not (e := _rms(t, exact[name])) <= 1.6 * one[name]
        }
        assert not worse, (R, worse)


def _mixed(world, how):
    """bf16 weights beside fp32 norms, or fp32 weights under autocast: each gradient in its parameter's dtype, beside
    fp64."""
    layer = build(BLOCK, make_tp(world), torch.bfloat16 if how == "fp32 norms" else torch.float32)
    for module in layer.modules():
        if isinstance(module, LayerNorm):
            module.float()
    x, dy = (t.bfloat16() if how == "fp32 norms" else t for t in data(BLOCK, torch.float32))
    exact = build(BLOCK, make_tp(world), torch.float64)
    exact.load_state_dict(layer.state_dict())
    exact = step(exact, BLOCK, x.double(), dy.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        got = step(layer, BLOCK, x, dy)
    dtypes = {name: t.dtype for name, t in got.items()}
    assert all(dtypes[name] == p.dtype for name, p in layer.named_parameters()) and dtypes["x"] == x.dtype
    return {name: _rms(t, exact[name]) for name, t in got.items()}, dtypes["y"]


@pytest.mark.parametrize("how", ["fp32 norms", "autocast"])
@pytest.mark.parametrize("R", [1, 2])
def test_mixed_precision(ranks, R, how):
    for errors, dtype in ranks(R, _mixed, how):
        assert dtype == torch.bfloat16
        assert all(e < 2e-2 for e in errors.values()), (
            errors
        )  # bf16 has 2**-8 = 4e-3 a rounding; a wrong gradient is off by 1


# ---- against DTensor ----


class PlainMLP(nn.Module):
    def __init__(self, D, F_):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, F_), nn.Linear(F_, D)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


class PlainAttention(nn.Module):
    def __init__(self, D, heads):
        super().__init__()
        self.width = D // heads
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(D, D)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        n = self.norm(x)
        q, k, v = (p(n).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _dtensor(world, kind):
    """The same weights, rows and gradient through DTensor's layers and ours, in fp32: outputs, gradients."""
    D, S = 16, 12
    torch.manual_seed(3)
    tp, mesh = make_tp(world), world.mesh(1, world.size)["tp"]
    theirs = PlainMLP(D, 32) if kind == "mlp" else PlainAttention(D, 4)
    state = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    columns = ["fc1"] if kind == "mlp" else ["q", "k", "v"]
    plan = {"norm": SequenceParallel(), "fc2" if kind == "mlp" else "out": RowwiseParallel(output_layouts=Shard(1))}
    plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in columns}
    parallelize_module(theirs, mesh, plan)
    x, dy = torch.randn(2, S, D)
    leaf = my_rows(x, tp).clone()[None].requires_grad_()
    y = theirs(leaf)
    y.backward(my_rows(dy, tp)[None])
    full = {name: p.grad.full_tensor() for name, p in theirs.named_parameters()}
    expected = dict(y=y.detach()[0], x=leaf.grad[0])

    norm = LayerNorm(D, tp=tp)
    layer = (
        ParallelMLP(D, 32, tp=tp, activation="gelu") if kind == "mlp" else ParallelAttention(D, 4, tp=tp, causal=True)
    )
    if kind == "attention":  # [H, (q, k, v), E, D]
        for d in state, full:
            for end in "weight", "bias":
                d[f"qkv.{end}"] = torch.stack([d.pop(f"{p}.{end}").unflatten(0, (4, -1)) for p in "qkv"], 1)
    modules = (norm, "norm."), (layer, "")
    with torch.no_grad():
        for module, prefix in modules:
            for name, _, spec, _ in named_specs(module):
                module.get_parameter(name).copy_(state[prefix + name][spec.local(tp)])
                expected[prefix + name] = full[prefix + name][spec.local(tp)]
    leaf = my_rows(x, tp).clone().requires_grad_()
    y = layer(norm(leaf), **({} if kind == "mlp" else dict(batch=1)))
    y.backward(my_rows(dy, tp))
    grads = {prefix + name: p.grad for module, prefix in modules for name, p in module.named_parameters()}
    assert_close(dict(y=y.detach(), x=leaf.grad, **grads), expected, torch.float32)
    return True


@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_equal_to_dtensor(ranks, kind):
    assert all(ranks(2, _dtensor, kind))


# ---- torch.compile ----


@pytest.mark.parametrize(
    "R, case",
    [
        (1, "post-norm, smallest"),
        *(
            pytest.param(R, case, marks=pytest.mark.slow)
            for R, case in product((1, 2), ("pre-norm", "post-norm, smallest", "stack, smallest"))
            if (R, case) != (1, "post-norm, smallest")
        ),
    ],
)
def test_compiled_in_one_graph(ranks, R, case):
    for eager, compiled in ranks(R, _again, CASES[case], torch.float32, "aot_eager"):
        assert_equal(compiled, eager)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None])
def test_one_graph_serves_rows_of_any_number(dynamic):
    """The first call's graph where shapes are dynamic from the start, else the second one's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block, counter = TransformerBlock(16, num_heads=2), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=counter)
    graphs = []
    for rows in 8, 6, 10, 14:
        x = torch.randn(rows, 16)
        assert torch.equal(compiled(x, batch=2), block(x, batch=2))
        graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[0 if dynamic else 1]  # torch may hand a call's graph to the backend twice


@pytest.mark.slow
def test_compiled_by_inductor(ranks):
    """On one rank: whole models, in tests/models/test_model.py."""
    for eager, compiled in ranks(2, _again, CASES["stack, smallest"], torch.float32, "inductor", timeout=300):
        assert_close(compiled, eager, torch.float32)


# ---- errors ----


@pytest.mark.parametrize(
    "options, call, match",
    [
        (dict(saving="least"), {}, "TransformerBlock: saving must be one of fastest, smallest, got 'least'"),
        (dict(norm="batch"), {}, "TransformerBlock: norm must be one of layer, rms, gemma_rms, got 'batch'"),
        ({}, dict(cu_seqlens=torch.tensor([0, 4], dtype=torch.int32)), "attention: cu_seqlens needs batch = 1, got 2"),
        ({}, dict(normed=Normed(torch.zeros(1, 4, 8))), "with place='alone' it takes h"),
        (dict(place="inner"), {}, r"with place='inner' it takes \(h, normed\)"),
        (dict(dropout=0.1), {}, "dropout needs rng"),
        (dict(wiring="serial"), {}, "wiring must be one of pre, post, sandwich, branch, parallel, got 'serial'"),
        (dict(place="first"), {}, "place must be one of alone, inner, last, got 'first'"),
        (dict(softcap=0.0), {}, "ParallelAttention: softcap must be positive and finite, got 0.0"),
    ],
)
def test_errors(options, call, match):
    with pytest.raises(ValueError, match=match):
        TransformerBlock(8, 2, **options)(torch.zeros(4, 8), batch=2, **call)


def test_sizes_that_cannot_be_split():
    for args, match in ((48, 12), "num_heads=12"), ((48, 16, 20), "ffn_size=20"):
        with pytest.raises(ValueError, match=match + " is not divisible by tensor-parallel size 8"):
            TransformerBlock(*args, tp=fake_tp(8), device="meta")
