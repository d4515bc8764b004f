"""A measured case: errors, rates, the rows and the notes."""

import dataclasses

import pytest
import torch

import tpfuse.tools.bench.measure as timing
from tests.tools.bench.common import CARD, CPU, LAYER_NORM, random
from tpfuse.kernels.runtime.op import Cost
from tpfuse.tools.bench import output
from tpfuse.tools.bench.count import CallCount, OpCount, count
from tpfuse.tools.bench.definition import Bench, discover, load
from tpfuse.tools.bench.roofline import Card, measure_card
from tpfuse.tools.bench.run import COLUMNS, BenchCase, Errors, Setting, available, bound, calls, measure, speed

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
    rows, _ = measure(BenchCase(LAYER_NORM, (64, 1024), "fp32", ["fwd", "bwd"], ["torch"]), slow)
    assert [row["bound"] for row in rows] == ["cache" if marked else "memory"] * 2
    assert ["cache" in line for line in output.cached(rows, cache)] == [True] * marked


def test_a_table_counts_as_far_as_it_is_read(monkeypatch):
    """Two sets of a table of 4 MiB fill a cache of 2 MiB, but the rows that are looked up do not."""
    monkeypatch.setattr(timing, "cache_bytes", lambda _: 2 << 20)
    slow = dataclasses.replace(HERE, card=Card("a card", 1e9, {"fp32": 10.0}))
    rows, _ = measure(BenchCase(load("embedding"), (1 << 15, 4, 32), "fp32", ["fwd"], ["torch"]), slow)
    assert [row["bound"] for row in rows] == ["cache"]


# ---- errors ----


def test_errors_are_against_fp64_and_beside_torch():
    errors = Errors(LAYER_NORM, lambda: LAYER_NORM.inputs(random(dtype=torch.bfloat16), 8, 64))
    assert errors.of("torch", LAYER_NORM.providers["torch"])["step"][1] == 1.0
    wrong = errors.of("tpfuse", lambda x, w, b: LAYER_NORM.providers["tpfuse"](x * 1.1, w, b + 0.25))
    right = errors.of("tpfuse", LAYER_NORM.providers["tpfuse"])
    assert right["fwd"][0] < 0.01 < 0.05 < wrong["fwd"][0] and right["bwd"][1] <= 2 < wrong["fwd"][1]
    assert set(right) == {"fwd", "bwd", "step"}


def test_inputs_and_output_gradients_are_exact_for_everybody():
    """What only moves numbers has no error: those of the truth were rounded too."""
    copy = dict.fromkeys(("tpfuse", "torch"), lambda x: x * 1)
    bench = Bench("copy", ("M",), (), ((8,),), lambda random, M: (random(M),), copy)
    errors = Errors(bench, lambda: bench.inputs(random(dtype=torch.bfloat16), 64))
    assert errors.of("tpfuse", copy["tpfuse"]) == {mode: (0.0, 0.0) for mode in ("fwd", "bwd", "step")}


def test_a_mask_of_ones_own_is_not_compared():
    bench = load("dropout")
    errors = Errors(bench, lambda: bench.inputs(random(), 8, 64))
    assert errors.of("torch", bench.providers["torch"]) == {}
    assert max(errors.of("tpfuse", bench.providers["tpfuse"])["step"]) <= 2.0
    assert errors.of("tpfuse", bench.providers["torch"])["fwd"][0] > 0.1  # another mask would be seen


def test_a_loss_starts_its_backward_with_one():
    bench = load("cross_entropy")
    loss = calls(bench.providers["torch"], [bench.inputs(random(), 4, 8)], None, "step", random())(0)[1][0]
    assert torch.allclose(loss.sum(-1), torch.zeros(4), atol=1e-6) and loss.abs().sum() > 0


# ---- rows ----


def fails(*_):
    raise RuntimeError("no such kernel\nand a long story")


def test_a_provider_that_fails_costs_the_others_nothing():
    bench = dataclasses.replace(LAYER_NORM, providers=LAYER_NORM.providers | dict(broken=fails))
    rows, notes = measure(BenchCase(bench, (4, 8), "fp32", ["fwd", "bwd"], ["broken", "tpfuse", "torch"]), HERE)
    assert [(row["mode"], row["provider"]) for row in rows] == [
        (m, p) for m in ("fwd", "bwd") for p in ("tpfuse", "torch")
    ]
    assert "layer_norm 4x8 fp32 fwd: broken is left out: no such kernel" in notes
    assert all(set(row) == {*COLUMNS, "bytes", "flops"} for row in rows)


def test_bytes_are_those_of_tpfuse_for_everybody():
    rows, notes = measure(BenchCase(LAYER_NORM, (4, 8), "fp32", ["fwd"], ["torch"]), HERE)
    x, *vectors = LAYER_NORM.inputs(random(), 4, 8)
    with count() as counted:
        LAYER_NORM.providers["tpfuse"](x, *vectors)
    assert [row["bytes"] for row in rows] == [counted.bytes] and rows[0]["path"] == "eager" and notes == []


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
    error, ratio = errors.of("tpfuse", bench.providers["tpfuse"])["step"]
    assert error < 1e-5


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """The card's ceilings, graphs, registers and memory are there."""
    bench, device = load("reduce_bias_dropout_add_norm"), torch.device("cuda")
    card = measure_card(device, {"bf16": torch.bfloat16}, copy_mib=256, side=2048)
    case = BenchCase(bench, (1, 512, 1024), "bf16", ["fwd", "bwd", "step"], ["tpfuse", "torch"])
    rows, notes = measure(case, Setting(card, device, 0.05))
    assert notes == [] and len(rows) == 6 and {row["timed"] for row in rows if row["mode"] != "step"} == {"graph"}
    for row in rows:
        assert row["p50_us"] > 0 and row["peak_mib"] > 0 and row["roofline"] < 2
        assert row["provider"] == "torch" or (row["registers"] > 0 and row["spills"] == 0 and "_kernel" in row["path"])
        assert row["error_ratio"] <= 2
