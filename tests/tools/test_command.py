"""The command line: every option of every command is explained, types of values, the list of commands."""

import argparse

import pytest

from tpfuse.__main__ import parser
from tpfuse.tools import command

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


def test_the_list_of_commands():
    """A line a command."""
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
        (command.positive, {"3": 3}, ["0", "-1", "2.5", "two"]),
        (command.seconds, {"1e-9": 1e-9, "2": 2.0}, ["0", "1e10", "nan", "soon"]),
        (command.rate, {"0.5": 0.5}, ["0", "-1", "inf", "nan", "fast"]),
        (command.comma_separated(command.positive), {"1,2,4": [1, 2, 4]}, ["", "1,,2", "1,0"]),
    ],
    ids=["positive", "seconds", "rate", "comma_separated"],
)
def test_values_of_options(kind, good, bad):
    assert {text: kind(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            kind(text)
