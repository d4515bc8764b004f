"""All-gathers of a few kilobytes between the ranks of one machine, through memory that they share.

gloo's take some tenths of a millisecond there, most of it to wake threads up: as long as a small model computes a layer
(``python -m bench.shared_memory``).  Here each rank copies its part to a place of its own, raises its counter, and
looks at the others' counters until they have done the same.  Two sets of places take turns, so that nobody writes what
another one still reads: a rank whose counter is at n + 1 has read the places of n.

Counters order the copies before them on x86 processors alone, whose stores become visible in program order.
"""

import mmap
import os
import platform
import sys
import time
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...collectives import all_gather, all_reduce, summed
from ...kernels.runtime.op import acc_dtype
from ...parallel import TensorParallel
from ...ranks.gloo import limit
from ...ranks.messages import Channel, channel, gather

ROOM = 1 << 20  # bytes of a rank's part at most
_LINE = 64  # bytes of a cache line: each counter has its own
_GLANCE = 0.05  # seconds between looks at whether the others live

_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None]" = weakref.WeakKeyDictionary()


class Exchange(NamedTuple):
    """Messages of generation: through shared memory where the ranks have it and there is room, else the group's."""

    tp: TensorParallel
    memory: "SharedMemory | None"

    def gather(self, x: Tensor) -> Tensor:
        """All-gathers [...] -> [R, ...].  Of two buffers: the second call after this overwrites it."""
        if self.memory is not None and self.memory.fits(x):
            return self.memory.gather(x)
        return all_gather(x.contiguous(), self.tp.size, self.tp.group_name)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, as :func:`summed` takes it."""
        if self.memory is None or not self.memory.fits(x):
            return all_reduce(x, self.tp)
        parts = self.memory.gather(x)
        # Additions of two parts, or of fp32, are the sum in fp32: fewer calls of torch than the op's.
        if len(parts) > 2 and (self.tp.bitwise is not None or acc_dtype(parts) != parts.dtype):
            return summed(parts, self.tp)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total


def exchange(tp: TensorParallel, device: torch.device) -> Exchange:
    """Returns a group's messages for tensors of a device.  Each rank calls it; the first call makes the memory."""
    return Exchange(tp, shared_memory(tp) if device.type == "cpu" else None)


def shared_memory(tp: TensorParallel) -> "SharedMemory | None":
    """Returns the memory that a group's ranks share, made by the first call, which is a collective; None where they are
    not on one machine, where one of them cannot have it, or where the processor is no x86."""
    group = tp.group
    if group is None or not tp.one_machine:
        return None
    if group not in _made:
        peers = channel(group)
        _made[group] = None if peers is None else _make(group, peers)
    return _made[group]


def _make(group: dist.ProcessGroup, peers: Channel) -> "SharedMemory | None":
    """Each rank opens the first one's file, and says whether it can.

    The file is in memory and has no name: nothing is left of it, wherever a process is killed.
    """
    able = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
    size = SharedMemory.size_of(peers.size)
    number = _new_file(size) if peers.rank == 0 and able else None
    try:
        namespace = _namespace()
        processes = gather((number, os.getpid(), namespace), peers)
        first, pid, _ = processes[0]
        alike = len({namespace for *_, namespace in processes}) == 1  # else the path is another process's
        mapped = _mapped(f"/proc/{pid}/fd/{first}", size) if able and alike and first is not None else None
        mapped_by = gather(mapped is not None, peers)
    finally:
        if number is not None:
            os.close(number)
    return SharedMemory(mapped, group, [pid for _, pid, _ in processes]) if mapped and all(mapped_by) else None


def _new_file(size: int) -> int | None:
    """Returns the descriptor of a new file of zeros in memory; None where there is no room."""
    try:
        number = os.memfd_create("tpfuse")
        try:
            os.posix_fallocate(number, 0, size)
        except OSError:
            os.close(number)
            return None
        return number
    except OSError:
        return None


def _mapped(path: str, size: int) -> mmap.mmap | None:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):
        return None


def _namespace() -> str:
    """Names the set of processes in which a number means this process."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"unknown, {os.getpid()}"


class SharedMemory:
    """Counters and two sets of places, mapped by every rank of a group."""

    def __init__(self, mapped: mmap.mmap, group: dist.ProcessGroup, pids: list[int]):
        self.rank, self.ranks, self.timeout = group.rank(), group.size(), limit(group).total_seconds()
        self._pids, self._count = pids, 0
        integers = memoryview(mapped).cast("q")[: self.ranks * _LINE // 8]
        self._counters, self._left = integers[:: _LINE // 8], integers[1 :: _LINE // 8]
        with torch.inference_mode(False):  # tensors that are made in it cannot be written outside
            places = torch.frombuffer(mapped, dtype=torch.uint8, offset=self.ranks * _LINE)
            self._places = places.view(2, self.ranks, ROOM)
        self._views: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, Tensor]] = {}
        weakref.finalize(self, _leave, self._left, self.rank, os.getpid())

    @staticmethod
    def size_of(ranks: int) -> int:
        return ranks * _LINE + 2 * ranks * ROOM

    def fits(self, x: Tensor) -> bool:
        return x.is_cpu and x.numel() * x.element_size() <= ROOM

    def gather(self, x: Tensor) -> Tensor:
        """All-gathers [...] -> [R, ...], one of two buffers: the second call after this overwrites it.

        RuntimeError where a rank has ended, has left the group, or has come to no such call within the group's limit.
        """
        self._count += 1
        views = self._views.get((x.shape, x.dtype))
        if views is None:
            views = self._views[x.shape, x.dtype] = self._views_of(x)
        parts = views[self._count % 2]
        parts[self.rank].copy_(x)
        self._counters[self.rank] = self._count
        for rank in range(self.ranks):
            if self._counters[rank] < self._count:
                self._wait(rank)
        return parts

    @torch.inference_mode(False)  # as above
    def _views_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        count = x.numel() * x.element_size()
        even, odd = (places[:, :count].view(x.dtype).view(self.ranks, *x.shape) for places in self._places)
        return even, odd

    def _wait(self, rank: int) -> None:
        counters, count = self._counters, self._count
        start = glance = time.monotonic()
        while counters[rank] < count:
            os.sched_yield()  # at once: where ranks share a core, the one that is waited for may be this core's next
            now = time.monotonic()
            if now < glance + _GLANCE:
                continue
            glance, gone = now, self._gone(rank, now - start)
            if gone and counters[rank] < count:  # it may have come, and then gone
                raise RuntimeError(f"all-gather, rank {self.rank} of {self.ranks}: rank {rank} {gone}")
            if now > start + 1:
                time.sleep(_GLANCE)

    def _gone(self, rank: int, waited: float) -> str:
        """Returns why a rank will not come; "" where it may."""
        if self._left[rank]:
            return "has left the group"
        if _ended(self._pids[rank]):
            return "has ended"
        return f"has come to no such call within {self.timeout:g} s" if waited > self.timeout else ""


def _leave(left: memoryview, rank: int, pid: int) -> None:
    if os.getpid() == pid:  # and no child of it
        left[rank] = 1


def _ended(pid: int) -> bool:
    """Returns whether a process is no more, or is only waiting for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
