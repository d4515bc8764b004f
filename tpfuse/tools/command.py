"""The command line, ``python -m tpfuse``: what its commands have in common.

Each tool adds its commands beside its code, in a function ``register(commands)``; ``tpfuse/__main__.py`` calls these.
"""

import argparse
import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from ..kernels.runtime.launch import MULTIPROCESSORS
from .ledger.memory import OPTIMIZERS
from .ledger.presets import PRESETS

N = TypeVar("N", int, float)
Options = argparse._ActionsContainer  # a parser or a group of its options

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODEL_HELP = f"local Hugging Face directory, its config.json, or one of {', '.join(PRESETS)}"


class Help(argparse.HelpFormatter):
    """Adds its default to the help of an option that has one and does not name it; lists commands like options."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=110)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(super(Help, self)._format_action(command) for command in action._get_subactions())
        return super()._format_action(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        quiet = "(default" in text or any(action.default is value for value in (None, False, argparse.SUPPRESS))
        return text if quiet else f"{text} (default: %(default)s)"


class Commands:
    """The parser of a command line, to which each tool adds its commands."""

    def __init__(self) -> None:
        self.parser = ArgumentParser(
            prog="python -m tpfuse",
            description="Tools around transformers trained with tensor parallelism. None of them needs a GPU.",
            epilog="A command's options, with units and defaults: python -m tpfuse COMMAND --help",
            formatter_class=Help,
        )
        self._commands = self.parser.add_subparsers(
            dest="command", required=True, metavar="COMMAND", title="commands", prog="python -m tpfuse"
        )

    def add(
        self, name: str, summary: str, run: Callable[[Namespace], int | None], details: str | None = None
    ) -> ArgumentParser:
        """Adds a command and returns its parser.

        ``summary``: its line in the list of commands.  ``run``: called with the parsed options; returns the exit code,
        or None for 0.  ``details``: the text over its own options (default: the summary).
        """
        description = details or f"{summary[0].upper()}{summary[1:]}."
        parser = self._commands.add_parser(
            name, help=summary, description=description, formatter_class=Help, allow_abbrev=False
        )
        parser.set_defaults(run=run)
        return parser


def main(parser: ArgumentParser, argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 for a ValueError or OSError, whose message goes to stderr."""
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except (ValueError, OSError) as error:
        print(f"tpfuse {args.command}: error: {error}", file=sys.stderr)
        return 2


# ---- output ----


def print_result(args: Namespace, text: str, values: object) -> None:
    """Prints the text, or with --json the values."""
    print(json.dumps(values, indent=1, default=str) if args.json else text)


def present(args: Namespace, text: str, values: object, draw: Callable[[Path], object]) -> None:
    """Prints the text, or with --json the values; with --plot draws a picture first."""
    if args.plot:
        draw(args.plot)
    print_result(args, text, values)
    if args.plot and not args.json:
        print(f"\ndrawn to {args.plot}")


# ---- values of options ----


def bounded(kind: type[N], is_valid: Callable[[N], bool], rule: str) -> Callable[[str], N]:
    """Returns a type for argparse: a number for which ``is_valid(number)`` is true; ``rule`` goes into the error."""

    def parse(text: str) -> N:
        try:
            if is_valid(value := kind(text)):
                return value
        except ValueError:
            pass
        raise ArgumentTypeError(f"must be {rule}, got {text}")

    return parse


positive = bounded(int, lambda n: n >= 1, "an integer of at least 1")
seconds = bounded(float, lambda s: 1e-9 <= s <= 1e9, "a number of seconds, 1e-9 to 1e9")
rate = bounded(float, lambda x: 0 < x < float("inf"), "a number above 0")


def comma_separated(kind: Callable[[str], N]) -> Callable[[str], list[N]]:
    """Returns a type for argparse: a list such as "1,2,4"."""
    return lambda text: [kind(part) for part in text.split(",")]


# ---- options of several commands ----


def add_output(parser: Options, *, plot: bool = True) -> None:
    """Adds --json and, with ``plot``, --plot."""
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON in place of tables")
    if plot:
        output.add_argument(
            "--plot", type=Path, metavar="PNG", help="draw a picture to this file too (needs matplotlib)"
        )


def add_model(parser: Options, default: str | None = None) -> None:
    """Adds --model, which must be given unless it has a default."""
    parser.add_argument("--model", required=default is None, default=default, metavar="MODEL", help=MODEL_HELP)


def add_seq(parser: Options, default: int) -> None:
    """Adds --seq."""
    parser.add_argument("--seq", type=positive, default=default, metavar="N", help="positions in a sequence")


def add_dtype(parser: Options, default: str = "bf16") -> None:
    """Adds --dtype."""
    parser.add_argument("--dtype", choices=DTYPES, default=default, help="dtype of weights and activations")


def add_optimizer(parser: Options, default: str = "adamw") -> None:
    """Adds --optimizer."""
    text = "optimizer whose states are counted; adamw-fp32: fp32 moments and master weights"
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=default, help=text)


def add_arch(parser: Options) -> None:
    """Adds --arch."""
    text = "GPU architecture whose launch parameters tpfuse's kernels are counted with"
    parser.add_argument("--arch", choices=MULTIPROCESSORS, default="sm_90", help=text)
