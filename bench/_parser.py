"""The command line of a bench: its module's docstring is the help."""

import argparse


def parser_of(module: str, about: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def check_rounds(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Ends the program with an error for fewer rounds than quartiles are made of."""
    if rounds < 2:
        parser.error(f"--rounds must be at least 2, for quartiles, got {rounds}")
