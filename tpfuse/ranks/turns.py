"""Turns that the ranks of one machine take over memory that they share.

In a turn each rank says how many bytes it sends to each, copies them to its place, raises its counter, and reads the
place of each other rank once that rank's counter is as high.  Two sets of places alternate, so that nobody writes what
another one still reads: a rank whose counter is at n + 1 has read the places of n.

Counters order the copies before them on x86 processors alone, whose stores become visible in program order.
"""

import os
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist

from .gloo import limit

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ROOM = 1 << 20  # bytes of a place
_LINE = 8  # numbers in a cache line: each counter has its own
_KINDS = ("all-gathers", "exchanges")
_SPIN = 0.05  # seconds for which a rank that waits looks again at once, and yields its core each time
_GLANCE = 0.05  # seconds between looks at whether the others live


class Members:
    """The ranks of a group on one machine: this one's number, and which of them are gone."""

    def __init__(self, left: memoryview, group: dist.ProcessGroup, pids: list[int]):
        self.left, self._pids, self._error, self._busy = left, pids, "", False
        self.rank, self.size, self.timeout = group.rank(), group.size(), limit(group).total_seconds()
        self.peers = [rank for rank in range(self.size) if rank != self.rank]

    def enter(self) -> None:
        """Begins a message.

        RuntimeError where the ranks' turns are no longer the same, after an error or a message that Ctrl-C has ended,
        and while another thread sends one.
        """
        if self._busy and not self._error:
            self.fail("a message of this rank was interrupted, or another thread sends one")
        if self._error:
            raise RuntimeError(self._error)
        self._busy = True

    def leave(self) -> None:
        """Ends a message."""
        self._busy = False

    def fail(self, error: str) -> NoReturn:
        """Raises the error, in each later call too, and takes this rank out of the group: nobody waits for it."""
        self._error, self.left[self.rank] = error, 1
        raise RuntimeError(error)

    def absence(self, rank: int, waited: float) -> str:
        """Returns why a rank will not come; "" where it may."""
        if self.left[rank]:
            return "has left the group"
        if _ended(self._pids[rank]):
            return "has ended"
        return f"has come to no such call within {self.timeout:g} s" if waited > self.timeout else ""


class Turns:
    """Counters [R], lengths [2, R, R] and places [2, R, ROOM] of all ranks, and how many turns this one has taken."""

    def __init__(self, numbers: memoryview, places: Bytes, members: Members):
        ranks = members.size
        self.members, self.count, self.places = members, 0, places
        self._counters, lengths = numbers[: _LINE * ranks : _LINE], numbers[_LINE * ranks :]
        self._lengths = lengths[: ranks * ranks], lengths[ranks * ranks :]

    @staticmethod
    def numbers_of(ranks: int) -> int:
        """Returns how many int64 numbers so many ranks share."""
        return _LINE * ranks + 2 * ranks * ranks

    def begin(self, lengths: list[int], kind: int) -> Bytes:
        """Begins a turn in which this rank sends so many bytes to each; returns its set of places [R, ROOM]."""
        self.count += 1
        row, marks = self.members.rank * self.members.size, self._lengths[self.count % 2]
        for to, length in enumerate(lengths):
            marks[row + to] = 2 * length + kind
        return self.places[self.count % 2]

    def arrive(self) -> None:
        """Says that this rank's place is filled."""
        self._counters[self.members.rank] = self.count

    def wait(self, rank: int, length: int, kind: int) -> None:
        """Waits until a rank has filled its place with what this rank expects.

        RuntimeError where it has ended, has left the group, has come to no such call within the group's limit, or is in
        another call.
        """
        if self._counters[rank] < self.count:
            self._wait(rank)
        mark = self._lengths[self.count % 2][rank * self.members.size + self.members.rank]
        if mark != 2 * length + kind:
            self.members.fail(
                f"rank {rank} {_KINDS[mark & 1]} {mark >> 1} bytes, and this rank {_KINDS[kind]} {length}: each rank"
                " must make the same calls in the same order, with tensors of the same sizes"
            )

    def longest(self) -> int:
        """Returns the most bytes that a rank sends to one; to be called after each rank was waited for."""
        return max(self._lengths[self.count % 2]) >> 1

    def _wait(self, rank: int) -> None:
        counters, count = self._counters, self.count
        start = glance = time.monotonic()
        while counters[rank] < count:
            os.sched_yield()  # at once: where ranks share a core, the one that is waited for may be this core's next
            now = time.monotonic()
            if now > start + _SPIN:
                time.sleep(min((now - start) / 16, _GLANCE))
            if now < glance + _GLANCE:
                continue
            glance, absence = now, self.members.absence(rank, now - start)
            if absence and counters[rank] < count:  # it may have come, and then gone
                self.members.fail(f"rank {rank} {absence}")


def _ended(pid: int) -> bool:
    """Returns whether a process is no more, or is only waiting for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # as where this process has too many files open, which says nothing of the other
        return False
