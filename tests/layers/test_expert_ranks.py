"""Experts over data-parallel and tensor-parallel ranks: bits at every (dp, tp), unequal replicas, refusals."""

from typing import NamedTuple

import pytest
import torch

from tests.common import error
from tests.planted import Mistaken
from tpfuse import TensorParallel
from tpfuse.kernels import Routing
from tpfuse.kernels.experts.records import Sides
from tpfuse.layers import Call, ParallelMoE, TransformerBlock
from tpfuse.layers.shards import named_specs
from tpfuse.sequence_parallel.records import ExpertWeightGrad

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


class Case(NamedTuple):
    """Rows of each replica, of width D, E experts of width F."""

    rows: tuple[int, ...]
    D: int
    F: int
    E: int
    routing: Routing


CASES = {
    "one row a rank": Case((2, 2), 1024, 24, 64, Routing(4)),  # where a GEMM's sums depend on the number of its rows
    "many rows": Case((24, 24), 64, 40, 8, Routing(3, "sigmoid", True, 2.5, 4, 2)),
    "unequal replicas": Case((20, 4), 37, 12, 8, Routing(2)),
    "no rows": Case((0, 6), 37, 12, 4, Routing(2)),
}


def make(case: Case, dtype: torch.dtype, tp=None, experts=None) -> ParallelMoE:
    torch.manual_seed(3)
    return ParallelMoE(case.D, case.F, case.E, case.routing, tp=tp, experts=experts, init_std=0.3, dtype=dtype)


def data(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """x and dy of all replicas' rows."""
    random = torch.Generator().manual_seed(1)
    return [torch.randn(sum(case.rows), case.D, generator=random).to(dtype) for _ in range(2)]


def step(layer: ParallelMoE, x: torch.Tensor, dy: torch.Tensor, call: Call) -> dict[str, torch.Tensor]:
    for p in layer.parameters():
        p.grad = None
    x = x.clone().requires_grad_()
    y = layer(x, call=call)
    y.backward(dy)
    return dict(y=y.detach(), x=x.grad, **{name: p.grad for name, p in layer.named_parameters()})


def of_replica(tensors, rows: tuple[int, ...], replica: int):
    return [t.split(rows)[replica] for t in tensors]


def run(world, name: str, dp: int, sp: bool, dtype: torch.dtype):
    """The layer's results on this rank, kept and dispatched again, and where its slices are."""
    case, mesh = CASES[name], world.mesh(dp, world.size // dp)
    tp = TensorParallel(mesh["tp"], sequence_parallel=sp)
    layer = make(case, dtype, tp, mesh["dp", "tp"])
    mine = of_replica(data(case, dtype), case.rows, mesh["dp"].get_local_rank())
    rows = [t.chunk(tp.row_shards)[tp.row_rank] if len(t) else t for t in mine]
    results = [step(layer, *rows, Call(batch=1, keep=keep)) for keep in (True, False)]
    initial = {name: p.detach() for name, p in layer.named_parameters()}
    return tp, mesh["dp"].get_local_rank(), results, initial, {n: spec.local(t) for n, _, spec, t in named_specs(layer)}


def differing(name: str, every, dtype: torch.dtype) -> set[str]:
    """The names of what has other bits than one process has of all rows; gradients of experts are half of its own."""
    case = CASES[name]
    whole = make(case, dtype)
    one, names = step(whole, *data(case, dtype), Call(batch=1)), set()
    routers: dict[int, torch.Tensor] = {}
    for tp, replica, results, initial, slices in every:
        for key, p in whole.named_parameters():
            assert torch.equal(initial[key], p.detach()[slices[key]]), key
        for result in results:
            assert result.keys() == one.keys()
            for key, value in result.items():
                if key == "router":
                    routers[replica] = value
                    continue
                if key in ("x", "y"):
                    expected = one[key].split(case.rows)[replica]
                    expected = expected.chunk(tp.row_shards)[tp.row_rank] if len(expected) else expected
                else:
                    expected = one[key][slices[key]] / 2
                if not torch.equal(value, expected):
                    names.add(key)
    total = sum(routers.values())
    assert error(total, one["router"]) < {FP32: 1e-5, BF16: 2e-2, FP64: 1e-12}[dtype]
    return names


@pytest.mark.parametrize("dp, tp, sp", [(2, 2, True), (2, 2, False), (2, 1, True)])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [FP32, BF16, pytest.param(FP64, marks=pytest.mark.slow)])
def test_bits_are_those_of_one_process(ranks, name, dp, tp, sp, dtype):
    assert differing(name, ranks(dp * tp, run, name, dp, sp, dtype), dtype) == set()


def undivided(right, work):
    return right(work._replace(divisor=1))


@pytest.mark.parametrize("target, mistake, wrong", [
    ("tpfuse.sequence_parallel.records.ExpertWeightGrad.run", undivided, {"fc1", "fc2"}),
])  # fmt: skip
def test_a_mistake_is_seen(ranks, target, mistake, wrong):
    every = ranks(4, Mistaken(run, target, mistake), "many rows", 2, True, FP32)
    assert differing("many rows", every, FP32) == wrong


# ---- gradients in 16 bits of three replicas, and in fp32 ----


def test_division_before_rounding():
    """A third of a sum in fp32, rounded once; a total in fp32 takes it in too."""
    random = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(40, n, generator=random).bfloat16() for n in (6, 5))
    sides = Sides(dy, x, torch.tensor([0, 25, 25, 40]))
    exact = torch.stack([dy[a:b].double().t() @ x[a:b].double() for a, b in ((0, 25), (25, 25), (25, 40))]) / 3
    dw, _ = ExpertWeightGrad(sides, BF16, 3).run()
    assert dw.dtype == BF16 and torch.equal(dw, exact.to(FP32).to(BF16))
    total = torch.ones(3, 6, 5)
    ExpertWeightGrad(sides, BF16, 3).add_to(total)
    assert error(total, 1 + exact) < 1e-6


# ---- replicas that do not make the same calls ----


def other_calls(world, change: str):
    mesh = world.mesh(2, 2)
    tp, replica = TensorParallel(mesh["tp"], sequence_parallel=True), mesh["dp"].get_local_rank()
    layer = make(CASES["many rows"], FP32, tp, mesh["dp", "tp"])
    x = torch.ones(4, 64)
    layer(x).sum().backward()  # of rows that each replica may have more or less of
    layer(x[: 2 + replica]).sum().backward()
    if change == "mode":
        layer.train(replica == 0)
    elif change == "frozen":
        layer.fc1.requires_grad_(replica == 0)
    elif change == "rows":
        x = torch.ones(6 - world.rank % 2 * replica, 64)
    with pytest.raises(ValueError) as found, torch.set_grad_enabled(change != "gradients" or replica == 0):
        layer(x)
    return str(found.value)


@pytest.mark.parametrize("change, message", [
    ("mode", "training must be the same on every expert-parallel rank"),
    ("frozen", "frozen parameters must be the same on every expert-parallel rank"),
    ("rows", "argument 1 must be the same on every tensor-parallel rank"),
    ("gradients", "grad mode must be the same on every expert-parallel rank"),
])  # fmt: skip
def test_replicas_with_other_calls_are_refused(ranks, change, message):
    for found in ranks(4, other_calls, change):
        assert found.startswith(f"ParallelMoE: {message}")


def other_seeds(world):
    mesh = world.mesh(2, 1)
    torch.manual_seed(world.rank)
    with pytest.raises(ValueError) as found:
        ParallelMoE(8, 6, 4, Routing(2), experts=mesh["dp", "tp"])
    return str(found.value)


def test_replicas_with_other_seeds_are_refused(ranks):
    for found in ranks(2, other_seeds):
        assert "must be the same on every expert-parallel rank" in found


# ---- which ranks ----


RULE = "ParallelMoE: experts must be mesh['dp', 'tp'] or a ProcessGroup of its ranks"


def refused(world, kind: str):
    mesh = world.mesh(2, 2)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True)
    arguments = dict(hidden_size=8, ffn_size=6, num_experts=8, routing=Routing(2), tp=tp)
    groups = {
        "sizes": dict(experts=mesh["dp", "tp"], num_experts=6),
        "dp": dict(experts=mesh["dp"]),
        "part": dict(experts=mesh["tp"], tp=TensorParallel(mesh["dp", "tp"]._flatten())),
        "text": dict(experts="dp"),
        "bitwise": dict(experts=mesh["dp", "tp"], tp=TensorParallel(mesh["tp"], bitwise=2)),
    }
    with pytest.raises(ValueError) as found:
        ParallelMoE(**arguments | groups[kind])
    return str(found.value)


@pytest.mark.parametrize("kind, message", [
    ("sizes", "ParallelMoE: num_experts=6 is not divisible by expert-parallel size 4; use 1, 2, 3 or 6"),
    ("dp", f"{RULE}, the tensor-parallel ranks of one replica behind those of another, got ranks [0, 2], whose"),
    ("part", f"{RULE}, the tensor-parallel ranks of one replica behind those of another, got ranks [0, 1], whose"),
    ("text", f"{RULE}, got 'dp'"),
    ("bitwise", "ParallelMoE: experts over replicas are not built for bitwise=2; leave experts off, or bitwise"),
])  # fmt: skip
def test_which_ranks_are_refused(ranks, kind, message):
    found = ranks(4, refused, kind)
    assert found[0].startswith(message) and all(text.startswith(message[:60]) for text in found)


def one_replica(world):
    tp = TensorParallel(world.mesh(1, 2)["tp"], sequence_parallel=True)
    layer = make(CASES["many rows"], FP32, tp, world.mesh(1, 2)["dp", "tp"])
    with pytest.raises(ValueError) as found:
        TransformerBlock(16, 2, tp=tp, experts=world.mesh(1, 2)["dp", "tp"])
    return layer.experts == tp, str(found.value)


def test_one_replica_is_as_without(ranks):
    for same, message in ranks(2, one_replica):
        assert same and message.startswith("TransformerBlock: experts= divides experts among ranks and needs")
