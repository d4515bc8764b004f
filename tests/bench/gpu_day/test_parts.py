"""What a day runs and in which order; the tables it is read from."""

import contextlib
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from bench import tune
from bench.gpu_day.part import Absent, Context, require, tool
from bench.gpu_day.parts import candidates, counters, kernels, rows, setup, suite, tuning
from bench.gpu_day.parts.layers import of
from bench.gpu_day.plan import DAY, SETUP, WORTH, parts, stages
from bench.gpu_day.sheets import data_sheet
from tpfuse.kernels import replay
from tpfuse.kernels.runtime import launch
from tpfuse.kernels.runtime import tuning as _tuning
from tpfuse.tools.bench.definition import discover
from tpfuse.tools.bench.definition import load as load_bench

# ---- what is run ----


def test_the_day_in_order_of_worth():
    names = [part.name for part in DAY]
    assert names[:2] == [SETUP, "correctness"] and len(set(names)) == len(names)
    assert [part.name for part in parts(rehearse=True)] == names
    assert [[part.name for part in stage] for stage in stages(False)][2] == [
        "kernels compiled",
        "memcheck",
        "racecheck",
    ]
    assert sum(part.seconds for part in DAY[:6] if part.stage != "warm") <= 540 and set(WORTH) < set(discover())
    assert names.index("rows of worth") < names.index("layers") < names.index("gpu tests") < names.index("generation")


def test_every_op_is_seen_first(tmp_path):
    """Of the rows of worth and of the others; all shapes are there."""
    full = Context(False, tmp_path, {}, print)
    listed = [name for part in DAY if part.module == rows.__name__ for name in part.jobs(full)]
    plain = [name for name in listed if not name.startswith(rows.COMPILED)]
    assert {name.split()[0] for name in plain[: len(WORTH)]} == set(WORTH)
    assert len(plain) == sum(len(load_bench(name).shapes) for name in discover())
    assert {name.split(": ")[1].split()[0] for name in set(listed) - set(plain)} == set(WORTH)
    bert, gpt = of(False)
    assert (bert.B, bert.S, bert.width, bert.dropout) == (8, 512, 1024, 0.1)
    assert (gpt.width, gpt.heads, gpt.S) == (2560, 32, 2048) and bert.flops == pytest.approx(335.007e9, rel=1e-3)


@pytest.mark.slow
def test_what_is_not_installed_is_said_at_once(monkeypatch, tmp_path):

    assert {"torch", "numpy", "einops", "safetensors", "triton"} <= set(setup.imported())
    monkeypatch.setitem(sys.modules, "einops", None)
    with pytest.raises(RuntimeError, match=r"not installed: einops, which tpfuse/\S+\.py imports"):
        setup.run("machine", Context(True, tmp_path, {}, print))
    monkeypatch.delitem(sys.modules, "einops")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch sees no GPU here; --rehearse"):
        setup.run("machine", Context(False, tmp_path, {}, print))
    for missing in (lambda: require("there_is_none"), lambda: tool("there-is-none")):
        with pytest.raises(Absent, match="is not installed here"):
            missing()


def test_the_gpu_tests_are_dealt_out_and_those_that_passed_are_not_run_again(tmp_path):

    assert "tests/kernels/gemm/test_triton_gemm.py" in suite.marked() and "tests/test_pool.py" not in suite.marked()
    items, found = [SimpleNamespace(nodeid=f"t{i}") for i in range(7)], []
    known = {"gpu tests": [dict(test="t3", outcome="passed"), dict(test="t1", outcome="failed")]}
    session = SimpleNamespace(items=list(items))
    suite.Slice("slice 2 of 2", Context(False, tmp_path, known, found.append)).pytest_collection_finish(session)
    assert [item.nodeid for item in session.items] == ["t1", "t5"] and [row["test"] for row in found] == ["t3"]


def test_what_lies_farthest_from_its_roofline_is_tuned_first():
    row = lambda op, share, **rest: dict(op=op, shape="8x8", mode="fwd", provider="tpfuse", roofline=share) | rest
    found = [row("a", 0.8), row("b", 0.3), row("a", 0.1, mode="step"), row("c", 0.2, provider="torch"), row("d", None)]
    assert tuning.farthest([*found, row("a", 0.25, mode="bwd"), dict(note="no")]) == ["a 8x8", "b 8x8"]


def test_tuning_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    """Of each form of the op; the winners of the earlier try are kept."""
    asks = [tune.Ask(kernel, "sm_90", "bf16 8x8", ()) for kernel in "kl"]

    def tuned(bench, shape, dtype, table, *rest, keep, skip):
        for ask in asks:
            if not skip(ask):
                keep(ask, table)
        return table

    monkeypatch.setattr(tune, "tune", tuned)
    row = dict(case="attention 1x8x2x2x8", p=0.0, arch="sm_90", kernel="k", bucket="bf16 8x8", entry=dict(A=64))
    other, found = row | dict(case="attention 1x4x2x2x8", kernel="l"), []
    context = Context(True, tmp_path, {"tuning": [row, other]}, found.append)
    tuning.run(row["case"], context)
    assert found[0] == row and [(r["p"], r["kernel"]) for r in found] == [
        (0.0, "k"),
        (0.0, "l"),
        (0.1, "k"),
        (0.1, "l"),
    ]


def test_what_tuning_will_try_is_dealt_out(tmp_path, monkeypatch):
    """All candidates of a question together are its neighbours; one that fails costs nothing."""
    ask, ran = tune.Ask("k", "sm_90", "bf16 8x8", (("A", 128), ("num_warps", 4))), []

    @contextlib.contextmanager
    def questions():
        yield [ask]

    def call(i):
        ran.append(_tuning._table().get("sm_90", {}).get("k", {}).get("bf16 8x8"))
        if ran[-1] == dict(A=64):
            raise RuntimeError("out of resource")

    monkeypatch.setattr(tune, "questions", questions)
    monkeypatch.setattr(candidates, "calls", lambda *_: call)
    monkeypatch.setattr(replay, "REPLAY", True)
    found = []
    context = Context(True, tmp_path, {}, found.append)
    for number in (1, 2, 3):
        candidates.run(f"rms_norm 4x8 {number} of 3", context)
    tried = sorted(str(entry) for entry in ran if entry is not None)
    both_modes = [dict(A=64), dict(A=256), dict(num_warps=2), dict(num_warps=8)] * 2
    assert tried == sorted(map(str, both_modes))
    assert sum(row["tried"] for row in found) == 8 and sum(row["failed"] for row in found) == 2


def test_the_longest_kernels_once_each(tmp_path):

    row = lambda kernel, us, case: dict(kernel=kernel, us=us, case=case, mode="fwd", launches=1)
    timed = [
        row("_a", 5.0, "x 1"),
        row("_b", 9.0, "x 1"),
        row("_a", 7.0, "y 2"),
        *(row(f"_{i}", i, "z 3") for i in "123"),
    ]
    timed = [r | dict(us=float(r["us"])) for r in timed]
    assert [(r["kernel"], r["us"]) for r in kernels.longest(timed, 3)] == [("_b", 9.0), ("_a", 7.0), ("_3", 3.0)]
    context = Context(False, tmp_path, {"time of each kernel": timed}, print)
    assert counters.jobs(context)[:2] == ["x 1 fwd _b", "y 2 fwd _a"] and len(counters.jobs(context)) == 5


def test_a_kernels_time_is_not_its_launchs(monkeypatch):
    """The device is kept busy until the host has queued the kernel between its two events."""
    asked = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        record = lambda self: asked.append("event")
        synchronize = lambda self: asked.append("wait")
        elapsed_time = lambda self, end: 0.25

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda._sleep", lambda ticks: asked.append("sleep"))
    monkeypatch.setattr(launch, "_start", lambda *given, **call: asked.append("kernel"))
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="_a_kernel"))
    with kernels.timed() as found:
        launch.launch(kernel, (1,), torch.device("cuda", 0))
    assert asked == ["sleep", "event", "kernel", "event", "wait"] and found == {"_a_kernel": [0.25]}


@pytest.mark.slow
def test_tokens_that_no_graph_has_made_are_not_said_to_be(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from bench.gpu_day.parts import generation

    def generate(model, *given, cuda_graph=False, **options):
        if cuda_graph:
            warnings.warn("generate: goes on without a CUDA graph, which could not be captured: no", stacklevel=2)
        return made(model, *given, **options)

    found, made = [], generation.GPT.generate
    monkeypatch.setattr(generation.GPT, "generate", generate)
    with pytest.raises(RuntimeError, match="tpfuse, CUDA graph: generate: goes on without"):
        generation.run("gpt2", Context(True, tmp_path, {}, found.append))
    (row,) = found
    assert set(row["tokens_per_s"]) == set(row["same_tokens"]) == {"tpfuse", "transformers"}


# ---- the data sheet ----


def test_the_data_sheets():
    h100, h200 = data_sheet("NVIDIA H100 80GB HBM3"), data_sheet("NVIDIA H200")
    assert (h100.matrix_tflops, h100.memory_gbs, h200.matrix_tflops, h200.memory_gbs) == (989, 3350, 989, 4800)
    assert data_sheet("NVIDIA GH200 480GB") is None and data_sheet("a card") is None
