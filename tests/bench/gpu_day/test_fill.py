"""A day's results in the tables, and the command's arguments."""

import json

import pytest

from bench import documents, measured
from bench.gpu_day.__main__ import main
from bench.gpu_day.results import NAME, Broken, Results
from tests.bench.gpu_day.fakes import day, part
from tpfuse.kernels.runtime import tuning as _tuning


def found_by_a_day() -> dict:
    done = lambda rows: dict(status="done", seconds=1.0, error="", jobs=dict(job=dict(status="done", rows=rows)))
    card = dict(name="NVIDIA H100 80GB HBM3", copy_gbs=3000.0, matrix_tflops={"bf16": 790.0})
    row = dict(op="layer_norm", shape="8192x4096", mode="fwd", p50_us=10.0, gbs=2700.0, roofline=0.9, error=1e-3)
    times = dict(p20_ms=9.0, p50_ms=9.0, p80_ms=9.0, tflops=560.0, matrix_share=560 / 790, mfu=560 / 989)
    layer = dict(layer="GPT 2.7B block", provider="tpfuse", timed="graph", **times)
    won = dict(case="a", arch="sm_90", kernel="k", bucket="bf16 8x8", entry=dict(A=256))
    found = {
        "setup": [
            dict(device=card["name"], versions=dict(torch="2.11.0", triton="3.6.0")),
            dict(card=card, sheet=None),
        ],
        "rows of worth": [row | dict(provider="tpfuse"), dict(note="a note")],
        "layers": [layer],
        "host time": [dict(provider="tpfuse", us=18.4)],
        "gpu tests": [dict(test="t", outcome="passed"), dict(test="u", outcome="failed")],
        "tuning": [won, won | dict(kernel="l", entry={})],
    }
    parts = {name: done(rows) for name, rows in found.items()}
    return dict(rehearsed=False, calls=[], notes=[], parts=parts)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Copies of what filling in writes."""
    (tmp_path / "results").mkdir()
    (tmp_path / "day").mkdir()
    for path in measured.RESULTS.glob("*.json"):
        (tmp_path / "results" / path.name).write_text(path.read_text())
    for module, name in ((measured, "RESULTS"), (measured, "PAGE"), (_tuning, "TABLE")):
        path = getattr(module, name)
        if path.is_file():
            (tmp_path / path.name).write_text(path.read_text())
        monkeypatch.setattr(module, name, tmp_path / ("results" if path.is_dir() else path.name))
    return tmp_path


def test_a_day_is_filled_in(home, capsys):
    (home / "day" / NAME).write_text(json.dumps(found_by_a_day()))
    before = json.loads(_tuning.TABLE.read_text())
    assert main(["--fill", str(home / "day")]) == 0
    made = json.loads((home / "results/nvidia_h100_80gb_hbm3.json").read_text())
    assert made["tests"] == dict(passed=1, failed=1, skipped=0, failures=["u"]) and made["notes"] == ["a note"]
    assert json.loads(_tuning.TABLE.read_text()) == before | {"sm_90": {"k": {"bf16 8x8": {"A": 256}}}}
    page = measured.PAGE.read_text()
    assert "560 TFLOP/s, MFU 57 % of the data sheet's rate, 71 % of the measured matrix rate" in page
    assert "| gpu tests | NVIDIA H100 80GB HBM3 | done | 1 passed, 1 failed, 0 skipped |" in page
    assert "| layer_norm | NVIDIA H100 80GB HBM3 | 8192x4096 | fwd | 10.0 | 2700 | 90 % |" in page
    assert documents.replaced(page, measured.COMMAND, "gpu", measured.parts()["gpu"]) == page
    assert "generation: not reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rehearsed=True), "is of a rehearsal: its figures are a CPU's, and are never filled in"),
        (dict(parts={}), "the card was never measured"),
    ],
)
def test_what_is_not_filled_in(home, capsys, change, message):
    (home / "day" / NAME).write_text(json.dumps(found_by_a_day() | change))
    files = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert main(["--fill", str(home / "day")]) == 2
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == files


def test_a_rehearsal_and_a_run_are_never_mixed(tmp_path):
    Results(tmp_path / NAME, rehearsed=True).save()
    with pytest.raises(Broken, match="is of a rehearsal, and the two are never mixed"):
        day(tmp_path / "new", [part("good")], resume=tmp_path)


@pytest.mark.parametrize(
    "words", [[], ["--fill", "a", "--out", "b"], ["--fill", "a", "--rehearse"], ["--out", "a", "--minutes", "0"]]
)
def test_wrong_arguments(words):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2


def test_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(word in out for word in ("--minutes", "--out", "--resume", "--rehearse", "--fill", "results.json"))
