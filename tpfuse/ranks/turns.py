"""Turns that the ranks of one machine take over memory that they share.

In a turn each rank says how many bytes it sends to each, copies them to its place, raises its counter, and reads the
place of each other rank once that rank's counter is as high.  Two sets of places alternate, so that nobody writes what
another one still reads: a rank whose counter is at n + 1 has read the places of n.

Counters order the copies before them on x86 processors alone, whose stores become visible in program order.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist

from .gloo import limit
from .messages import CallsDiffer, Channel

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ROOM = 1 << 20  # bytes of a place
_LINE = 8  # numbers in a cache line: each counter has its own
_KINDS = ("all-gathers", "exchanges")
_SPIN = 0.05  # seconds for which a rank that waits looks again at once, and yields its core each time
_GLANCE = 0.05  # seconds between looks at whether the others live


_GONE = "", "has left the group", "was interrupted in a message"


class Members:
    """The ranks of a group on one machine: this one's number, which of them are gone, and which compare a call.

    They share ``left`` [R], why a rank is gone, and ``comparisons`` [R], how many each has begun over the group's
    ``channel``.
    """

    def __init__(self, numbers: memoryview, group: dist.ProcessGroup, channel: Channel, pids: list[int]):
        self.rank, self.size, self.timeout = channel.rank, channel.size, limit(group).total_seconds()
        self.left, self._comparisons = numbers[: self.size], numbers[self.size :]
        self._channel, self._pids, self._error, self._sending = channel, pids, "", threading.Lock()
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        channel.comparisons = self._comparisons

    @staticmethod
    def numbers_of(ranks: int) -> int:
        """Returns how many int64 numbers so many ranks share."""
        return 2 * ranks

    def __enter__(self) -> None:
        """Begins a message.

        RuntimeError where the ranks' turns are no longer the same, after an error or a message that Ctrl-C has ended,
        and while another thread sends one.
        """
        if self._error:
            raise RuntimeError(self._error)
        if not self._sending.acquire(blocking=False):
            self.fail("another thread of this rank sends a message of this group")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends a message; one that an exception ends takes this rank out of the group, CallsDiffer excepted."""
        if kind is not None and not self._error and not issubclass(kind, CallsDiffer):
            self._error, self.left[self.rank] = "a message of this rank was interrupted", 2
        self._sending.release()

    def fail(self, error: str) -> NoReturn:
        """Raises the error, in each later call too, and takes this rank out of the group: nobody waits for it."""
        self._error, self.left[self.rank] = error, 1
        raise RuntimeError(error)

    def title(self, rank: int) -> str:
        """Returns "rank N" with the number in the world."""
        return f"rank {self._channel.world_rank(rank)}"

    def absence(self, rank: int, waited: float) -> str:
        """Returns why a rank will not come; "" where it may."""
        if self.left[rank]:
            return _GONE[self.left[rank]]
        if _ended(self._pids[rank]):
            return "has ended"
        return f"has come to no such call within {self.timeout:g} s" if waited > self.timeout else ""

    def compares(self, rank: int) -> bool:
        """Returns whether a rank has begun a comparison that this one has not."""
        return self._comparisons[rank] > self._comparisons[self.rank]

    def meet(self, message: str) -> NoReturn:
        """Answers ranks that compare a call while this one sends a message: CallsDiffer on all of them."""
        self._channel.exchange("message", detail=f" ({message})")
        raise CallsDiffer(f"this rank sends a message ({message}), and others compare a call")


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
                f"{self.members.title(rank)} {_KINDS[mark & 1]} {mark >> 1} bytes, and this rank {_KINDS[kind]}"
                f" {length}: each rank must make the same calls in the same order, with tensors of the same sizes"
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
            glance, absence, compares = now, self.members.absence(rank, now - start), self.members.compares(rank)
            if counters[rank] >= count:  # it has come, whatever it did then
                continue
            if absence:
                self.members.fail(f"{self.members.title(rank)} {absence}")
            if compares:
                self._withdraw()

    def _withdraw(self) -> NoReturn:
        """Takes back a turn to which a rank has not come that compares a call: nobody has ended it."""
        row, marks = self.members.rank * self.members.size, self._lengths[self.count % 2]
        length, kind = divmod(max(marks[row:][: self.members.size]), 2)
        self.count -= 1
        self.arrive()
        self.members.meet(f"it {_KINDS[kind]} {length} bytes")


def _ended(pid: int) -> bool:
    """Returns whether a process is no more, or is only waiting for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # as where this process has too many files open, which says nothing of the other
        return False
