"""The command line of a bench: its module's docstring is the help."""

import argparse


def parser_of(module: str, about: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
