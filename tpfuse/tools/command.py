"""The command line, ``tpfuse`` or ``python -m tpfuse``: what its commands have in common, without torch.

Each tool adds a command's options beside its code, in a function of its parser that ``tpfuse/__main__.py`` names and
that is imported when the command is.
"""

import argparse
import json
import os
import shutil
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from .._version import __version__
from .nearest import proposal

N = TypeVar("N", int, float)
Options = argparse._ActionsContainer  # a parser or a group of its options
INTERRUPTED, CLOSED = 130, 141  # exit codes of a shell's command that Ctrl-C, or a pipe that nothing reads, has ended
WRITTEN = "csv", "html", "json", "out"  # options that may name a file which the command writes


class Help(argparse.HelpFormatter):
    """Adds its default to the help of an option that has one and does not name it; lists commands like options."""

    def __init__(self, prog: str):
        columns = shutil.get_terminal_size((112, 24)).columns
        super().__init__(prog, max_help_position=30, width=min(columns - 2, 110))

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(super(Help, self)._format_action(command) for command in action._get_subactions())
        return super()._format_action(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        quiet = "(default" in text or any(action.default is value for value in (None, False, argparse.SUPPRESS))
        return text if quiet else f"{text} (default: %(default)s)"


class Parser(ArgumentParser):
    """A parser that proposes the name most like an unknown command or choice."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=Help, allow_abbrev=False, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += proposal(value, action.choices or ())
            raise


class CommandParser(Parser):
    """The parser of a command, whose options are added when it parses or explains them."""

    def __init__(self, *, place: str, **options: Any):
        """``place``: the function that adds the options, as "module:name" below this package."""
        super().__init__(**options)
        self._place = place

    def runs(self, run: Callable[[Namespace], int | None], details: str | None = None) -> None:
        """Sets what the command does: ``run``, called with the parsed options, returns the exit code, or None for 0.

        ``details``: the text over its own options (default: its line in the list).
        """
        self.set_defaults(run=run)
        self.description = details or self.description

    def complete(self) -> None:
        """Adds the options, once; imports the command's module."""
        if self._place:
            module, _, function = self._place.partition(":")
            self._place = ""
            getattr(import_module(f".{module}", __package__), function)(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        self.complete()
        return super().format_help()


class PrintCompletion(argparse.Action):
    """Prints the script by which a shell completes commands, options and files, and exits.  Needs shtab."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, shell: Any, option: str | None = None) -> None:
        try:
            import shtab
        except ImportError:
            parser.error(f"{option} needs shtab: pip install 'tpfuse[completion]'")
        parser.prog = "tpfuse"  # the name that is completed
        for listed in parser._actions:
            for command in listed.choices.values() if isinstance(listed, argparse._SubParsersAction) else ():
                command.complete()
                for action in command._actions:
                    if action.type is Path:
                        setattr(action, "complete", shtab.FILE)  # noqa: B010 (argparse declares no such field)
        print(shtab.complete(parser, shell))
        parser.exit()


def make_parser(commands: Mapping[str, tuple[str, str]]) -> Parser:
    """Returns the parser of the command line: of each command its line in the list, and the place of its options."""
    prog = "tpfuse" if Path(sys.argv[0]).stem == "tpfuse" else "python -m tpfuse"
    parser = Parser(
        prog=prog,
        description="Tools around transformers trained with tensor parallelism. None of them needs a GPU.",
        epilog=f"A command's options, with units and defaults: {prog} COMMAND --help",
    )
    parser.add_argument(
        "--version", action="version", version=f"tpfuse {__version__}", help="print the version and exit"
    )
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=["bash", "zsh", "fish", "tcsh", "powershell"],
        metavar="SHELL",
        help="print completions for bash, zsh, fish, tcsh or powershell (needs shtab)",
    )
    listed = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", prog=prog, parser_class=CommandParser
    )
    for name, (summary, place) in commands.items():
        listed.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", place=place)
    return parser


def main(parser: ArgumentParser, argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 for a ValueError or OSError, whose message goes to stderr, and
    without a command, where the list of commands does; 130 after Ctrl-C; 141 where nothing reads what is printed."""
    name = "tpfuse"
    try:
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        name += f" {args.command}"
        check_files(args)
        code: int = args.run(args) or 0
        sys.stdout.flush()  # so that a closed pipe is seen here
        return code
    except KeyboardInterrupt:
        _say(f"{name}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its exit
        return CLOSED
    except (ValueError, OSError) as error:
        _say(f"{name}: error: {error}")
        return 2


# ---- stderr, which a shell may have closed ----

CLEAR = "\r\x1b[K"  # what stands in a terminal's line


def on_terminal() -> bool:
    """Returns whether stderr is a terminal, where a line of progress may stand."""
    return sys.stderr is not None and sys.stderr.isatty()


def _say(line: str) -> None:
    """Prints a line to stderr, in the place of one of progress."""
    if sys.stderr is not None:
        print(f"{CLEAR * on_terminal()}{line}", file=sys.stderr)


# ---- files that are written ----


def check_files(args: Namespace) -> None:
    """Raises ValueError where a file that the options name cannot be written, before a command works for it."""
    for name in WRITTEN:
        if isinstance(path := getattr(args, name, None), Path):
            check_file(path)
    if getattr(args, "plot", None):
        check_picture(args.plot)


def check_file(path: Path) -> None:
    """Raises ValueError where no file can be written; missing folders above it are no obstacle."""
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    if place.is_dir() == (place == path) or not os.access(place, os.W_OK):
        raise ValueError(f"{path} is a folder, or cannot be written")


def check_picture(path: Path, advice: str = "") -> None:
    """Raises ValueError where no picture can be drawn: as :func:`check_file`, without matplotlib, and for a suffix of a
    format that it does not write."""
    formats = picture_formats()
    if path.suffix[1:].lower() not in formats:
        suffixes = ", ".join("." + name for name in formats)
        raise ValueError(f"--plot {path}: a picture ends in one of {suffixes}{advice}")
    check_file(path)


def picture_formats() -> Collection[str]:
    """Returns the suffixes of the formats that matplotlib writes; ValueError where it is missing."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    return FigureCanvasBase.get_supported_filetypes()


# ---- output ----


def print_result(args: Namespace, text: str, values: object) -> None:
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


positive = bounded(int, lambda n: 1 <= n <= 10**6, "an integer from 1 to 1,000,000")
positions = bounded(int, lambda n: 1 <= n <= 1 << 22, f"an integer from 1 to {1 << 22:,}")
size = bounded(int, lambda n: 1 <= n <= 10**15, "a number of bytes, 1 to 1e15")
seconds = bounded(float, lambda s: 1e-9 <= s <= 1e9, "a number of seconds, 1e-9 to 1e9")
milliseconds = bounded(float, lambda ms: 1e-6 <= ms <= 1e12, "a number of milliseconds, 1e-6 to 1e12")
rate = bounded(float, lambda x: 1e-9 <= x <= 1e12, "a number from 1e-9 to 1e12")


def unknown(kind: str, name: str, names: Collection[str], more: str = "") -> ValueError:
    """Returns the error of a name that is not one of ``names``, with the nearest of them; ``more``: what else may
    stand there."""
    near = proposal(name, names)
    there = f"{near} There" if near else "; there"
    return ValueError(f"there is no {kind} {name!r}{there} are {', '.join(sorted(names))}{more}")


def comma_separated(kind: Callable[[str], N]) -> Callable[[str], list[N]]:
    """Returns a type for argparse: a list such as "1,2,4"."""
    return lambda text: [kind(part) for part in text.split(",")]


# ---- options ----


def add_flag(parser: Options, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", help=text)


def add_number(
    parser: Options, name: str, kind: Callable[[str], float], text: str, *, default: float | None = None
) -> None:
    """Adds an option that takes a number, which ``kind`` makes of its text."""
    parser.add_argument(name, type=kind, default=default, metavar="X", help=text)


def add_count(parser: Options, name: str, text: str, default: int | None = None) -> None:
    """Adds an option that takes an integer of at least 1, and at most 1,000,000."""
    parser.add_argument(name, type=positive, default=default, metavar="N", help=text)


def add_numbers(
    parser: Options, name: str, kind: Callable[[str], float], text: str, *, default: str | None = None, of: str = "N"
) -> None:
    """Adds an option that takes numbers with commas between them, each of which ``kind`` makes of its text."""
    parser.add_argument(name, type=comma_separated(kind), default=default, metavar=f"{of},..", help=text)


def add_output(parser: Options, *, plot: bool = True) -> None:
    """Adds --json and, with ``plot``, --plot."""
    output = parser.add_argument_group("output")
    add_flag(output, "--json", "print JSON in place of tables")
    if plot:
        output.add_argument(
            "--plot", type=Path, metavar="PNG", help="draw a picture to this file too (needs matplotlib)"
        )


def add_html(parser: Options, text: str) -> None:
    """Adds --html, which writes ``text``."""
    parser.add_argument("--html", type=Path, metavar="FILE", help=f"write {text}")


def add_seq(parser: Options, default: int | None, text: str = "") -> None:
    """Adds --seq; ``text``: its default in words, where the model settles it."""
    help_ = f"positions in a sequence{text}"
    parser.add_argument("--seq", type=positions, default=default, metavar="N", help=help_)
