"""``python -m tpfuse bench`` as a user meets it."""

import csv
import functools
import json

import pytest

import tpfuse.bench.command as program
from tpfuse.__main__ import main as tpfuse_main
from tpfuse.bench.definition import discover, load
from tpfuse.bench.roofline import measure_card


def main(argv):
    return tpfuse_main(["bench", *argv])


@pytest.fixture
def small_card(monkeypatch):
    monkeypatch.setattr(program, "measure_card", functools.partial(measure_card, copy_mib=1, side=16))


def test_the_list(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for name in discover():
        assert f"{name}  {'x'.join(load(name).axes)}" in out
    assert (
        "8192x4096" in out
        and "tpfuse, torch, compile, liger" in out
        and set(discover()) >= {"layer_norm", "attention", "linear"}
    )
    assert "cpu" not in discover()  # a file without a BENCH


def test_a_run_end_to_end(tmp_path, capsys, small_card):
    pytest.importorskip("matplotlib")
    files = [
        "--csv",
        str(tmp_path / "rows.csv"),
        "--json",
        str(tmp_path / "rows.json"),
        "--plot",
        str(tmp_path / "plots"),
    ]
    options = [
        "--dtype",
        "bf16",
        "--mode",
        "fwd,bwd",
        "--providers",
        "tpfuse,torch,liger",
        "--device",
        "cpu",
        "--seconds",
        "0",
    ]
    assert main(["layer_norm", "rms_norm", "--shape", "8x32,4x48", *options, *files]) == 0
    printed = capsys.readouterr()
    made = json.loads((tmp_path / "rows.json").read_text())
    rows = made["rows"]
    assert (
        len(rows) == 2 * 2 * 2 * 2 and made["card"]["copy_gbs"] > 0 and set(made["card"]["matrix_tflops"]) == {"bf16"}
    )
    assert {(r["op"], r["shape"], r["dtype"], r["mode"], r["provider"]) for r in rows} == {
        (op, shape, "bf16", mode, provider)
        for op in ("layer_norm", "rms_norm")
        for shape in ("8x32", "4x48")
        for mode in ("fwd", "bwd")
        for provider in ("tpfuse", "torch")
    }
    for row in rows:
        assert 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"]
        assert row["gbs"] == pytest.approx(row["bytes"] / row["p50_us"] / 1e3)
        floor = row["bytes"] / made["card"]["copy_gbs"] / 1e3
        assert row["flops"] or row["roofline"] == pytest.approx(floor / row["p50_us"])
        assert row["error"] < 0.02 and row["timed"] == "clock" and row["registers"] is None
    with open(tmp_path / "rows.csv") as file:
        kept = list(csv.DictReader(file))
    assert [row["provider"] for row in kept] == [row["provider"] for row in rows]
    assert [float(row["p50_us"]) for row in kept] == [row["p50_us"] for row in rows]
    for name in ("roofline.png", "speed.png"):
        assert (tmp_path / "plots" / name).read_bytes()[:4] == b"\x89PNG"
    table = printed.out.splitlines()
    assert len(table) == 2 + len(rows) and "roof %" in table[1] and "norm_fwd" in printed.out
    assert "[4/4] rms_norm 4x48 bf16 bwd" in printed.err and "liger is left out" in printed.err


def test_without_matplotlib_plots_are_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert output.plot([], None, tmp_path / "plots") == []
    assert "no plots: pip install matplotlib" in capsys.readouterr().err and not (tmp_path / "plots").exists()


WRONG = {
    "an op": (["layer_nrom"], "there is no op 'layer_nrom'; there are attention, "),
    "a provider": (
        ["layer_norm", "--providers", "tpfuse,apex"],
        "there is no provider 'apex'; there are compile, liger, torch, tpfuse",
    ),
    "a word for a shape": (
        ["layer_norm", "--shape", "8192*4096"],
        "a shape is MxD, 2 positive integers joined by x, such as 2048x768",
    ),
    "a dimension": (["attention", "--shape", "8x512"], "a shape is BxSxHxGxE, 5 positive integers joined by x"),
    "a size of 0": (
        ["layer_norm", "--shape", "0x4096"],
        "2 positive integers joined by x, such as 2048x768; got '0x4096'",
    ),
    "heads": (
        ["attention", "--shape", "1x8x6x4x8", "--providers", "torch"],
        "H = 6 query heads are not divisible by G = 4 kv heads",
    ),
    "a dtype": (["layer_norm", "--dtype", "fp8"], "there is no dtype 'fp8'; there are bf16, fp16, fp32"),
    "a mode": (["layer_norm", "--mode", "train"], "there is no mode 'train'; there are bwd, fwd, step"),
}


@pytest.mark.parametrize("arguments, message", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_with_the_rule(arguments, message, capsys, small_card):
    assert main([*arguments, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["layer_norm", "--device", "cuda"]) == 2
    assert "torch sees no GPU here; --device cpu times the CPU path" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and all(
        option in out for option in ("--shape", "--providers", "--csv", "--plot", "8192x4096", "roofline")
    )
