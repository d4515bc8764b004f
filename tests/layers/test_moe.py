"""A mixture of experts at 1, 2 and 4 ranks: the same bits, however few rows a rank has, and transformers' values."""

import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

from bench.models import moe
from tests.common import error
from tests.planted import Mistaken, planted
from tpfuse import MainGrad, TensorParallel
from tpfuse.kernels import Routing
from tpfuse.kernels.experts import alone
from tpfuse.kernels.norm import norm_in, reduce_bias_dropout_add_norm
from tpfuse.kernels.runtime.deferred import WeightGradients
from tpfuse.kernels.runtime.philox import make_rng
from tpfuse.layers import Call, ParallelMoE, TransformerBlock
from tpfuse.layers.shards import named_specs

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


class Case(NamedTuple):
    """M rows of width D, E experts of width F; ``M`` rows are valid, ``pad`` more are not."""

    M: int
    D: int
    F: int
    E: int
    routing: Routing
    pad: int = 0
    only: int | None = None  # experts from here on get no row
    shared: int | None = None
    gate: bool = False
    bitwise: int | None = None

    @property
    def rounded(self) -> set[str]:
        """What agrees to rounding alone: sums over ranks, and a shared expert's weights, of which each has columns."""
        shared = {"shared_fc1", "shared_fc2", "shared_gate", "x", "y"}
        return set() if self.bitwise else {"router"} | (set() if self.shared is None else shared)


CASES = {
    "one row a rank": Case(4, 1024, 24, 64, Routing(4)),  # where a GEMM's sums depend on the number of its rows
    "many rows": Case(48, 64, 40, 8, Routing(3, "sigmoid", True, 2.5, 4, 2)),
    "starved ranks": Case(24, 37, 11, 8, Routing(2), only=2),  # the flooded one has every row
    "padded": Case(5, 48, 24, 8, Routing(2), pad=3),
    "one row": Case(1, 48, 24, 4, Routing(1, renormalize=False), pad=3),  # ranks without any
    "all experts": Case(8, 32, 16, 4, Routing(4, "chosen")),
    "shared": Case(13, 48, 24, 8, Routing(2), pad=3, shared=40, gate=True),
    "shared, in leaves": Case(13, 48, 24, 8, Routing(2), pad=3, shared=24, gate=True, bitwise=4),
    "shared, no gate": Case(3, 37, 11, 4, Routing(3, "sigmoid"), pad=1, shared=44),  # a rank without valid rows
}


def make(case: Case, tp: TensorParallel | None, dtype: torch.dtype) -> ParallelMoE:
    torch.manual_seed(3)
    shared = dict(shared_size=case.shared, shared_gate=case.gate)
    layer = ParallelMoE(case.D, case.F, case.E, case.routing, tp=tp, **shared, init_std=0.3, dtype=dtype)
    if case.only is not None:  # of rows without negative numbers
        with torch.no_grad():
            layer.router[case.only :] = 0
            layer.router[: case.only] = layer.router[: case.only].abs() + 0.1
    return layer


def data(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """x and dy of all rows; padding holds garbage, which has no gradient."""
    random = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(case.M + case.pad, case.D, generator=random).to(dtype) for _ in range(2))
    x[case.M :], dy[case.M :] = 1e4, 0
    return [x if case.only is None else x.abs(), dy]


def step(layer: ParallelMoE, case: Case, x, dy, keep: bool = True) -> dict[str, torch.Tensor]:
    tp = layer.tp
    x, dy = (t.chunk(tp.row_shards)[tp.row_rank].clone() for t in (x, dy))
    x.requires_grad_()
    y = layer(x, call=Call(batch=1, seq=case.M, keep=keep))
    y.backward(dy)
    return dict(y=y.detach(), x=x.grad, **{name: p.grad for name, p in layer.named_parameters()})


def run(world, name: str, sp: bool, dtype: torch.dtype):
    case = CASES[name]
    tp = TensorParallel(world.group, sequence_parallel=sp, bitwise=case.bitwise)
    layer = make(case, tp, dtype)
    results = [step(layer, case, *data(case, dtype))]
    for p in layer.parameters():
        p.grad = None
    results.append(step(layer, case, *data(case, dtype), keep=False))  # rows are sent again in backward
    return tp, results, {n: spec.local(t) for n, _, spec, t in named_specs(layer)}


def differing(name: str, every, dtype: torch.dtype) -> set[str]:
    """The names of what has other bits than on one rank; sums over ranks are held to rounding."""
    case, names = CASES[name], set()
    one = step(make(case, TensorParallel(bitwise=case.bitwise), dtype), case, *data(case, dtype))
    for tp, results, slices in every:
        for result in results:
            assert result.keys() == one.keys()
            for key, value in result.items():
                whole = one[key]
                if key in ("x", "y"):
                    mine = whole.chunk(tp.row_shards)[tp.row_rank]
                else:
                    mine = whole[slices[key]]
                if key in case.rounded:
                    assert error(value, mine) < {FP32: 1e-5, BF16: 1e-2, FP64: 1e-12}[dtype], key
                elif not torch.equal(value, mine):
                    names.add(key)
    return names


@pytest.mark.parametrize("dtype", [FP32, BF16, pytest.param(FP64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sp", [True, False], ids=["sequence parallel", "replicated rows"])
@pytest.mark.parametrize("R", [4, 2])
@pytest.mark.parametrize("name", CASES)
def test_bits_at_every_size(ranks, name, R, sp, dtype):
    assert differing(name, ranks(R, run, name, sp, dtype), dtype) == set()


def one_product(right, x, w):
    """All rows that a rank has, at once."""
    return x.to(w.dtype) @ w.t()


def in_order_of_arrival(right, chosen, experts):
    """An expert's rows by row of their rank, their ranks in reverse."""
    order = right(chosen, experts)
    if chosen.dim() == 1:
        numbers = [n.flip(0) for n in order.numbers.tensor_split(order.offsets[1:-1])]
        order = order._replace(numbers=torch.cat(numbers))
    return order


def in_rank_order(right, parts, tp):
    """The shared expert's sum over ranks, from left to right."""
    return functools.reduce(torch.add, parts)


@pytest.mark.parametrize("name, target, mistake, wrong", [
    ("one row a rank", "kernels.experts.router._product", one_product, {"y", "x", "fc1", "fc2"}),
    ("many rows", "kernels.experts.records.ExpertOrder.of", in_order_of_arrival, {"fc1", "fc2"}),
    ("shared, in leaves", "sequence_parallel.shared_expert.summed", in_rank_order, {"y", "x", "shared_gate"}),
])  # fmt: skip
def test_a_mistake_is_seen(ranks, name, target, mistake, wrong):
    spoilt = Mistaken(run, f"tpfuse.{target}", mistake)
    names = differing(name, ranks(4, spoilt, name, True, FP32), FP32)
    assert names and names <= wrong


# ---- within a block's kernels ----


def size_messages(world, planted_size: bool) -> int:
    """Of a step without sequence parallelism, whose ranks have all rows and know their number."""
    case, sent = CASES["padded"], []

    def counted(right, *args):
        sent.append(args)
        return right(*args)

    layer = make(case, TensorParallel(world.group, sequence_parallel=False), FP32)
    unsized = planted("tpfuse.layers.moe.collect", lambda right, y, tp, size: right(y, tp))
    with planted("tpfuse.collectives.gather_number", counted), unsized if planted_size else contextlib.nullcontext():
        step(layer, case, *data(case, FP32))
    return len(sent)


@pytest.mark.parametrize("planted_size", [False, True])
def test_no_size_is_sent_without_sequence_parallelism(ranks, planted_size):
    assert ranks(2, size_messages, planted_size) == [int(planted_size)] * 2


def between_norms(world, keep: bool):
    """The layer behind a norm that hands n to all its readers, before the kernel that adds the parts."""
    case = CASES["many rows"]
    tp = TensorParallel(world.group, sequence_parallel=True) if world else TensorParallel()
    layer = make(case, tp, FP32)
    x, dy = (t.chunk(tp.row_shards)[tp.row_rank].clone().requires_grad_() for t in data(case, FP32))
    gamma = torch.linspace(0.5, 1.5, case.D)
    h, n, recipe = norm_in(x, gamma, None, eps=1e-6, norm="rms", ranks=layer.copies, recompute=not keep)
    parts = layer.parts(n, recipe, Call(keep=keep))
    h, n, _ = reduce_bias_dropout_add_norm(parts, None, h, gamma, norm="rms")
    torch.autograd.backward([h, n], [dy, dy[None]])
    return parts.detach(), h.detach(), x.grad, layer.fc1.grad


@pytest.mark.parametrize("keep", [True, False])
def test_parts_between_norms(ranks, keep):
    one = between_norms(None, True)
    for rank, (parts, h, dx, dw) in enumerate(ranks(2, between_norms, keep)):
        assert torch.equal(parts, one[0].chunk(2, 1)[rank]) and torch.equal(dw, one[3].chunk(2)[rank])
        assert torch.equal(h, one[1].chunk(2)[rank]) and torch.equal(dx, one[2].chunk(2)[rank])


def later(world, name: str):
    """Gradients of weights handed over as work, and added in fp32, beside those of a bare backward."""
    case = CASES[name]
    tp = TensorParallel(world.group, sequence_parallel=True, bitwise=case.bitwise)
    x, dy = (t.chunk(2)[tp.rank].clone() for t in data(case, BF16))
    x.requires_grad_()
    bare, deferred, main = (make(case, tp, BF16) for _ in range(3))
    bare(x).backward(dy)
    store = WeightGradients()
    with store.deferring():
        y = deferred(x)
    y.backward(dy)
    before = [getattr(deferred, name).grad for name, p in deferred.named_parameters() if "fc" in name]
    store.take()()
    MainGrad(main)
    for _ in range(2):
        main(x).backward(dy)
    return before, [[p.grad for p in layer.parameters()] for layer in (bare, deferred)], [
        p.main_grad for p in main.parameters()
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["many rows", "shared", "shared, in leaves"])
def test_gradients_made_later_and_in_fp32(ranks, name):
    for before, (bare, deferred), main in ranks(2, later, name):
        assert set(before) == {None} and all(map(torch.equal, bare, deferred))
        for total, gradient in zip(main, bare, strict=True):
            assert total.dtype == FP32 and error(total, 2 * gradient.float()) < 2e-2


# ---- in a block ----

BLOCKS = {
    "pre": dict(wiring="pre"),
    "parallel": dict(wiring="parallel"),
    "sandwich": dict(wiring="sandwich"),
    "branch": dict(wiring="branch"),
    "smallest": dict(saving="smallest"),
    "shared": dict(shared_size=24, shared_gate=True),
    "shared, smallest": dict(saving="smallest", shared_size=24, wiring="parallel"),
}


def block(name: str, tp: TensorParallel | None) -> TransformerBlock:
    torch.manual_seed(5)
    arguments = dict(num_experts=8, routing=Routing(2), gated=True, activation="silu", bias=False, norm="rms")
    options = arguments | dict(dropout=0.2, init_std=0.2, dtype=FP64) | BLOCKS[name]
    return TransformerBlock(48, 4, 20, tp=tp, **options)


def block_step(layer: TransformerBlock) -> dict[str, torch.Tensor]:
    """7 positions of 2 samples, and 2 rows of padding."""
    random, tp = torch.Generator().manual_seed(2), layer.tp
    x, dy = torch.randn(2, 16, 48, generator=random, dtype=FP64)
    dy[14:] = 0
    x, dy = (t.chunk(tp.row_shards)[tp.row_rank].clone() for t in (x, dy))
    y = layer(x.requires_grad_(), batch=2, seq=7, rng=make_rng(7, 3))
    y.backward(dy)
    valid = max(0, min(len(x), 14 - tp.row_rank * len(x)))
    return dict(y=y.detach()[:valid], x=x.grad[:valid], **{name: p.grad for name, p in layer.named_parameters()})


def block_on_ranks(world, name: str, sp: bool):
    layer = block(name, TensorParallel(world.group, sequence_parallel=sp))
    return layer.tp, block_step(layer), {n: spec.local(t) for n, _, spec, t in named_specs(layer)}


@pytest.mark.parametrize("R, sp", [(2, True), (4, True), (2, False)])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(ranks, name, R, sp):
    one = block_step(block(name, None))
    for tp, results, slices in ranks(R, block_on_ranks, name, sp):
        for key, value in results.items():
            whole = one[key]
            if key in ("x", "y"):
                step = 16 // tp.row_shards
                whole = whole[tp.row_rank * step : (tp.row_rank + 1) * step]
            assert error(value, whole if key in ("x", "y") else whole[slices[key]]) < 1e-10, key


def test_a_block_is_its_parts():
    """The pre-norm block against its modules one by one."""
    layer = block("pre", None).eval()
    x = torch.randn(14, 48, dtype=FP64)
    h = x + layer.attention(layer.input_norm(x), batch=2)
    h = h + layer.mlp(layer.attention_norm(h))
    assert error(layer(x, batch=2), h) < 1e-12


@pytest.mark.parametrize("change, message", [
    (dict(routing=None), "num_experts=8 needs a routing, got None"),
    (dict(gated=False), "experts must be gated, got gated=False"),
    (dict(bias=True), "experts have no bias, got mlp_bias=True"),
    (dict(num_experts=None), "routing=.* needs num_experts, got None"),
    (dict(num_experts=None, routing=None, shared_size=8), "shared_size=8 needs num_experts, got None"),
])  # fmt: skip
def test_blocks_that_are_refused(change, message):
    arguments = dict(num_experts=8, routing=Routing(2), gated=True, activation="silu", bias=False)
    with pytest.raises(ValueError, match=f"TransformerBlock: {message}"):
        TransformerBlock(16, 2, **arguments | change)


# ---- transformers ----


@contextlib.contextmanager
def wide():
    """Their router computes its softmax in fp64."""
    softmax, widened = F.softmax, lambda x, *args, **_: softmax(x.double(), -1)
    with mock.patch.object(F, "softmax", widened), mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def test_mixtral_of_transformers():
    ours, theirs = moe.layers(moe.Case(48, 40, 8, 2), FP64, std=0.3)
    x, dy = torch.randn(2, 2, 30, 48, dtype=FP64)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    with wide():
        y = theirs(a)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(dy)
    z = ours(b)
    z.backward(dy)
    fc1 = rearrange(theirs.experts.gate_up_proj.grad, "e (t f) d -> e f t d", t=2)
    pairs = (z, y), (b.grad, a.grad), (ours.router.grad, theirs.gate.weight.grad), (ours.fc1.grad, fc1)
    for ours_, theirs_ in (*pairs, (ours.fc2.grad, theirs.experts.down_proj.grad)):
        assert error(ours_, theirs_) < 1e-13


# ---- what is refused ----


@pytest.mark.parametrize("change, message", [
    (dict(num_experts=0), "num_experts must be a positive integer, got 0"),
    (dict(routing=Routing(5)), "k must be 1 to num_experts=4, got 5"),
    (dict(activation="relu"), "a gated activation must be one of silu, gelu, gelu_tanh, got 'relu'"),
    (dict(shared_size=0), "shared_size must be a positive integer or None, got 0"),
    (dict(shared_gate=True), "shared_gate=True needs shared_size, got None"),
])  # fmt: skip
def test_what_is_refused(change, message):
    arguments = dict(hidden_size=8, ffn_size=6, num_experts=4, routing=Routing(2))
    with pytest.raises(ValueError, match=f"ParallelMoE: {message}"):
        ParallelMoE(**arguments | change)


def test_rows_of_another_dtype():
    layer = ParallelMoE(8, 6, 4, Routing(2))
    with pytest.raises(ValueError, match="x, fc1 and fc2 must have one dtype outside autocast, got .*float64"):
        layer(torch.randn(3, 8, dtype=torch.float64))


def refused(world):
    messages = []
    tp = TensorParallel(world.group, sequence_parallel=True)
    with pytest.raises(ValueError) as found:
        ParallelMoE(8, 6, 7, Routing(2), tp=tp)
    messages.append(str(found.value))
    with pytest.raises(ValueError) as found:
        ParallelMoE(8, 6, 4, Routing(1 + tp.rank), tp=tp)
    messages.append(str(found.value))
    with pytest.raises(ValueError) as found:
        ParallelMoE(8, 6, 4, Routing(2), shared_size=7, tp=tp)
    messages.append(str(found.value))
    return messages


def test_the_bias_of_the_choice_stays_fp32():
    """Where a layer is cast as a whole; fp64 made fp32 is what it was asked for."""
    layer = ParallelMoE(16, 8, 4, Routing(2, biased=True))
    steps = torch.tensor([0.3, -1e-3, 1e-3, 0.1234567])
    with torch.no_grad():
        layer.router_bias.copy_(steps)
    for cast in (layer.bfloat16, layer.half, lambda: layer.to(BF16)):
        cast()
        assert layer.fc1.dtype != FP32 and layer.router_bias.dtype == FP32 and torch.equal(layer.router_bias, steps)
    assert not layer.router_bias.requires_grad and [*layer.parameters()][-1] is layer.router_bias
    assert layer.double().router_bias.dtype == FP64 and layer.float().router_bias.dtype == FP32
    assert layer.to("meta").router_bias.is_meta


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_bits_without_gradients(dtype):
    """By fewer calls where one process has all experts; and a layer in training mode counts rows for its bias."""
    cases = {True: Case(4, 64, 96, 8, Routing(2)), False: Case(4, 64, 96, 8, Routing(2), shared=64)}
    for taken, case in cases.items():
        layer, x = make(case, None, dtype), data(case, dtype)[0]
        with torch.no_grad(), mock.patch.object(alone, "expert_outputs", wraps=alone.expert_outputs) as calls:
            y = layer(x)
        assert torch.equal(y, layer(x).detach()) and calls.called is taken
    layer = ParallelMoE(64, 96, 8, Routing(2, biased=True), dtype=dtype)
    x = torch.randn(5, 64).to(dtype)
    with torch.no_grad():
        layer.eval()(x)
        assert layer.load is None
        layer.train()(x)
    assert int(layer.load.sum()) == 10


def test_what_is_refused_on_several_ranks(ranks):
    for divided, different, shared in ranks(2, refused):
        assert shared == "ParallelMoE: shared_size=7 is not divisible by tensor-parallel size 2; use 1 or 7"
        assert different.startswith("ParallelMoE: routing must be the same on every tensor-parallel rank")
        assert divided == "ParallelMoE: num_experts=7 is not divisible by tensor-parallel size 2; use 1 or 7"


@pytest.mark.parametrize("name", ["many rows", "shared"])
def test_compile_on_one_rank(name):
    case = CASES[name]
    x, dy = data(case, FP32)
    eager, layer = step(make(case, None, FP32), case, x, dy), make(case, None, FP32)
    layer.compile(fullgraph=True, backend="aot_eager")
    compiled = step(layer, case, x, dy)
    assert all(torch.equal(compiled[key], value) for key, value in eager.items())


def compiled_between(world, name: str):
    """On several ranks a graph ends at the layer, and another begins behind it; one whole graph is torch's error."""
    case, tp = CASES[name], TensorParallel(world.group, sequence_parallel=True)
    results, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for compiled in (False, True):
        layer = make(case, tp, FP32)
        around = lambda x, layer=layer: layer(x.sin(), call=Call(batch=1, seq=case.M)).cos()
        call = torch.compile(around, backend=backend) if compiled else around
        for _ in range(2):
            x = data(case, FP32)[0].chunk(2)[tp.rank].clone().requires_grad_()
            call(x).sum().backward()
        results.append([x.grad, *(p.grad for p in layer.parameters())])
    torch._dynamo.reset()  # which would have the graphs of before
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_behind_a_graph"):
        torch.compile(around, backend=backend, fullgraph=True)(x)
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)], len(graphs)


@pytest.mark.parametrize("name", ["many rows", "shared"])
def test_compile_on_several_ranks(ranks, name):
    for same, graphs in ranks(2, compiled_between, name):
        assert all(same) and graphs > 1
