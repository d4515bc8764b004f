"""The first rank that fails says so where the others find it: their own errors then name it and its message.

A rank whose process ends closes its connections, which ends what others wait for within seconds, but says no more than
that.  The note stands in the store that the process group was made with.
"""

import contextlib
import functools
import multiprocessing.util
import sys
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist

_KEY = "tpfuse/failed"


def noted() -> str:
    """Returns "rank 1 has failed: ValueError: ...", or "" where no rank has left a note."""
    with contextlib.suppress(Exception):  # the store's process may be the one that has gone
        store = _store()
        if store.check([_KEY]):
            return store.get(_KEY).decode()
    return ""


def explained(error: Exception) -> str:
    """Returns what another rank has said of its own failure, or else ``error``'s own words."""
    return noted() or f"{error}"


@contextlib.contextmanager
def named(label: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Raises the error of a peer that died or timed out as one that starts with ``label`` and this rank, and ends with
    the peer's own error if it reported one."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{label}, rank {group.rank()} of {group.size()}: {explained(error)}") from error


@functools.cache
def note_failures() -> None:
    """Makes an exception that ends this process leave a note, before it is printed as ever.

    A process that multiprocessing has started, as by ``torch.multiprocessing.spawn``, calls no ``sys.excepthook``; it
    runs its finalizers while the exception is on its way.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _note(error)
        previous(kind, error, trace)

    sys.excepthook = hook
    multiprocessing.util.Finalize(None, _note_current, exitpriority=0)


def _note_current() -> None:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):  # spawn's own, which it raises where it has caught the rank's
        error = error.__context__
    if error is not None:
        _note(error)


def _note(error: BaseException) -> None:
    with contextlib.suppress(Exception):
        note = f"rank {dist.get_rank()} has failed: {type(error).__name__}: {error}"
        _store().compare_set(_KEY, "", note)  # the first stays


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
