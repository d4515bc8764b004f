"""The report on a GPU, rehearsed on a CPU: every part runs, nothing is kept, and tables are made from a report."""

import dataclasses
import json
import time

import pytest
import torch

from bench import documents, gpu_report, measured
from bench.harness.bench import discover
from bench.harness.roofline import Card

CPU = torch.device("cpu")
TESTS = """
import pytest, time
def test_good(): ...
@pytest.mark.parametrize("x", ["a b", "c"])
def test_bad(x): assert x == "c"
@pytest.mark.skip
def test_not(): ...
def test_slow(): time.sleep({seconds})
"""


def plan_with(tmp_path, seconds: float):
    (tmp_path / "test_some.py").write_text(TESTS.format(seconds=seconds))
    return dataclasses.replace(gpu_report.tiny(), tests=(str(tmp_path / "test_some.py"), "-p", "no:cacheprovider"))


def test_tests_are_counted(tmp_path):
    found, notes = gpu_report.run_tests(plan_with(tmp_path, 0), time.monotonic() + 60)
    assert (found["passed"], found["failed"], found["skipped"], notes) == (3, 1, 1, [])
    assert [name.split("::")[-1] for name in found["failures"]] == ["test_bad[a b]"]


MEETING = """
import pathlib, time, pytest
HERE = pathlib.Path(__file__).parent
@pytest.mark.parametrize("own, other", ["ab", "ba"])
def test_meets(own, other):
    (HERE / own).touch()
    for _ in range(1000):
        if (HERE / other).exists():
            return
        time.sleep(0.01)
    assert False
"""


def test_tests_run_side_by_side(tmp_path):
    """Each waits for the other: what they spend on compiling kernels is spent at the same time."""
    plan = plan_with(tmp_path, 0)
    (tmp_path / "test_some.py").write_text(MEETING)
    found, notes = gpu_report.run_tests(plan, time.monotonic() + 60)
    assert (found["passed"], found["failed"], notes) == (2, 0, [])


def test_tests_that_take_too_long_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpu_report.threading,
        "Timer",
        lambda seconds, kill: type("Now", (), dict(start=staticmethod(kill), cancel=int))(),
    )
    found, notes = gpu_report.run_tests(plan_with(tmp_path, 600), time.monotonic() + 60)
    assert notes == ["tests: not all of them ended in time"] and found["failed"] == 0


def test_a_rehearsal(tmp_path, monkeypatch, capsys):
    plan = plan_with(tmp_path, 0)
    monkeypatch.setattr(gpu_report, "tiny", lambda: plan)
    monkeypatch.setattr(measured, "RESULTS", tmp_path / "results")
    assert gpu_report.main(["--device", "cpu", "--out", str(tmp_path / "out")]) == 1  # for a test failed
    made = json.loads((tmp_path / "out/rehearsal.json").read_text())
    assert made["dry_run"] is True and not (tmp_path / "results").exists()
    assert made["tests"]["passed"] == 3 and made["notes"] == [] and made["host_us"]["tpfuse"] > 0
    ops = {"layer_norm", "reduce_bias_dropout_add_norm"}
    assert {(r["op"], r["mode"], r["provider"]) for r in made["rows"]} == {
        (op, mode, who) for op in ops for mode in ("fwd", "bwd") for who in ("tpfuse", "torch")
    }
    assert {(r["layer"], r["provider"]) for r in made["layers"]} == {
        (layer, who) for layer in ("BERT-large layer", "GPT 2.7B block") for who in ("tpfuse", "torch")
    }
    assert all(r["p50_ms"] > 0 and r["matrix_share"] > 0 for r in made["layers"])
    assert (tmp_path / "out/roofline.png").exists() == bool(pytest.importorskip("matplotlib"))
    assert "| host time of a fused op" in capsys.readouterr().out


def test_no_time_left_is_said():
    plan, past = gpu_report.tiny(), time.monotonic() - 1
    card = Card("a card", 1.0, {"fp32": 1.0})
    assert gpu_report.run_benches(plan, past, card, CPU) == (
        [],
        ["layer_norm 16x32: no time left", "reduce_bias_dropout_add_norm 2x8x32: no time left"],
    )
    assert gpu_report.run_layers(plan, past, card, CPU) == (
        [],
        [f"{layer.name}: no time left" for layer in plan.layers],
    )


def test_the_full_plan_sees_every_op_first():
    plan = gpu_report.full()
    assert {bench.name for bench, _ in plan.cases[: len(discover())]} == set(discover())
    assert sum(len(bench.shapes) for bench in {bench.name: bench for bench, _ in plan.cases}.values()) == len(
        plan.cases
    )
    assert plan.seconds <= 540 and max(plan.shares.values()) < 1
    bert, gpt = plan.layers
    assert (bert.B, bert.S, bert.width, bert.dropout, gpt.width, gpt.heads, gpt.S) == (
        8,
        512,
        1024,
        0.1,
        2560,
        32,
        2048,
    )
    assert bert.flops == pytest.approx(335.007e9, rel=1e-3)


def test_the_time_is_given(tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr(gpu_report, "report", lambda plan, device, start: plans.append(plan) or exit())
    for given in ((), ("--seconds", "1200")):
        with pytest.raises(SystemExit):
            gpu_report.main(["--device", "cpu", "--out", str(tmp_path / "out"), *given])
    assert [plan.seconds for plan in plans] == [540, 1200]


def test_it_needs_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_report.main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "sees no GPU" in error and not (tmp_path / "out").exists()


# ---- the tables ----


def row(op, shape, mode, provider, p50, **others):
    return (
        dict(
            op=op,
            shape=shape,
            mode=mode,
            provider=provider,
            p50_us=p50,
            gbs=900.0,
            roofline=0.9,
            error_ratio=1.0,
            peak_mib=1.0,
        )
        | others
    )


def block(layer, provider, timed, p50, tflops=400.0):
    return dict(layer=layer, provider=provider, timed=timed, p50_ms=p50, tflops=tflops, matrix_share=tflops / 800)


NORM = "reduce_bias_dropout_add_norm"
REPORT = dict(
    dry_run=False,
    card=dict(name="NVIDIA Pretend", copy_gbs=1000.0, matrix_tflops={"bf16": 800.0}),
    host_us=dict(tpfuse=18.4, torch=30.0),
    rows=[
        row(NORM, "1x8192x1024", "fwd", "tpfuse", 10.0, gbs=880.0),
        row(NORM, "1x8192x4096", "fwd", "tpfuse", 40.0, gbs=910.0),
        row(NORM, "1x8192x4096", "bwd", "tpfuse", 50.0, gbs=800.0),
        row(NORM, "1x8192x4096", "fwd", "torch", 100.0),
        row("linear_gelu", "8192x16384x4096", "fwd", "tpfuse", 98.0),
        row("linear_gelu", "8192x16384x4096", "fwd", "gemm", 100.0),
        row("linear_gelu", "4096x4096x1024", "fwd", "tpfuse", 5.0),
        row("linear_gelu", "4096x4096x1024", "fwd", "gemm", 1.0),
    ],
    layers=[block("BERT-large layer", who, how, ms) for who, how, ms in (
        ("tpfuse", "events", 0.8), ("compile", "events", 1.2), ("tpfuse", "graph", 0.6), ("compile", "graph", 0.9),
    )] + [block("GPT 2.7B block", "tpfuse", "graph", 9.0, tflops=560.0)],
)  # fmt: skip


def test_figures_come_from_the_report():
    text = measured.summary([REPORT])
    cells = [line.split(" | ")[1].rstrip(" |") for line in text.splitlines()[2:]]
    assert cells == [
        "88 % to 91 % / 80 %",
        "not measured yet",
        "0.98x",
        "not measured yet",
        "not measured yet",
        "1.50x launched from Python, 1.50x as a CUDA graph; 0.60 ms",
        "560 TFLOP/s, 70 % of the measured matrix rate",
        "18 us",
    ]
    assert (
        "| reduce_bias_dropout_add_norm | NVIDIA Pretend | 1x8192x4096 | fwd | 40.0 | 910 | 90 % | 2.50 |  | 1.00 |"
        in measured.ops([REPORT])
    )
    assert "| BERT-large layer | NVIDIA Pretend | compile | 1.20 | 0.90 |" in measured.layers([REPORT])


def test_what_no_report_holds_is_not_measured_yet():
    lines = measured.gpu([]).splitlines()
    assert sum(line.endswith("| not measured yet |") for line in lines) == len(measured.FIGURES)
    assert f"Ops not measured yet: {', '.join(discover())}." in lines
    assert "Ops not measured yet: attention," in measured.ops([REPORT])


def test_rehearsals_and_other_results_are_no_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    for name, content in dict(a=REPORT, b=REPORT | dict(dry_run=True), c=dict(rows=[])).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert measured.reports() == [REPORT]


def test_only_what_lies_between_the_markers_changes(tmp_path):
    path, (begin, end) = tmp_path / "page.md", documents.markers("bench.some", "gpu")
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    documents.write(path, "bench.some", {"gpu": measured.gpu([])})
    made = path.read_text()
    assert made == f"before\n{begin}\n\n{measured.gpu([])}\n\n{end}\nafter\n" and "old" not in made
    documents.write(path, "bench.some", {"gpu": measured.gpu([])})
    assert path.read_text() == made
    for broken in ("no markers", begin, end):
        with pytest.raises(ValueError, match="a document needs the lines"):
            documents.replaced(broken, "bench.some", "gpu", "")


@pytest.mark.parametrize("part", measured.parts())
def test_the_tables_are_what_the_results_say(part):
    """After a new result: python -m bench.measured"""
    text = measured.PAGE.read_text()
    assert documents.replaced(text, measured.COMMAND, part, measured.parts()[part]) == text
