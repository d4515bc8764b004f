"""Adapters of experts at 1, 2 and 4 ranks and over replicas: the same bits, the values of W + s B A, no work for what
is frozen."""

import pytest
import torch
from torch.func import functional_call

from tests.common import Recorder, error
from tests.layers import test_expert_ranks as over_replicas
from tests.layers import test_moe as moe
from tests.planted import Mistaken, doubled, planted
from tpfuse import MainGrad, TensorParallel, add_lora, merge_lora, unmerge_lora
from tpfuse.layers import Call, ParallelMoE
from tpfuse.layers.shards import named_specs

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
LOW_RANK = "tpfuse.kernels.experts.low_rank.LowRank"


def adapted(layer: ParallelMoE, *targets: str) -> ParallelMoE:
    """With adapters whose B is not zero, the same at every split."""
    add_lora(layer, rank=3, alpha=6.0, targets=targets or ("fc1", "fc2"))
    for name, _, spec, tp in named_specs(layer.lora):
        if name.startswith("B"):
            full = torch.randn(spec.shape, generator=torch.Generator().manual_seed(len(spec.shape)))
            with torch.no_grad():
                layer.lora.get_parameter(name).copy_(0.1 * full[spec.local(tp)])
    return layer


def with_adapters(right, *args, **options):
    return adapted(right(*args, **options)).requires_grad_()


def run(world, name: str, sp: bool, dtype: torch.dtype):
    """Results with all parameters trained, as ``moe.run`` has them."""
    with planted("tests.layers.test_moe.make", with_adapters):
        return moe.run(world, name, sp, dtype)


def differing(name: str, every, dtype: torch.dtype) -> set[str]:
    with planted("tests.layers.test_moe.make", with_adapters):
        return moe.differing(name, every, dtype)


@pytest.mark.parametrize("name, R, sp, dtype", [
    ("one row a rank", 4, True, FP32),
    ("one row a rank", 2, False, BF16),
    ("many rows", 2, True, BF16),
    pytest.param("many rows", 4, False, FP32, marks=pytest.mark.slow),
    ("starved ranks", 4, True, FP32),
    ("padded", 2, False, FP32),
    pytest.param("one row", 4, True, BF16, marks=pytest.mark.slow),
])  # fmt: skip
def test_bits_at_every_size(ranks, name, R, sp, dtype):
    """Also of rows that are sent again in backward."""
    assert differing(name, ranks(R, run, name, sp, dtype), dtype) == set()


def all_rows_at_once(right, pair, x, rows):
    """One product of all rows with the A of all experts, of which each row takes its own's."""
    a = pair.a.to(x.dtype)
    every = (x @ a.flatten(0, 1).T).unflatten(1, a.shape[:2])
    expert = torch.arange(len(a)).repeat_interleave(rows.offsets.diff())
    return every[torch.arange(len(x)), expert].mul_(pair.scale)


@pytest.mark.slow
def test_a_mistake_is_seen(ranks):
    every = ranks(4, Mistaken(run, f"{LOW_RANK}.reduced", all_rows_at_once), "one row a rank", True, FP32)
    assert {"lora.B_fc1", "y"} <= differing("one row a rank", every, FP32)


# ---- values ----


def against_merged_weights(*targets: str) -> float:
    """The largest error of the result and of the gradients of x, A and B."""
    case = moe.CASES["many rows"]
    layer, plain = adapted(moe.make(case, None, FP64), *targets), moe.make(case, None, FP64)
    x, dy = moe.data(case, FP64)
    ours = moe.step(layer, case, x, dy)
    assert all((ours[name] is None) == ("lora" not in name) for name in ours if name not in "xy")
    x.requires_grad_()
    y = functional_call(plain, {leaf: getattr(layer, leaf) + d for leaf, d in layer.lora.deltas().items()}, (x,))
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    exact = torch.autograd.grad(y, [x, *trained.values()], dy)
    return max(map(error, [ours["y"], *(ours[name] for name in ("x", *trained))], [y, *exact]))


@pytest.mark.parametrize("targets", [("fc1", "fc2"), ("fc1",), ("fc2",)])
def test_values_and_gradients_are_those_of_merged_weights(targets):
    assert against_merged_weights(*targets) < 1e-12


def test_tensors_in_place_of_parameters():
    case = moe.CASES["many rows"]
    layer, (x, _) = adapted(moe.make(case, None, FP64)), moe.data(case, FP64)
    tensors = {name: p.detach().clone() for name, p in layer.named_parameters()}
    assert torch.equal(functional_call(layer, tensors, (x,)), layer(x))


@pytest.mark.parametrize("function", ["reduced", "reduced_gradient"])
def test_a_wrong_scale_is_seen(function):
    with planted(f"{LOW_RANK}.{function}", doubled):
        assert against_merged_weights("fc2") > 1e-3


def test_a_fresh_adapter_changes_nothing_and_a_merged_one_only_where_it_stands():
    case = moe.CASES["padded"]
    x, plain = moe.data(case, FP64)[0], moe.make(case, None, FP64)
    fresh = add_lora(moe.make(case, None, FP64), rank=3, alpha=6.0, targets=["fc1", "fc2"])
    assert torch.equal(fresh(x), plain(x))
    layer = adapted(moe.make(case, None, FP64))
    y = layer(x)
    assert error(merge_lora(layer)(x), y) < 1e-13 and error(y, plain(x)) > 1e-3
    assert error(unmerge_lora(layer)(x), y) < 1e-13 and error(layer.fc1, plain.fc1) < 1e-14


# ---- what it costs ----


def spied(world, keep: bool):
    """-> shapes of the gradients of weights, and how many messages; with adapters, and where nothing is trained."""
    case, tp, results = moe.CASES["many rows"], TensorParallel(world.group, sequence_parallel=True), []
    for trains in (True, False):
        layer = adapted(moe.make(case, tp, FP32))
        layer.lora.requires_grad_(trains)
        with Recorder() as seen:
            moe.step(layer, case, *moe.data(case, FP32), keep=keep)
        shapes = {tuple(c.inputs[-1].shape) for c in seen.calls if c.name == "experts_wgrad_add"}
        assert not any(c.name in ("experts_wgrad", "router_wgrad") for c in seen.calls)
        results.append((shapes, sum(c.name == "exchange_rows" for c in seen.calls)))
    return results


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_frozen_costs_nothing(ranks, keep):
    """Every gradient of a weight is thin; no message but the layer's own, and rows are sent again for them alone."""
    for (thin, messages), (none, fewer) in ranks(2, spied, keep):
        assert thin == {(4, 3, 64), (4, 80, 3), (4, 3, 40), (4, 64, 3)} and none == set()
        assert messages == fewer + (not keep)


def test_an_update_that_16_bits_would_lose_is_not_lost():
    """Pairs are fp32 beside bf16 weights, and so are their gradients, in MainGrad too."""
    case = moe.CASES["many rows"]
    layer, (x, dy) = adapted(moe.make(case, None, BF16)), moe.data(case, BF16)
    exact = moe.step(adapted(moe.make(case, None, FP32)), case, x.float(), dy.float())
    found = moe.step(layer, case, x, dy)
    for name, p in layer.lora.named_parameters():
        assert p.dtype == p.grad.dtype == FP32 and error(p.grad, exact[f"lora.{name}"]) < 0.1
    layer.zero_grad()
    MainGrad(layer)
    for _ in range(2):
        layer(x, call=Call(batch=1, seq=case.M)).backward(dy)
    assert all(torch.equal(p.main_grad, 2 * found[f"lora.{name}"]) for name, p in layer.lora.named_parameters())


@pytest.mark.slow
def test_compiled():
    case = moe.CASES["many rows"]
    x, dy = moe.data(case, FP32)
    eager, layer = moe.step(adapted(moe.make(case, None, FP32)), case, x, dy), adapted(moe.make(case, None, FP32))
    layer.compile(fullgraph=True, backend="aot_eager")
    compiled = moe.step(layer, case, x, dy)
    assert all(torch.equal(value, eager[key]) for key, value in compiled.items() if value is not None)


# ---- over replicas ----


def replicated_run(world, *args):
    with planted("tests.layers.test_expert_ranks.make", with_adapters):
        return over_replicas.run(world, *args)


def replicated_differing(*args) -> set[str]:
    with planted("tests.layers.test_expert_ranks.make", with_adapters):
        return over_replicas.differing(*args)


@pytest.mark.parametrize("name, dp, R, sp", [("many rows", 2, 4, True), ("unequal replicas", 2, 2, True)])
def test_bits_over_replicas(ranks, name, dp, R, sp):
    every = ranks(R, replicated_run, name, dp, sp, FP32)
    assert replicated_differing(name, every, FP32) == set()


def undivided(right, work, total):
    return right(work._replace(divisor=1), total)


def test_gradients_that_are_not_divided_are_seen(ranks):
    target = "tpfuse.sequence_parallel.records.ExpertWeightGrad.add_to"
    every = ranks(4, Mistaken(replicated_run, target, undivided), "many rows", 2, True, FP32)
    assert replicated_differing("many rows", every, FP32) == {
        f"lora.{letter}_{leaf}" for letter in "AB" for leaf in ("fc1", "fc2")
    }
