"""The tables of docs/measured.md, made from reports."""

import json

import pytest

from bench import documents, measured
from bench.machine import this_machine
from tpfuse.tools.bench.definition import discover


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
            error=1e-3,
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
        "| reduce_bias_dropout_add_norm | NVIDIA Pretend | 1x8192x4096 | fwd | 40.0 | 910 | 90 % | 2.50 |  | 1.0e-03 |"
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


def test_calls_have_a_column_for_each_kind_of_processor():
    row = dict(model="llama", dtype="fp32", batch=1, name="decode", prompt=16, new=64, row="TP = 1", same_tokens=1.0)
    row |= dict(wall=[1.2, 1.3, 1.4], cpu=[1.0, 1.1, 1.2])
    slower = row | dict(wall=[0.7, 0.8, 0.9])
    machines = [dict(machine=this_machine() | dict(processor=name)) for name in ("one", "other")]
    text = measured.generate([machines[0] | dict(rows=[row, row | dict(batch=8)]), machines[1] | dict(rows=[slower])])
    lines = text.splitlines()
    assert lines[2].endswith("| 1.30 (1.20 to 1.40) | 0.80 (0.70 to 0.90) | 1.10 | 100 % |")
    assert "| not measured yet |" in lines[3]
    assert lines[-1] == ("Above 1 on one kind of processor and below it on another: llama fp32 64 tokens 1 TP = 1.")
