"""A save that goes on while training does: one thread, one save at a time, finished before the process ends."""

import atexit
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from .errors import named
from .ranks import Ranks

_threads: list[ThreadPoolExecutor] = []  # at most one; joined when the interpreter ends
_saves: "dict[Path, Saving]" = {}  # the last of each folder, until its end was told


class Saving:
    """A save in the background, as ``save_checkpoint(..., background=True)`` returns it."""

    def __init__(self, future: "Future[Path]"):
        self._future = future
        self.told = False  # whether its error was raised

    def done(self) -> bool:
        """Returns whether the checkpoint is there, or the save has failed."""
        return self._future.done()

    def result(self) -> Path:
        """Waits for the end; returns the checkpoint's path, or raises the save's error."""
        self.told = True
        with named("save_checkpoint"):
            return self._future.result()


def start(directory: Path, save: Callable[[], Path]) -> Saving:
    """Runs ``save`` in the thread."""
    if not _threads:
        _threads.append(ThreadPoolExecutor(1, thread_name_prefix="save_checkpoint"))
    saving = _saves[_key(directory)] = Saving(_threads[0].submit(save))
    return saving


def settle() -> None:
    """Waits for what is being saved, in any folder: the messages of two saves must not mix."""
    wait([saving._future for saving in _saves.values()])


def raise_earlier(directory: Path, ranks: Ranks) -> None:
    """Raises on every rank the error of an earlier save in this folder, unless each rank has had it."""
    saving = _saves.pop(_key(directory), None)

    def end() -> None:
        if saving is not None and not saving.told:
            with named("the save before, in the background"):
                saving._future.result()

    ranks.together(end)


def _key(directory: Path) -> Path:
    return directory.absolute()


def _report() -> None:
    """Says at the end of the process what nobody has asked for."""
    for directory, saving in _saves.items():
        error = saving._future.exception()
        if error is not None and not saving.told:
            print(f"save_checkpoint in {directory} failed in the background: {error}", file=sys.stderr)


def _forget() -> None:
    """A forked process has no thread of its parent's."""
    _threads.clear()
    _saves.clear()


atexit.register(_report)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
