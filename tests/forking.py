"""Processes that start at once: forked from a server that has imported what they need (tests/preload.py)."""

import functools
import multiprocessing
import sys
from multiprocessing.context import BaseContext

START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


@functools.cache
def forking() -> BaseContext:
    """The context whose processes start at once. The first call starts the server, one for each test process; it should
    come before a test changes the directory, where the server does not find what to import and its children do."""
    context = multiprocessing.get_context(START_METHOD)
    if START_METHOD == "forkserver":
        context.set_forkserver_preload(["tests.preload"])
        multiprocessing.forkserver.ensure_running()
    return context


def start_nothing() -> None:
    """In such a process: from here on a CUDA driver that starts nothing (bench/idle)."""
    from bench import idle

    idle.install()
