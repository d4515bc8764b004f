"""``python -m tpfuse bench`` as a user meets it."""

import csv
import json
import sys

import pytest

import tpfuse.tools.bench.command as program
from tpfuse.__main__ import main as tpfuse_main
from tpfuse.tools.bench import measure, run
from tpfuse.tools.bench.definition import discover, load
from tpfuse.tools.bench.roofline import Card


def main(argv):
    return tpfuse_main(["bench", *argv])


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


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """A terminal that fits all columns, however many digits the times of a busy machine have."""
    monkeypatch.setenv("COLUMNS", "200")


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
        assert row["error"] <= row["limit"] < 0.02 and row["wrong"] is False
        assert row["timed"] == "clock" and row["registers"] is None
        assert row["baseline"] == "torch" and row["axes"] == "MxD" and row["speedup_p20"] <= row["speedup_p80"]
        assert row["provider"] != "torch" or row["speedup"] == 1.0
    with open(tmp_path / "rows.csv") as file:
        kept = list(csv.DictReader(file))
    assert [row["provider"] for row in kept] == [row["provider"] for row in rows]
    assert [float(row["p50_us"]) for row in kept] == [row["p50_us"] for row in rows]
    for name in ("roofline.png", "speed.png"):
        assert (tmp_path / "plots" / name).read_bytes()[:4] == b"\x89PNG"
    head, body = printed.out.split("provider", 1)
    table = body.splitlines()
    assert "copy" in head and "speed-up" in table[0] and {"error", "limit"} <= set(table[0].split())
    assert len(table) == 2 + 8 * 2 + len(rows)  # of each group an empty line and what its rows share
    assert "layer_norm 4x48 bf16 bwd" in table and printed.out.count("baseline") == len(rows) / 2
    assert "[4/4] rms_norm 4x48 bf16 bwd" in printed.err and "liger is left out" in printed.err


# ---- the table ----


@pytest.mark.parametrize("width", [60, 80, 400])
def test_a_table_is_no_wider_than_the_terminal_and_has_no_empty_column(width, monkeypatch, capsys, small_card):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*QUICK, "--mode", "fwd,bwd", "--shape", "4x48"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= width for line in out.splitlines())
    head = next(line for line in out.splitlines() if line.startswith("provider"))
    assert not {"regs", "spill", "TFLOP/s"} & set(head.split())  # of a CPU, and of an op that only moves
    assert ("path" in head) == (width == 400) and ("--csv and --json have them" in out) == (width < 400)
    assert all(name in head for name in ("p50 us", "speed-up", "error", "limit"))


def test_the_list_is_no_wider_than_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert main([]) == 0
    assert all(len(line) <= 60 for line in capsys.readouterr().out.splitlines())


def test_a_cpu_is_called_by_its_name(capsys, small_card):
    assert main(QUICK) == 0
    assert "measuring" in (err := capsys.readouterr().err) and "card" not in err


# ---- a sweep ----


def test_a_sweep_is_a_row_a_size_and_a_curve_a_provider(tmp_path, capsys, small_card, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    figures, save = [], figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **options: figures.append(self) or save(self, *args))
    files = [
        "--csv",
        str(tmp_path / "rows.csv"),
        "--json",
        str(tmp_path / "rows.json"),
        "--plot",
        str(tmp_path / "x.png"),
    ]
    assert main([*QUICK, "--sweep", "M=2..17", *files]) == 0
    assert kept(tmp_path) == {f"{size}x32" for size in (2, 4, 8, 16)} and (tmp_path / "x.png").is_file()
    time, speedup = figures[0].subfigs[0].axes
    assert time.get_title() == "layer_norm fwd fp32, D = 32" and time.get_xlabel() == "M, elements"
    assert "us" in time.get_ylabel() and speedup.get_ylabel() == "speed-up over torch, times"
    assert [label.get_text() for label in time.get_xticklabels()] == ["2", "4", "8", "16"]
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    for axes, key in ((time, "p50_us"), (speedup, "speedup")):
        curves = [list(container[0].get_ydata()) for container in axes.containers]
        assert curves == [[row[key] for row in rows if row["provider"] == name] for name in ("tpfuse", "torch")]
    assert [text.get_text() for text in figures[0].subfigs[0].legends[0].get_texts()] == ["tpfuse", "torch"]


def test_a_sweep_takes_the_first_standard_shape():
    shapes = program.shapes_of(load("linear"), [], program.torch.device("cpu"), "N=256..1024")
    assert shapes == [(1024, 256, 768), (1024, 512, 768), (1024, 1024, 768)]
    assert program.shapes_of(load("rope"), ["4x2x8", "4x2x16"], program.torch.device("cpu"), "H=2..4") == [
        (4, 2, 8),
        (4, 4, 8),
        (4, 2, 16),
        (4, 4, 16),
    ]


# ---- pictures ----

QUICK = ["layer_norm", "--shape", "8x32", "--dtype", "fp32", "--mode", "fwd", "--device", "cpu", "--seconds", "0"]
QUICK += ["--providers", "tpfuse,torch"]


@pytest.fixture
def no_timing(monkeypatch):
    """Fails where anything is timed."""

    def measured(*_):
        raise AssertionError("the card was measured")

    monkeypatch.setattr(program, "measure_card", measured)


def test_a_picture_is_one_file(tmp_path, small_card):
    pytest.importorskip("matplotlib")
    assert main([*QUICK, "--plot", str(tmp_path / "new" / "x.png")]) == 0
    assert (tmp_path / "new" / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.png"]


def test_a_folder_may_be_called_like_a_picture(tmp_path, small_card):
    pytest.importorskip("matplotlib")
    (tmp_path / "v1.5").mkdir()
    assert main([*QUICK, "--plot", str(tmp_path / "v1.5")]) == 0
    assert {path.name for path in (tmp_path / "v1.5").iterdir()} == {"roofline.png", "speed.png"}
    assert main([*QUICK, "--sweep", "M=2..4", "--plot", str(tmp_path / "curves")]) == 0
    assert [path.name for path in (tmp_path / "curves").iterdir()] == ["speed.png"]


def test_without_matplotlib_a_picture_is_refused_at_once(monkeypatch, tmp_path, capsys, no_timing):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main([*QUICK, "--plot", str(tmp_path / "plots")]) == 2
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()


def test_a_format_that_matplotlib_does_not_write_is_refused_at_once(tmp_path, capsys, no_timing):
    pytest.importorskip("matplotlib")
    assert main([*QUICK, "--plot", str(tmp_path / "x.gif2")]) == 2
    assert "x.gif2: a picture ends in one of" in (err := capsys.readouterr().err) and ".png" in err


@pytest.mark.parametrize("option, name", [("--csv", "rows.csv"), ("--json", "rows.json")])
def test_a_file_that_cannot_be_written_is_refused_at_once(option, name, tmp_path, capsys, no_timing):
    (tmp_path / name).mkdir()
    assert main([*QUICK, option, str(tmp_path / name)]) == 2
    assert f"{name} is a folder, or cannot be written" in capsys.readouterr().err


def test_a_folder_of_pictures_that_cannot_be_written_is_refused_at_once(tmp_path, capsys, no_timing):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    (tmp_path / "pictures" / "speed.png").mkdir(parents=True)
    for name, picture in (("file", "roofline.png"), ("pictures", "speed.png")):
        assert main([*QUICK, "--plot", str(tmp_path / name)]) == 2
        assert f"{tmp_path / name / picture} is a folder, or cannot be written" in capsys.readouterr().err


# ---- JSON ----


def test_json_without_a_file_is_printed(capsys, small_card):
    assert main([*QUICK, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [row["provider"] for row in made["rows"]] == ["tpfuse", "torch"] and made["card"]["copy_gbs"] > 0


def test_the_list_as_json(capsys):
    assert main(["--json"]) == 0
    ops = {op["name"]: op for op in json.loads(capsys.readouterr().out)}
    assert set(ops) == set(discover()) and ops["layer_norm"]["axes"] == ["M", "D"]


def test_no_file_is_of_the_list(tmp_path, capsys):
    files = ["--csv", str(tmp_path / "x.csv"), "--plot", str(tmp_path / "x.png"), "--json", str(tmp_path / "x.json")]
    assert main(files) == 2 and list(tmp_path.iterdir()) == []
    assert "bench: --csv, --json FILE, --plot without OP: there is nothing to write" in capsys.readouterr().err


def test_an_op_is_not_taken_for_the_file_of_json(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--json", "layer_norm"])
    assert stop.value.code == 2 and "FILE ends in .json, got 'layer_norm'" in capsys.readouterr().err


# ---- what was measured is kept ----


def breaks(monkeypatch, error, after):
    """The card's times are taken; of the times that follow, so many."""
    taken, left = run.interleaved, iter(range(after))

    def interleaved(*args, **options):
        if next(left, None) is None:
            raise error
        return taken(*args, **options)

    monkeypatch.setattr(run, "interleaved", interleaved)


def kept(tmp_path):
    with open(tmp_path / "rows.csv") as file:
        lines = list(csv.DictReader(file))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [line["shape"] for line in lines] == [row["shape"] for row in rows]
    return {row["shape"] for row in rows}


def test_ctrl_c_keeps_the_rows_so_far(monkeypatch, tmp_path, capsys, small_card):
    breaks(monkeypatch, KeyboardInterrupt(), after=1)
    files = ["--csv", str(tmp_path / "rows.csv"), "--json", str(tmp_path / "rows.json")]
    assert main([*QUICK, "--shape", "4x48", *files]) == 130
    printed = capsys.readouterr()
    assert kept(tmp_path) == {"8x32"} and "8x32" in printed.out and "4x48" not in printed.out
    assert "interrupted: these are the rows so far" in printed.err


def test_ctrl_c_before_the_first_row(monkeypatch, tmp_path, capsys, small_card):
    breaks(monkeypatch, KeyboardInterrupt(), after=0)
    assert main([*QUICK, "--json", str(tmp_path / "rows.json")]) == 130
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == [] and "interrupted" in capsys.readouterr().err


def test_a_later_error_keeps_the_rows_before_it(tmp_path, capsys, small_card):
    files = ["--csv", str(tmp_path / "rows.csv"), "--json", str(tmp_path / "rows.json")]
    options = ["--device", "cpu", "--seconds", "0", "--mode", "fwd", "--providers", "torch", "--dtype", "fp32"]
    assert main(["attention", "--shape", "1x8x4x4x8,1x8x6x4x8", *options, *files]) == 2
    assert kept(tmp_path) == {"1x8x4x4x8"} and "not divisible by G = 4" in capsys.readouterr().err


def test_a_disk_that_is_full_costs_one_file(monkeypatch, tmp_path, capsys, small_card):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program.output, "write_csv", full)
    assert main([*QUICK, "--csv", str(tmp_path / "rows.csv"), "--json", str(tmp_path / "rows.json")]) == 2
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 2
    printed = capsys.readouterr()
    assert "8x32" in printed.out and "No space left on device" in printed.err


# ---- a share of memory's roofline ----


def shares(out):
    """The cells under "roof %", which is left out where all are empty, and "of" of each row."""
    lines = out.splitlines()
    head = next(line for line in lines if line.startswith("provider"))
    rows = [line for line in lines if line.startswith(("tpfuse", "torch"))]
    share, of = head.find("roof %"), head.index("  of") + 2
    return [(line[share : share + 6].strip() if share > 0 else "", line[of:].split()[0]) for line in rows]


@pytest.mark.parametrize("cache, copy, bound", [(1, 1e9, "memory"), (1, 1e-9, "cache"), (1 << 40, 1e9, "cache")])
def test_a_share_that_the_cache_explains_is_not_printed(monkeypatch, capsys, cache, copy, bound):
    """With inputs larger than the cache, a call that is faster than memory, and inputs that fit."""
    monkeypatch.setattr(program, "measure_card", lambda *_: Card("a card", copy, {"fp32": 1.0}))
    monkeypatch.setattr(measure, "cache_bytes", lambda _: cache)
    assert main(QUICK) == 0
    printed = capsys.readouterr()
    cells = shares(printed.out)
    assert [of for _, of in cells] == [bound] * 2 and all(bool(share) == (bound == "memory") for share, _ in cells)
    assert ("layer_norm 8x32 fp32: the last-level cache" in printed.err) == (bound == "cache")


# ---- right and wrong ----


def test_a_wrong_kernel_is_marked_and_the_command_fails(monkeypatch, tmp_path, capsys, small_card):
    bench = load("layer_norm")
    layer_norm = bench.providers["tpfuse"]
    monkeypatch.setitem(bench.providers, "tpfuse", lambda *inputs: layer_norm(*inputs) * float("nan"))
    files = ["--csv", str(tmp_path / "rows.csv"), "--json", str(tmp_path / "rows.json")]
    assert main([*QUICK, *files]) == 1
    with open(tmp_path / "rows.csv") as file:
        assert [(row["provider"], row["wrong"]) for row in csv.DictReader(file)] == [
            ("tpfuse", "True"),
            ("torch", "False"),
        ]
    strict = json.loads((tmp_path / "rows.json").read_text(), parse_constant=pytest.fail)  # NaN is none of JSON's
    assert [(row["wrong"], row["error"] == "nan") for row in strict["rows"]] == [(True, True), (False, False)]
    printed = capsys.readouterr()
    assert [line.split()[:2] for line in printed.out.splitlines() if "WRONG" in line] == [["tpfuse", "WRONG"]]
    assert "WRONG: 1 of 2 rows" in printed.err


def fails(*_):
    raise RuntimeError("no kernel of it runs here")


@pytest.mark.parametrize("provider, code", [("tpfuse", 1), ("torch", 0)])
def test_tpfuse_must_run_and_others_may_be_left_out(monkeypatch, tmp_path, capsys, small_card, provider, code):
    bench = load("layer_norm")
    monkeypatch.setitem(bench.providers, provider, fails)
    monkeypatch.setattr(run, "Errors", fails)  # whose truth is torch's
    assert main([*QUICK, "--json", str(tmp_path / "rows.json")]) == code
    error, made = capsys.readouterr().err, json.loads((tmp_path / "rows.json").read_text())
    line = f"layer_norm 8x32 fp32 fwd: {provider} is left out: no kernel of it runs here"
    assert line in made["notes"] and line in error and len(made["rows"]) == 1
    assert ("FAILED: errors of tpfuse itself: 1" in error) == (provider == "tpfuse")


def test_an_op_without_a_backward_does_not_fail(capsys, small_card):
    options = ["--dtype", "fp32", "--device", "cpu", "--seconds", "0", "--providers", "tpfuse"]
    assert main(["sparse", "--shape", "8x32x32x8x50", "--mode", "fwd,bwd", *options]) == 0
    assert "tpfuse is left out: no output of it has a gradient" in capsys.readouterr().err


# ---- errors ----

WRONG = {
    "an op": (["layer_nrom"], "there is no op 'layer_nrom'; did you mean 'layer_norm'? There are attention, "),
    "no op's name": (["zzz"], "there is no op 'zzz'; there are attention, "),
    "a provider's name": (
        ["layer_norm", "--providers", "tpfuse,troch"],
        "there is no provider 'troch'; did you mean 'torch'? There are compile, liger, torch, tpfuse",
    ),
    "a baseline": (["layer_norm", "--baseline", "tpfues"], "there is no baseline 'tpfues'; did you mean 'tpfuse'?"),
    "a sweep": (["layer_norm", "--sweep", "M=8"], "a sweep is AXIS=FROM..TO, such as M=256..8192; got 'M=8'"),
    "a sweep down": (
        ["layer_norm", "--sweep", "M=8..4"],
        "a sweep is AXIS=FROM..TO, such as M=256..8192; got 'M=8..4'",
    ),
    "an axis": (["layer_norm", "--sweep", "N=4..8"], "there is no axis 'N'; there are D, M, the axes of layer_norm"),
    "a provider": (
        ["layer_norm", "--providers", "tpfuse,apex"],
        "there is no provider 'apex'; there are compile, liger, torch, tpfuse",
    ),
    "a word for a shape": (
        ["layer_norm", "--shape", "8192*4096"],
        "a shape is MxD, 2 positive integers joined by x, such as 2048x768; got '8192*4096': did you mean 8192x4096?",
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
    "a device": (["layer_norm", "--device", "tpu"], "--device is cpu, cuda or cuda:N, got 'tpu'"),
    "a time": (["layer_norm", "--seconds", "-1"], "--seconds must be at least 0 and finite, got -1.0"),
    "a rate": (["dropout", "--dropout", "1.5"], "the Bench 'dropout': p must lie in [0, 1), got 1.5"),
    "a mode": (["layer_norm", "--mode", "train"], "there is no mode 'train'; there are bwd, fwd, step"),
}


@pytest.mark.parametrize("arguments, message", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_with_the_rule(arguments, message, capsys, small_card):
    assert main(["--device", "cpu", *arguments]) == 2
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
