"""The command's options and errors, with one rank in this process."""

import pytest

from tpfuse.__main__ import main
from tpfuse.tools.bits import command


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
