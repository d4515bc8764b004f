"""The command line: every option of every command is explained, types of values, the list of commands."""

import argparse
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tpfuse.__main__ import parser
from tpfuse.tools import command
from tpfuse.tools.ledger.text import progress

COMMANDS = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
QUIET = None, False, argparse.SUPPRESS  # values of an option that is not set
FEWEST = 4  # words


def unexplained(p: argparse.ArgumentParser) -> list[str]:
    """The options of a parser whose help is short, ends in the middle, or does not name the default."""
    formatter = p._get_formatter()
    wrong = []
    for action in p._actions:
        text = formatter._expand_help(action) if action.help else ""
        named = "(default: " in text or "; default: " in text or action.default in QUIET
        ends = text[-1:].isalnum() or text.endswith(")")
        if len(text.split()) < FEWEST or not ends or not named or text.count("(") != text.count(")"):
            wrong.append(f"{p.prog} {action.option_strings or action.dest}: {text}")
    return wrong


def test_the_list_of_commands(monkeypatch):
    """A line a command."""
    monkeypatch.setenv("COLUMNS", "112")
    lines = parser().format_help().splitlines()
    listed = {line.split()[0]: line for line in lines if line.startswith("  ") and not line.startswith("  -")}
    assert listed.keys() == COMMANDS.choices.keys()
    assert all(len(line.split()) > FEWEST and len(line) <= 110 for line in listed.values())


@pytest.mark.parametrize("name", COMMANDS.choices)
def test_every_option_is_explained(name):
    COMMANDS.choices[name].complete()
    assert unexplained(COMMANDS.choices[name]) == []
    assert "--json" in COMMANDS.choices[name].format_help()


@pytest.mark.parametrize(
    "text",
    [None, "", "its states", "rate that a rank reaches:", "rate that a rank reaches (in GB/s"],
)
def test_an_option_that_is_not_explained_is_seen(text):
    p = command.Parser()
    p.add_argument("--planted", help="rate that a rank reaches, in GB/s")
    assert unexplained(p) == []
    p.add_argument("--bad", help=text)
    assert len(unexplained(p)) == 1


def test_a_default_is_named_once():
    p = command.Parser()
    p.add_argument("--rate", default=5.0, help="rate of a link, in GB/s")
    p.add_argument("--peak", default=234.0, help="rate that a rank reaches (default: 75 %% of 312)")
    assert "in GB/s (default: 5.0)" in p.format_help() and p.format_help().count("default") == 2


@pytest.mark.parametrize(
    "kind, good, bad",
    [
        (command.positive, {"3": 3, "1000000": 10**6}, ["0", "-1", "2.5", "two", "1000001"]),
        (command.positions, {"131072": 131072}, ["0", "100000000"]),
        (command.size, {"1000000000": 10**9}, ["0", "1" + "0" * 16]),
        (command.milliseconds, {"0.5": 0.5}, ["0", "-1", "nan", "1e-320"]),
        (command.seconds, {"1e-9": 1e-9, "2": 2.0}, ["0", "1e10", "nan", "soon"]),
        (command.rate, {"0.5": 0.5}, ["0", "-1", "inf", "nan", "fast", "1e-320"]),
        (command.comma_separated(command.positive), {"1,2,4": [1, 2, 4]}, ["", "1,,2", "1,0"]),
    ],
    ids=["positive", "positions", "size", "milliseconds", "seconds", "rate", "comma_separated"],
)
def test_values_of_options(kind, good, bad):
    assert {text: kind(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            kind(text)


# ---- how a command ends ----


@pytest.fixture
def planted(monkeypatch):
    """Returns a function that runs a command which does what it is told."""

    def run(action, *argv):
        def register(p):
            p.runs(action)
            p.add_argument("--out", type=Path)
            command.add_output(p)

        monkeypatch.setitem(sys.modules, "tpfuse.tools.planted", SimpleNamespace(register=register))
        return command.main(command.make_parser({"planted": ("a command", "planted:register")}), ["planted", *argv])

    return run


def test_ctrl_c_is_one_line(planted, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    assert planted(interrupted) == 130
    assert capsys.readouterr().err == "tpfuse planted: interrupted\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def working(_):
    for _ in progress(range(3), "working", long=True):
        raise ValueError("too large")


def test_an_error_stands_in_the_place_of_a_line_of_progress(planted, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert planted(working) == 2
    assert terminal.getvalue().rpartition(command.CLEAR)[2] == "tpfuse planted: error: too large\n"


def test_nothing_is_printed_elsewhere_where_stderr_is_closed(planted, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)  # as by 2>&-
    assert planted(working) == 2 and capsys.readouterr().out == ""


@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "midway"])
def test_a_pipe_that_nothing_reads_ends_a_command_quietly(planted, monkeypatch, capsys, lines):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert planted(lambda _: print("a line\n" * lines)) == 141
        pipe.flush()  # as Python does at its exit
    assert capsys.readouterr().err == ""


def worked(_):
    raise AssertionError("it works before it looks at its files")


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(planted, capsys, tmp_path, option):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    for place in (tmp_path / "folder.png", tmp_path / "file" / "below.png"):
        assert planted(worked, option, str(place)) == 2
        assert capsys.readouterr().err == f"tpfuse planted: error: {place} is a folder, or cannot be written\n"
    assert planted(lambda _: None, option, str(tmp_path / "new" / "x.png")) == 0
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["picture", "picture.xyz"])
def test_a_picture_without_a_known_suffix_is_refused_before_the_work(planted, capsys, tmp_path, name):
    pytest.importorskip("matplotlib")
    assert planted(worked, "--plot", str(tmp_path / name)) == 2
    assert f"{name}: a picture ends in one of ." in (err := capsys.readouterr().err) and ".png" in err


def test_without_matplotlib_a_picture_is_refused_before_the_work(planted, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert planted(worked, "--plot", "x.png") == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_help_is_as_wide_as_the_terminal(monkeypatch):
    widths = {}
    for columns in "60", "100", "400":
        monkeypatch.setenv("COLUMNS", columns)
        widths[columns] = max(map(len, COMMANDS.choices["bench"].format_help().splitlines()))
    assert widths["60"] <= 58 < widths["100"] <= 98 < widths["400"] <= 110
