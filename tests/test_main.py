"""python -m tpfuse: what each command prints, its JSON, its pictures and its errors."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.bitwise.training import KINDS
from tests.tools.ledger.test_steptime import built
from tpfuse import __version__
from tpfuse.__main__ import main, parser
from tpfuse.models import GPT
from tpfuse.tools.ledger.presets import PRESETS


def said(capsys, *argv) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_ledger_of_bert_large(capsys):
    text = said(
        capsys, "ledger", "bert-large", "--batch", "8", "--seq", "512", "--ops", "--ms", "1", "--bandwidth", "4800"
    )
    assert all(word in text for word in ("335.007 G", "1216.3 M", "1061.2 M", "plain torch", "attention_bwd", "MUE"))


def test_ledger_as_json(capsys):
    values = json.loads(said(capsys, "ledger", "bert-large", "--json"))
    assert (
        values["tpfuse fastest"]["total"]["least"] <= 835e6 and values["table fused"]["by_kind"]["GEMM"]["calls"] == 18
    )


def test_memory(capsys):
    text = said(
        capsys, "memory", "--model", "bert-large", "--tp", "4", "--dp", "2", "--seq", "512", "--micro-batch", "8"
    )
    assert "74.00" in text and "tpfuse, TP 4 + SP, smallest" in text and "DDP buckets" in text
    values = json.loads(
        said(capsys, "memory", "--model", "bert-large", "--tp", "4", "--seq", "512", "--micro-batch", "8", "--json")
    )
    ours = values["activations"]["tpfuse, TP 4 + SP, fastest"]
    assert ours["measured_a_layer"] == pytest.approx(ours["a_layer"], rel=0.01)


def test_dryrun_of_a_local_config(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["gpt-3m"]))
    argv = "dryrun", "--model", str(tmp_path), "--tp", "2", "--dp", "4", "--seq", "64"
    assert "tp 2 x dp 4 = 8 ranks" in said(capsys, *argv)
    assert json.loads(said(capsys, *argv, "--json"))["formulas"]["parameters"]["counted"] > 1e6


def test_experts_of_a_local_config(capsys, tmp_path):
    few = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=48, vocab_size=96)
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["mixtral-8x7b"] | few))
    argv = "--model", str(tmp_path), "--tp", "4", "--seq", "64", "--json"
    even, busiest = (json.loads(said(capsys, "dryrun", *argv, *x))["work"] for x in ((), ("--imbalance", "2.5")))
    assert busiest["flops"] > even["flops"] and busiest["saved"] > even["saved"] and busiest["wire"] > even["wire"]
    activations = json.loads(said(capsys, "memory", *argv, "--imbalance", "2.5"))["activations"]
    assert len(activations) == 6 and all(name.startswith("tpfuse") for name in activations)
    assert "2 of 8 experts" in said(capsys, "ledger", str(tmp_path), "--tp", "4", "--seq", "64", "--imbalance", "2.5")


def test_layers_of_both_kinds(capsys, tmp_path):
    """``memory`` has a row of each kind, ``ledger`` the layer that is asked for, ``dryrun`` the sum."""
    few = dict(num_hidden_layers=3, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, vocab_size=96)
    few |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_local_experts=8, mlp_only_layers=[0, 2])
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-30b-a3b"] | few))
    argv = "--model", str(tmp_path), "--tp", "2", "--dp", "2", "--seq", "64", "--json"
    values = json.loads(said(capsys, "memory", *argv))
    name = "{}: tpfuse, TP 2 + SP, fastest"
    mlp, experts = (values["activations"][name.format(kind)] for kind in ("MLP", "experts"))
    assert mlp["all_layers"] == 2 * mlp["a_layer"] and experts["all_layers"] == experts["a_layer"]
    busiest = json.loads(said(capsys, "memory", *argv, "--imbalance", "1.5"))["activations"]
    assert busiest[name.format("experts")]["a_layer"] > experts["a_layer"]
    assert {key: busiest[key] for key in busiest if key.startswith("MLP: ")}.items() <= values["activations"].items()
    alone, shared = (json.loads(said(capsys, "dryrun", *argv, *x)) for x in ((), ("--over-replicas",)))
    saved = alone["formulas"]["saved activations (formula: of the layers)"]["formula"]
    assert saved == mlp["all_layers"] + experts["all_layers"]
    assert shared["held"]["parameters"] < alone["held"]["parameters"] and shared["plan"]["over_replicas"]
    ledger = "ledger", str(tmp_path), "--seq", "64"
    assert " experts" not in said(capsys, *ledger) and " experts" in said(capsys, *ledger, "--layer", "1")


def test_pipeline(capsys, tmp_path):
    said(capsys, "pipeline", "--stages", "2", "--schedule", "1f1b,zbv", "--plot", str(tmp_path / "gantt.png"))
    argv = "pipeline", "--stages", "4", "--micro-batches", "8"
    rows = {line.split()[0]: line.split() for line in said(capsys, *argv).splitlines() if line}
    assert rows["1f1b"][4] == "27.3" and rows["zbv"][4] == "5.9" and rows["chimera"][2] == "2"
    assert rows["2bw"][2:] == ["2", "24", "0.0", "7"] and rows["pipedream"][2:] == ["4", "24", "0.0", "4"]
    assert (tmp_path / "gantt.png").read_bytes()[:4] == b"\x89PNG"
    values = json.loads(said(capsys, "pipeline", "--stages", "3", "--schedule", "gpipe,zbv", "--json"))
    said(capsys, "pipeline", "--stages", "2", "--html", str(tmp_path / "deep" / "timeline.html"))
    assert (tmp_path / "deep" / "timeline.html").read_text().startswith("<!doctype html>")
    assert values["gpipe"]["in_flight"] == [8, 8, 8] and values["zbv"]["actions"][0][0]["action"] == "0F0"
    assert "left out: chimera needs even numbers" in said(capsys, "pipeline", "--stages", "3")
    assert main(["pipeline", "--stages", "3", "--schedule", "chimera"]) == 2
    assert "chimera needs even numbers" in capsys.readouterr().err


def test_collectives(capsys, tmp_path):
    said_ = said(capsys, "collectives", "--ranks", "4,64", "--sizes", "1024", "--plot", str(tmp_path / "all.png"))
    assert "direct 16.1 us" in said_ and "halving-doubling 72.1 us" in said_
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"
    argv = "collectives", "--ranks", "2", "--sizes", "1000000000", "--latency", "0.5", "--bandwidth", "1", "--json"
    assert json.loads(said(capsys, *argv))["seconds"]["ring"] == [[pytest.approx(2.000002)]]  # two rounds, one GB


def test_topology(capsys, tmp_path):
    said_ = said(capsys, "topology", "--accelerators", "64", "--plot", str(tmp_path / "networks.png"))
    rows = {line[:10].strip(): line.split() for line in said_.splitlines()}
    assert rows["Hx2Mesh"][-4:] == ["0.68", "25.0", "32.6", "100.0"] and "2-D torus" in rows
    assert (tmp_path / "networks.png").read_bytes()[:4] == b"\x89PNG"
    values = json.loads(said(capsys, "topology", "--accelerators", "62", "--json"))
    assert values["left out"] and values["fat tree"]["all_reduce"] == 1.0


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(("dryrun", "--model", "gpt-3m", "--seq", "64", "--dp", "2"), marks=pytest.mark.slow),
        ("dryrun", "--model", "gpt-3m", "--seq", "64", "--sweep", "--tps", "1,2", "--ranks", "2,4"),
        pytest.param(("memory", "--model", "gpt-3m", "--seq", "64"), marks=pytest.mark.slow),
        pytest.param(("layouts", "--model", "gpt-22b", "--mesh", "8"), marks=pytest.mark.slow),
        pytest.param(("topology", "--accelerators", "16"), marks=pytest.mark.slow),
        ("pipeline", "--stages", "2"),
        pytest.param(("collectives",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_pictures(capsys, monkeypatch, tmp_path, argv):
    """Each has a title, and no legend lies on bars."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    titles, path, save = [], tmp_path / "picture.png", Figure.savefig

    def saved(figure, *args, **options):
        save(figure, *args, **options)
        titles.append(figure.get_suptitle())
        for ax in figure.axes:
            if ax.containers and ax.get_legend():
                assert not ax.get_legend().get_window_extent().overlaps(ax.get_window_extent())

    monkeypatch.setattr(Figure, "savefig", saved)
    assert f"drawn to {path}" in said(capsys, *argv, "--plot", str(path))
    assert path.read_bytes()[:4] == b"\x89PNG" and len(titles) == 1 and titles[0]


def test_mfu(capsys):
    assert "41.7" in said(capsys, "mfu")
    values = json.loads(
        said(
            capsys,
            "mfu",
            "--model",
            "gpt-22b",
            "--batch",
            "4",
            "--seconds",
            "1.1",
            "--devices",
            "8",
            "--device",
            "A100",
            "--json",
        )
    )
    assert values["mfu"] == pytest.approx(41.65, abs=0.01)


def test_mfu_counts_the_positions_that_a_model_has(capsys):
    argv = "mfu", "--model", "gpt2", "--batch", "8", "--seconds", "1"
    assert said(capsys, *argv) == said(capsys, *argv, "--seq", "1024")


@pytest.mark.parametrize("command", ["ledger", "predict", "plan"])
def test_positions_that_nobody_gave_are_no_more_than_the_models(capsys, tmp_path, command):
    sizes = dict(vocab_size=96, n_positions=48, n_embd=32, n_layer=2, n_head=4)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    built(overhead=1e-5).save(tmp_path / "machine.json")
    more = {
        "ledger": [str(tmp_path)],
        "predict": ["--model", str(tmp_path), "--choices", "1x1", "--machine", str(tmp_path / "machine.json")],
        "plan": ["--model", str(tmp_path), "--devices", "1", "--device", "h100"],
    }
    assert said(capsys, command, *more[command]) == said(capsys, command, *more[command], "--seq", "48")


def test_a_sweep_names_a_size_that_divides_no_number_of_ranks(capsys):
    argv = "dryrun", "--model", "gpt-3m", "--seq", "64", "--sweep", "--tps", "2,3", "--ranks", "2"
    note = "divides none of the numbers of ranks"
    assert said(capsys, *argv).splitlines()[-1] == f"tp 3: {note}"
    assert json.loads(said(capsys, *argv, "--json"))[-1] == dict(error=note, tp=3)


def test_predict(capsys, tmp_path):
    built(overhead=1e-5).save(tmp_path / "machine.json")
    text = said(
        capsys,
        "predict",
        "--machine",
        str(tmp_path / "machine.json"),
        "--choices",
        "1x1,2x2",
        "--batch",
        "4",
        "--seq",
        "64",
    )
    assert text.splitlines()[0].split()[:3] == ["tp", "cp", "dp"] and len(text.splitlines()) == 4


def test_layouts(capsys, tmp_path):
    argv = "layouts", "--model", "gpt-22b", "--mesh", "8"
    text = said(capsys, *argv, "--split-weights", "--explain", "--plot", str(tmp_path / "layouts.png"))
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines() if line}
    assert rows["fc 1"][2:5] == ["Replicate*", "Shard(0)", "Shard(2)"] and rows["exact"][1:3] == ["4.05", "ms"]
    assert "second best: out Replicate* -> Shard(2)" in text and (tmp_path / "layouts.png").exists()
    values = json.loads(said(capsys, *argv, "--micro-batches", "8", "--memory", "80", "--json"))
    assert values["variables"] == 141 and values["failed"] == {}
    assert values["found"]["exact"]["ops"][3]["output"] == ["Shard(1)"]
    assert values["found"]["exact"]["seconds"] < values["found"]["Megatron (0)"]["seconds"]
    two = json.loads(said(capsys, *argv[:3], "--mesh", "2x4", "--batch", "2", "--json"))
    assert len(two["found"]["exact"]["ops"][0]["input"]) == 2 and "Megatron (0, 1)" in two["found"]
    assert "Megatron (0): batch, positions, heads or widths do not divide" in said(capsys, *argv[:3], "--mesh", "5")


ERRORS = {
    "memory --model mixtral-8x7b --tp 2 --imbalance 3": "imbalance is the busiest rank's rows over the mean, 1 to tp=2",
    "dryrun --model gpt2 --tp 2 --imbalance 1.5": "imbalance is of a model with experts, and this one has none",
    "dryrun --model mixtral-8x7b --sweep --imbalance 2": "--sweep is of even experts over tp; leave out --imbalance",
    "ledger gpt-3m --layer 99": "layer must be 0 to",
    "layouts --model gpt-22b --memory 3": "the least that would do is 43,505,418,240",
    "layouts --model gpt-22b --mesh 4x8 --bandwidth 25": "--bandwidth needs 2 numbers, one an axis, got 1",
    "dryrun --model gpt2 --tp 5": "num_heads=12 is not divisible by tensor-parallel size 5; use 1, 2, 3, 4, 6 or 12",
    "dryrun --model gpt2 --seq 4096": "4096 positions are more than the model's max_positions=1024",
    "dryrun --model gtp2": "; did you mean 'gpt2'?",
    "memory --model openai/GPT2-XL": "; did you mean 'gpt2-xl'?",
    "ledger qqqq": "model 'qqqq' is neither a local config.json nor one of gpt-3m, ",
    "plan --model gpt2 --devices 8 --device H-100": "got 'H-100'; did you mean 'h100'?; a TOML file describes",
    "plan --model gpt2 --devices 8 --device rtx4090": "got 'rtx4090'; a TOML file describes any other",
    "ledger bert-large --ms 1": "--ms and --bandwidth go together",
    "mfu --model gpt2": "--model needs --batch and --seconds too",
    "mfu --batch 8 --seconds 2": "--devices, --device, --peak-tflops and --recompute need --model too",
    "mfu --model bert-large --batch 8 --seconds 1 --seq 100000": "100000 positions are more than the model's",
    "layouts --model bert-large --seq 100000": "100000 positions are more than the model's max_positions=512",
    "mfu --devices 64": "--devices, --device, --peak-tflops and --recompute need --model too",
    "dryrun --model gpt-3m --sweep --tp 2": "--sweep takes --tps and --ranks in place of --tp and --dp",
    "ledger gpt2 --seq 2048": "error: ledger: 2048 positions are more than the model's max_positions=1024",
    "ledger gpt2 --batch 1000000 --seq 1024": "at most 268,435,456 tokens, got 1,000,000 sequences of 1,024",
    "memory --model gpt-3m --micro-batch 1000000": "at most 268,435,456 tokens, got 1,000,000 sequences of 512",
    "dryrun --model gpt-3m --dp 1000000": "there must be at most 32,768 ranks, got 1,000,000",
    "dryrun --model gpt-3m --sweep --tps 3 --ranks 8": "no size of the sweep can be split: tp 3: divides none of the",
    "dryrun --model gpt-3m --sweep --tps 3 --ranks 9": "no size of the sweep can be split: tp 3: ",
    "pipeline --stages 64 --micro-batches 2000": "--stages times --micro-batches must be at most 32,768, got 64 x 2000",
    "predict --machine nowhere.json": "calibrate makes it",
    "calibrate --ranks 1,5000": "calibrate: there must be at most 256 processes on this machine, got 5,000",
}


@pytest.mark.parametrize("line", ERRORS)
def test_errors_are_one_line(capsys, line):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and ERRORS[line] in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["dryrun", "--model", "gpt2", "--tp", "0"],
        ["predict", "--choices", "2"],
        ["nothing"],
        *(["ledger", "gpt2", "--ms", ms, "--bandwidth", "1"] for ms in ("0", "-1", "nan")),
        *(["ledger", "gpt2", "--ms", "1", "--bandwidth", rate] for rate in ("0", "-1", "nan")),
        *(["pipeline", "--communication", delay] for delay in ("-1", "nan", "inf")),
        ["pipeline", "--stages", "1000000"],
        ["memory", "--model", "gpt-3m", "--micro-batch", "999999999999999"],
        ["calibrate", "--seconds", "-5"],
        ["mfu", "--model", "gpt2", "--batch", "8", "--seconds", "1e-320"],
        ["collectives", "--density", "2"],
    ],
    ids=" ".join,
)
def test_arguments_that_are_none(capsys, argv):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "error" in (err := capsys.readouterr().err) and "be be" not in err


@pytest.mark.parametrize(
    "argv, name", [(["memroy"], "memory"), (["memory", "--model", "gpt2", "--dtype", "bf-16"], "bf16")]
)
def test_a_name_that_is_alike_is_proposed(capsys, argv, name):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert f"; did you mean '{name}'?" in capsys.readouterr().err


def test_without_a_command_the_list_is_printed(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == parser().format_help()


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"tpfuse {__version__}\n"


def test_a_shell_completes_commands_options_and_files(capsys, tmp_path):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", "bash"])
    script = capsys.readouterr().out
    (tmp_path / "machine.json").touch()
    for words, found in {
        "dry": "dryrun",
        "memory --recom": "--recompute",
        "memory --recompute sel": "selective",
        "predict --machine mach": "machine.json",
    }.items():
        *_, last = typed = words.split()
        line = f"COMP_WORDS=(tpfuse {words}); COMP_CWORD={len(typed)}; _shtab_tpfuse tpfuse {last}"
        command = f'{script}\n{line}; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.split() == [found], (words, done)


def test_completion_names_the_extra_that_it_needs(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match="2"):
        main(["--print-completion", "bash"])
    assert "needs shtab: pip install 'tpfuse[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--help"], ["--version"], ["memroy"], ["collectives", "--help"]], ids=" ".join)
def test_what_is_printed_without_torch(argv):
    code = (
        f"import runpy, sys; sys.argv[1:] = {argv}\n"
        "try: runpy.run_module('tpfuse', run_name='__main__')\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("False\n") and len(done.stdout + done.stderr) > 15, done.stderr


@pytest.mark.slow
def test_bits(capsys, tmp_path):
    undropped = dict(dropout=0.0, embedding_dropout=0.0)  # Llama drops attention's probabilities alone
    GPT(replace(KINDS["llama"], **undropped)).save_pretrained(tmp_path)
    argv = "bits", str(tmp_path), "--tp", "1,2"
    text = said(capsys, *argv)
    assert text.rstrip().endswith("the same bits at every layout") and text.count("\ntp ") == 4
    values = json.loads(said(capsys, *argv, "--sequence-parallel", "on", "--dtype", "bf16", "--steps", "2", "--json"))
    assert values["same"] and values["bitwise"] == 8 and [x["size"] for x in values["layouts"]] == [1, 2]
    assert values["layouts"][1]["loss"] == [2, 2] and values["layouts"][1]["first"] is None
    assert main([*argv, "--bitwise", "off"]) == 1
    text = capsys.readouterr().out
    assert "op blocks.0.attention.out linear_exchange: " in text and text.rstrip().endswith("bits differ")
    assert main([*argv, "--bitwise", "32"]) == 2
    refusal = "num_heads=16 is not divisible by bitwise=32 leaves; use bitwise 1, 2, 4, 8 or 16"
    assert capsys.readouterr().err == f"tpfuse bits: error: ParallelAttention: {refusal}\n"


@pytest.mark.parametrize("leaves", ["3", "64", "eight", "-8"])
def test_leaves_are_a_power_of_two(capsys, leaves):
    with pytest.raises(SystemExit):
        main(["bits", "gpt-3m", f"--bitwise={leaves}"])
    assert f"must be one of 1, 2, 4, 8, 16, 32 or off, got {leaves}" in capsys.readouterr().err
