"""A measured case: errors, rates, the rows and the notes."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import tpfuse.tools.bench.measure as timing
from tests.tools.bench.common import CARD, CPU, LAYER_NORM, declared, random
from tpfuse.kernels.runtime.op import Cost
from tpfuse.tools.accuracy import kernel_limit
from tpfuse.tools.bench import output
from tpfuse.tools.bench.count import CallCount, OpCount, count
from tpfuse.tools.bench.definition import DTYPES, Bench, discover, load
from tpfuse.tools.bench.roofline import Card, measure_card
from tpfuse.tools.bench.run import (
    COLUMNS,
    BenchCase,
    Errors,
    Setting,
    available,
    bound,
    calls,
    judgement,
    measure,
    speed,
)

HERE = Setting(CARD, CPU, 0.0)


# ---- rates ----


def test_rates_count_the_useful_work():
    counted = CallCount([OpCount("norm_fwd", Cost(3 * 10**9, 10**9, 10**11), [], "cpu")])
    assert speed(counted, "bf16", 0.01, CARD) == pytest.approx(
        dict(tflops=10.0, gbs=400.0, roofline=0.4, bytes=4 * 10**9, flops=10**11)
    )
    assert set(speed(None, "bf16", 0.01, CARD).values()) == {None}


def rates(moved, flops, share):
    return dict(bytes=moved, flops=flops, roofline=share)


def test_what_a_share_is_of():
    assert bound(rates(10**9, 0, 0.5), "bf16", CARD, cached=False) == "memory"
    assert bound(rates(10**9, 0, 0.5), "bf16", CARD, cached=True) == "cache"
    assert bound(rates(10**9, 0, 1.01), "bf16", CARD, cached=False) == "cache"
    assert bound(rates(10**9, 10**12, 0.5), "bf16", CARD, cached=True) == "matrix"
    assert bound(rates(None, None, None), "bf16", CARD, cached=True) is None


@pytest.mark.parametrize("cache, marked", [(1 << 10, False), (1 << 30, True)])
def test_inputs_that_fit_into_the_cache_are_marked(monkeypatch, cache, marked):
    """64 rows of 4 KiB: 128 sets of them are 32 MiB."""
    monkeypatch.setattr(timing, "cache_bytes", lambda _: cache)
    slow = dataclasses.replace(HERE, card=Card("a card", 1e9, {"fp32": 10.0}))  # no call is faster than its memory
    rows, *_ = measure(BenchCase(LAYER_NORM, (64, 1024), "fp32", ["fwd", "bwd"], ["torch"]), slow)
    assert [row["bound"] for row in rows] == ["cache" if marked else "memory"] * 2
    assert ["cache" in line for line in output.cached(rows, cache)] == [True] * marked


def test_a_table_counts_as_far_as_it_is_read(monkeypatch):
    """Two sets of a table of 4 MiB fill a cache of 2 MiB, but the rows that are looked up do not."""
    monkeypatch.setattr(timing, "cache_bytes", lambda _: 2 << 20)
    slow = dataclasses.replace(HERE, card=Card("a card", 1e9, {"fp32": 10.0}))
    rows, *_ = measure(BenchCase(load("embedding"), (1 << 15, 4, 32), "fp32", ["fwd"], ["torch"]), slow)
    assert [row["bound"] for row in rows] == ["cache"]


# ---- errors ----


def layer_norm_errors(dtype=torch.bfloat16):
    return Errors(LAYER_NORM, lambda: LAYER_NORM.inputs(random(dtype=dtype), 8, 64))


def wrong_modes(errors, fn):
    return {mode for mode, pair in errors.of("tpfuse", fn).items() if judgement(pair)["wrong"]}


def test_errors_are_against_fp64_and_limits_follow_from_torchs():
    errors, torchs = layer_norm_errors(), LAYER_NORM.providers["torch"]
    error, limit = errors.of("torch", torchs)["fwd"]
    assert 0 < error < limit == kernel_limit(error, torch.bfloat16, 8 * 64)
    assert errors.of("tpfuse", LAYER_NORM.providers["tpfuse"])["fwd"][0] <= limit
    assert set(errors.of("torch", torchs)) == {"fwd", "bwd", "step"}


WRONG = {
    "a hundredth": (lambda x, w, b: 1.01 * F.layer_norm(x, w.shape, w, b), {"fwd", "bwd", "step"}),
    "a gradient": (lambda x, w, b: F.layer_norm(x, w.shape, w, b.detach()), {"bwd", "step"}),
    "no number": (lambda x, w, b: F.layer_norm(x, w.shape, w, b) * float("nan"), {"fwd", "bwd", "step"}),
    "another shape": (lambda x, w, b: F.layer_norm(x, w.shape, w, b)[:, 1:], {"fwd", "bwd", "step"}),
    "one output too many": (lambda x, w, b: (F.layer_norm(x, w.shape, w, b), x.detach()), {"fwd", "step"}),
    "nothing": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), set()),
}


@pytest.mark.parametrize("fn, modes", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_wrong_is_beyond_its_limit(fn, modes, dtype):
    assert wrong_modes(layer_norm_errors(dtype), fn) == modes


def test_inputs_and_output_gradients_are_exact_for_everybody():
    """What only moves numbers has no error: those of the truth were rounded too."""
    copy = dict.fromkeys(("tpfuse", "torch"), lambda x: x * 1)
    bench = Bench("copy", ("M",), (), ((8,),), lambda random, M: (random(M),), copy)
    errors = Errors(bench, lambda: bench.inputs(random(dtype=torch.bfloat16), 64))
    assert {error for error, _ in errors.of("tpfuse", copy["tpfuse"]).values()} == {0.0}


def test_a_mask_of_ones_own_is_not_compared():
    bench = load("dropout")
    errors = Errors(bench, lambda: bench.inputs(random(), 8, 64))
    assert errors.of("torch", bench.providers["torch"]) == errors.of("compile", bench.providers["torch"]) == {}
    assert wrong_modes(errors, bench.providers["tpfuse"]) == set()
    assert wrong_modes(errors, bench.providers["torch"]) == {"fwd", "bwd", "step"}  # another mask would be seen


def test_a_loss_starts_its_backward_with_one():
    bench = load("cross_entropy")
    loss = calls(bench.providers["torch"], [bench.inputs(random(), 4, 8)], None, "step", random())(0)[1][0]
    assert torch.allclose(loss.sum(-1), torch.zeros(4), atol=1e-6) and loss.abs().sum() > 0


# ---- rows ----


def fails(*_):
    raise RuntimeError("no such kernel\nand a long story")


def test_a_provider_that_fails_costs_the_others_nothing():
    bench = dataclasses.replace(LAYER_NORM, providers=LAYER_NORM.providers | dict(broken=fails))
    rows, notes, _ = measure(BenchCase(bench, (4, 8), "fp32", ["fwd", "bwd"], ["broken", "tpfuse", "torch"]), HERE)
    assert [(row["mode"], row["provider"]) for row in rows] == [
        (m, p) for m in ("fwd", "bwd") for p in ("tpfuse", "torch")
    ]
    assert "layer_norm 4x8 fp32 fwd: broken is left out: no such kernel" in notes
    assert all(set(row) == set(COLUMNS) for row in rows)


def test_a_forward_alone_is_timed_and_judged():
    """A kernel that autograd does not see has no backward, and its values are compared."""
    alone = lambda x, w, b: F.layer_norm(x.detach(), w.shape, w.detach(), b.detach())
    bench = dataclasses.replace(LAYER_NORM, providers=dict(mine=alone, torch=LAYER_NORM.providers["torch"]))
    rows, notes, _ = measure(BenchCase(bench, (4, 8), "fp32", ["fwd", "bwd"], ["mine", "torch"]), HERE)
    assert [(r["mode"], r["provider"], r["wrong"]) for r in rows] == [
        ("fwd", "mine", False),
        ("fwd", "torch", False),
        ("bwd", "torch", False),
    ]
    assert "layer_norm 4x8 fp32 bwd: mine is left out: no output of it has a gradient" in notes


def test_speed_ups_are_over_the_baseline():
    providers = dict(a=LAYER_NORM.providers["tpfuse"], b=LAYER_NORM.providers["torch"])
    bench = dataclasses.replace(LAYER_NORM, providers=providers, baseline="b")
    rows, notes, _ = measure(BenchCase(bench, (4, 8), "fp32", ["fwd"], ["a", "b"]), HERE)
    assert [row["speedup"] for row in rows][1] == 1.0 and notes == []
    assert 0 < rows[0]["speedup_p20"] <= rows[0]["speedup"] <= rows[0]["speedup_p80"]
    assert {row["baseline"] for row in rows} == {"b"} and all(row["bytes"] for row in rows)
    (row,), *_ = measure(BenchCase(bench, (4, 8), "fp32", ["fwd"], ["a"]), HERE)
    assert row["speedup"] is None


def test_bytes_are_those_of_tpfuse_for_everybody():
    rows, notes, _ = measure(BenchCase(LAYER_NORM, (4, 8), "fp32", ["fwd"], ["torch"]), HERE)
    x, *vectors = LAYER_NORM.inputs(random(), 4, 8)
    with count() as counted:
        LAYER_NORM.providers["tpfuse"](x, *vectors)
    assert [row["bytes"] for row in rows] == [declared(counted)] and rows[0]["path"] == "eager" and notes == []


def test_peers_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names, notes = available(LAYER_NORM, None)
    assert names == ["tpfuse", "torch", "compile"] and notes == ["liger is left out: pip install liger-kernel"]
    assert available(load("linear_gelu"), ["gemm", "liger"])[0] == ["gemm"]


@pytest.mark.parametrize("name", discover())
def test_every_op_runs_as_torch_does(name):
    """A small shape of each: tpfuse and torch take the same inputs and agree, forward and backward."""
    bench = load(name)
    shape = tuple(min(n, 16) for n in bench.cpu_shapes[0])
    assert isinstance(bench, Bench) and bench.name == name
    assert all(len(each) == len(bench.axes) for each in (*bench.shapes, *bench.cpu_shapes))
    errors = Errors(bench, lambda: bench.inputs(random(), *shape))
    assert errors.of("tpfuse", bench.providers["tpfuse"])["step"][0] < 1e-5
    for dtype in DTYPES.values():
        errors = Errors(bench, lambda dtype=dtype: bench.inputs(random(dtype=dtype), *shape))
        assert wrong_modes(errors, bench.providers["tpfuse"]) == set(), dtype


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """The card's ceilings, graphs, registers and memory are there."""
    bench, device = load("reduce_bias_dropout_add_norm"), torch.device("cuda")
    card = measure_card(device, {"bf16": torch.bfloat16}, copy_mib=256, side=2048)
    case = BenchCase(bench, (1, 512, 1024), "bf16", ["fwd", "bwd", "step"], ["tpfuse", "torch"])
    rows, notes, _ = measure(case, Setting(card, device, 0.05))
    assert notes == [] and len(rows) == 6 and {row["timed"] for row in rows if row["mode"] != "step"} == {"graph"}
    for row in rows:
        assert row["p50_us"] > 0 and row["peak_mib"] > 0 and row["roofline"] < 2
        assert row["provider"] == "torch" or (row["registers"] > 0 and row["spills"] == 0 and "_kernel" in row["path"])
        assert row["wrong"] is False and 0 < row["speedup_p20"]


def test_where_an_op_pays_is_said_below_the_table():
    """1000 GB/s and 100 TFLOP/s: a row of x of int8 takes as long as 8 products of a dense one at 16 %."""
    bench = load("sparse")
    assert "up to a density of 16.0% where rows of x come from memory each time, 32.0% or 64.0%" in bench.remark(
        CARD, "bf16", (4096, 4096, 1024, 8, 5)
    )
    case = BenchCase(bench, (32, 16, 40, 8, 30), "fp32", ("fwd",), providers=("tpfuse", "torch"))
    results = measure(case, HERE)
    assert [row["wrong"] for row in results.rows] == [
        False,
        False,
    ] and "by the roofline of an H100's data sheet" in results.notes[-1]
