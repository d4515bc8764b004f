"""Threads of one rank that use the connections of one group: one at a time.

Ranks know messages by their order alone, so the calls of two threads of a rank must not overlap.  They may follow each
other: a model that one thread has made may generate in another.
"""

import sys
import threading
from collections.abc import Iterator
from types import FrameType

import torch

_LIBRARY = __name__.partition(".")[0] + "."
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__  # the function that waits for a backward pass


class Threads:
    """The threads of this rank that have used the connections of a group."""

    def __init__(self) -> None:
        self._users: set[int] = set()

    def enter(self) -> None:
        """Says that this thread uses the connections now.

        RuntimeError that names both threads and calls where another one is in a call of this library, or in a backward
        pass, and has used them.
        """
        user = threading.get_ident()
        if self._users != {user}:
            self._check(user)

    def _check(self, user: int) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        foreign = in_backward and user not in self._users  # autograd's own thread, for one that waits in backward()
        if not foreign:
            self._users.add(user)
        # This thread's frame would hold itself in a cycle, and with it all that its callers hold.
        frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != user}
        self._users &= {user, *frames}  # those that live
        calls = {thread: call_in(frames[thread]) for thread in self._users - {user}}
        busy = {thread: call for thread, call in calls.items() if call is not None}
        if foreign:
            busy.pop(next((thread for thread, call in busy.items() if call == "backward"), user), None)
        if busy:
            thread, call = next(iter(busy.items()))
            raise RuntimeError(
                f"thread {_name(user)} is in {call_in(sys._getframe())} while thread {_name(thread)} is in {call}, over"
                " the same ranks: these know messages by their order alone, so one thread at a time calls them"
            )


def call_in(frame: FrameType) -> str | None:
    """Returns the call of this library that a thread is in, as :func:`outermost` does, or "backward"; None for none."""
    if any(outer.f_code is _BACKWARD for outer in _outwards(frame)):
        return "backward"
    return outermost(frame)


def outermost(frame: FrameType) -> str | None:
    """Returns the name of the function of this library that the caller's code is in, "GPT.forward" say."""
    ours = [outer for outer in _outwards(frame) if outer.f_globals.get("__name__", "").startswith(_LIBRARY)]
    named = [outer for outer in ours if outer.f_code.co_name[0] != "<"]
    return _title(named[-1]) if named else None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _title(frame: FrameType) -> str:
    code = frame.f_code
    is_hook = code.co_varnames[:2] == ("module", "args")
    if not is_hook and code.co_varnames[:1] not in (("self",), ("cls",)):
        return code.co_name
    owner = frame.f_locals[code.co_varnames[0]]
    name = (owner if isinstance(owner, type) else type(owner)).__name__
    return f"{name}.{'forward' if is_hook else code.co_name}"


def _name(ident: int) -> str:
    return next((repr(thread.name) for thread in threading.enumerate() if thread.ident == ident), f"{ident}")
