"""What an op's file must hold, and that a user's own file is timed as tpfuse's are."""

import dataclasses
import json
import os
import pathlib
import re
import sys

import pytest

import tpfuse.tools.bench.command as program
from tpfuse.__main__ import main
from tpfuse.tools.bench.definition import Bench, discover, load, load_all

ROOT = pathlib.Path(__file__).parents[3]
DOCUMENTED = next(
    text
    for text in re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/kernels.md").read_text(), re.S | re.M)
    if "BENCH" in text
)
OPTIONS = ["--dtype", "fp32", "--shape", "8x32", "--device", "cpu", "--seconds", "0", "--mode", "fwd,bwd"]
OPTIONS += ["--providers", "tpfuse,torch"]


@pytest.fixture
def my_op(tmp_path):
    """Writes a file, and returns its path."""

    def write(text, name="my_op.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_the_documented_file_is_timed(my_op, capsys, small_card, tmp_path):
    json_file = tmp_path / "rows.json"
    path = my_op(DOCUMENTED)
    assert main(["bench", path, "rms_norm", *OPTIONS, "--json", str(json_file)]) == 0
    rows = json.loads(json_file.read_text())["rows"]
    assert [(r["op"], r["mode"], r["provider"]) for r in rows] == [
        (op, mode, provider)
        for op in ("silu_norm", "rms_norm")
        for mode in ("fwd", "bwd")
        for provider in ("tpfuse", "torch")
    ]
    assert all(row["error"] < 1e-5 and row["bytes"] > 0 for row in rows)
    assert "[1/2] silu_norm 8x32 fp32 fwd: tpfuse warms up" in capsys.readouterr().err


def test_without_an_op_of_tpfuse_there_are_no_rates(my_op, capsys, small_card, tmp_path):
    text = DOCUMENTED.replace("tpfuse=ours", "tpfuse=torch")
    assert main(["bench", my_op(text), *OPTIONS, "--providers", "tpfuse", "--plot", str(tmp_path / "pictures")]) == 0
    printed = capsys.readouterr()
    assert "silu_norm 8x32 fp32 bwd: no rates: no provider calls an op of tpfuse" in printed.err
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["speed.png"]  # a roofline is of rates


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_documented_op_a_hundredth_too_large_is_wrong(dtype, my_op, capsys, small_card, tmp_path):
    text = DOCUMENTED.replace("return rms_norm(F.silu(x), weight)", "return 1.01 * rms_norm(F.silu(x), weight)")
    assert text != DOCUMENTED
    options = [*OPTIONS, "--dtype", dtype, "--json", str(tmp_path / "rows.json")]
    assert main(["bench", my_op(text), *options]) == 1
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["provider"] for row in rows if row["wrong"]} == {"tpfuse"} and len(rows) == 4
    assert "tpfuse    WRONG" in capsys.readouterr().out
    assert main(["bench", my_op(DOCUMENTED), *options]) == 0


def test_providers_of_any_names(my_op, capsys, small_card, tmp_path):
    """A against B, without tpfuse or torch: A is compared with B in fp64, and B is what speed-ups are over."""
    text = DOCUMENTED.replace("dict(tpfuse=ours, torch=torch),", 'dict(a=ours, b=torch),\n    baseline="b",')
    options = [*OPTIONS[: OPTIONS.index("--providers")], "--json", str(tmp_path / "rows.json")]
    assert main(["bench", my_op(text), *options]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(r["mode"], r["provider"]) for r in rows] == [("fwd", "a"), ("fwd", "b"), ("bwd", "a"), ("bwd", "b")]
    assert all(r["baseline"] == "b" and r["wrong"] is False and r["bytes"] > 0 for r in rows)
    assert main(["bench", my_op(text.replace("F.silu(x), w", "F.relu(x), w", 1)), *options, "--baseline", "a"]) == 1
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {(r["provider"], r["wrong"]) for r in rows} == {("a", False), ("b", True)}
    assert main(["bench", my_op(text), *options, "--providers", "b", "--baseline", "a", "--mode", "fwd"]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(r["provider"], r["speedup"] == 1.0) for r in rows if r["provider"] == "a"] == [("a", True)]  # timed too


def test_a_file_is_read_as_it_is_now(my_op, monkeypatch):
    """After an edit in the same second that keeps its size, too."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name in ("first_name", "other_name"):
        path = my_op(DOCUMENTED.replace('"silu_norm"', f'"{name}"', 1))
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert load(path).name == name


WRONG = {
    "no baseline": (
        DOCUMENTED.replace("torch=torch", "torhc=torch"),
        "there is no baseline 'torch'; did you mean 'torhc'? There are torhc, tpfuse, the providers of the Bench"
        " 'silu_norm'",
    ),
    "compile": (DOCUMENTED.replace("torch=torch)", "torch=torch, compile=ours)"), "which is made of 'torch'"),
    "no function": (DOCUMENTED.replace("tpfuse=ours", "tpfuse=3"), "tpfuse must be a function, got 3"),
    "no BENCH": (
        DOCUMENTED.replace("BENCH =", "BEHCN ="),
        "has no BENCH; it needs BENCH = tpfuse.bench.Bench(...)",
    ),
    "another BENCH": ("BENCH = {}", "has as BENCH a dict"),
    "a field": (DOCUMENTED.replace("    inputs=inputs,\n", ""), "missing 1 required positional argument: 'inputs'"),
    "axes": (DOCUMENTED.replace("(512, 768)", "(512,)"), "a shape is a tuple of 2 positive integers, MxD; got (512,)"),
    "an x": (DOCUMENTED.replace('axes=("M", "D")', 'axes=("max", "D")'), "which no name of one may hold, got 'max'"),
    "no shapes": (DOCUMENTED.replace("((512, 768),)", "()"), "needs at least one of axes and of cpu_shapes"),
    "a module": ("import no_such_module", "does not run: ModuleNotFoundError: No module named 'no_such_module'"),
    "inputs": (
        DOCUMENTED.replace("return random(M, D), random(D, mean=1.0, std=0.1)", "return 3"),
        "inputs must return a tuple of tensors, got 3",
    ),
}


@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG)
def test_what_a_file_lacks_is_named(text, message, my_op, capsys, small_card):
    path = my_op(text)
    assert main(["bench", path, *OPTIONS]) == 2
    said = capsys.readouterr().err
    assert message in said and ("inputs must" in message or path in said)


def test_a_file_that_is_not_there(capsys):
    assert main(["bench", "nowhere/my_op.py"]) == 2
    assert "there is no file nowhere/my_op.py" in capsys.readouterr().err


def test_inputs_that_fail_cost_only_their_shape(my_op, capsys, small_card):
    text = DOCUMENTED.replace("    return random(M, D),", "    assert M > 4, 'too few rows'\n    return random(M, D),")
    options = [*OPTIONS, "--shape", "4x32", "--providers", "torch"]
    assert main(["bench", my_op(text), *options]) == 0
    assert "silu_norm 4x32 fp32: no more inputs: too few rows" in capsys.readouterr().err


def test_two_ops_of_one_name_are_refused(my_op):
    one, other = my_op(DOCUMENTED), my_op(DOCUMENTED, "another.py")
    with pytest.raises(ValueError, match="my_op.py and .*another.py are both called 'silu_norm'"):
        load_all([one, other])
    assert [bench.name for bench in load_all([one, one, "rope", "rope"])] == ["silu_norm", "rope"]


def test_all_stands_for_tpfuses_own(my_op):
    assert [bench.name for bench in load_all(["all", my_op(DOCUMENTED)])] == [*discover(), "silu_norm"]


def test_a_gpu_needs_shapes_of_its_own():
    bench = dataclasses.replace(load("rope"), shapes=())
    assert isinstance(bench, Bench) and program.shapes_of(bench, ["4x2x8"], program.torch.device("cuda")) == [(4, 2, 8)]
    with pytest.raises(ValueError, match="rope has no standard shapes for a GPU: --shape MxHxE"):
        program.shapes_of(bench, [], program.torch.device("cuda"))
