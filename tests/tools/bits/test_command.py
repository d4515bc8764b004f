"""The command's options and errors, with one rank in this process."""

import json

import pytest

from tpfuse.__main__ import main, parser
from tpfuse.tools.bits import command
from tpfuse.tools.ledger.presets import PRESETS


@pytest.fixture
def in_this_process(monkeypatch):
    def on_ranks(size, function, *args):
        try:
            return function(*args)
        except Exception as error:
            raise RuntimeError("a rank has raised it") from error

    monkeypatch.setattr(command, "on_ranks", on_ranks)


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_an_error_of_the_ranks_is_one_line(monkeypatch, capsys, in_this_process, error):
    """And no difference of bits, whose exit code is 1."""

    def compare(*_):
        raise error("model.safetensors cannot be read")

    monkeypatch.setattr(command, "compare", compare)
    assert main(["bits", "gpt-3m", "--tp", "1"]) == 2
    assert capsys.readouterr().err == "tpfuse bits: error: model.safetensors cannot be read\n"


def test_weights_stand_beside_the_config(monkeypatch, tmp_path):
    """Of a directory, whose name may be a preset's, and of its config.json."""
    monkeypatch.chdir(tmp_path)
    assert command.weights_of("gpt2") is None
    (folder := tmp_path / "gpt2").mkdir()
    (folder / "model.safetensors").touch()
    assert command.weights_of("gpt2") is None
    for name in ("config.json", "other.json"):
        (folder / name).write_text(json.dumps(PRESETS["gpt-3m"]))
    weights = {name: command.weights_of(name) for name in ("gpt2", "gpt2/config.json", "gpt2/other.json")}
    assert [path and path.resolve() for path in weights.values()] == [folder, folder, None]


@pytest.mark.parametrize(
    "sizes, message",
    [
        ("1,1000", "bits: there must be at most 256 processes on this machine, got 1,000"),
        ("1,16", "bitwise=8 leaves are not divisible by tensor-parallel size 16; use size 1, 2, 4 or 8"),
        ("1,3", "bitwise=8 leaves are not divisible by tensor-parallel size 3"),
    ],
)
def test_what_cannot_be_split_is_refused_before_a_process_starts(monkeypatch, capsys, sizes, message):
    def on_ranks(*_):
        raise AssertionError("processes are started")

    monkeypatch.setattr(command, "on_ranks", on_ranks)
    assert main(["bits", "gpt-3m", "--tp", sizes]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("positions, expected", [(8, 8), (64, command.SEQ)])
def test_positions_that_nobody_gave_are_no_more_than_the_models(monkeypatch, tmp_path, positions, expected):
    def compare(make, batches, layouts, bitwise):
        raise ValueError(f"{batches[0]['input_ids'].shape[1]} positions")

    monkeypatch.setattr(command, "on_ranks", lambda size, function, arguments: compare(*arguments))
    sizes = dict(vocab_size=96, n_positions=positions, n_embd=32, n_layer=1, n_head=8)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    args = parser().parse_args(["bits", str(tmp_path), "--tp", "1"])
    with pytest.raises(ValueError, match=f"^{expected} positions$"):
        args.run(args)
