"""All-gathers and exchanges between the ranks of one machine, through memory that they share.

gloo copies a message into the kernel and out of it, and wakes threads up: it takes two to three times as long for 3 MB,
and about eight times for 2 kB (``python -m bench.shared_memory``).  Here each rank copies what it sends once, and what
it receives once, or reads it where it lies (:mod:`.turns`).
"""

import mmap
import os
import platform
import socket
import sys
import weakref
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .messages import Channel, channel, gather
from .turns import ROOM, Bytes, Members, Turns

_ALIGNED = 64  # bytes

_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None]" = weakref.WeakKeyDictionary()


def host() -> tuple[str, int]:
    """Returns an identity of this machine: its name, and on Linux its network namespace, which a container has of its
    own."""
    namespace = "/proc/self/ns/net"
    return socket.gethostname(), os.stat(namespace).st_ino if os.path.exists(namespace) else 0


def shared_memory(group: dist.ProcessGroup | None) -> "SharedMemory | None":
    """Returns the memory that a group's ranks share, made by the first call, which is a collective; None where they are
    not on one machine, where one of them cannot have it, or where the processor is no x86."""
    if group is None:
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
        place = host(), _namespace()
        processes = gather((number, os.getpid(), place), peers)
        file, pid, _ = processes[0]
        alike = len({place for *_, place in processes}) == 1  # else the path is another process's
        mapped = _mapped(f"/proc/{pid}/fd/{file}", size) if able and alike and file is not None else None
        mapped_by = gather(mapped is not None, peers)
    finally:
        if number is not None:
            os.close(number)
    return SharedMemory(mapped, group, peers, [pid for _, pid, _ in processes]) if mapped and all(mapped_by) else None


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
    """Memory that every rank of a group has mapped: turns for messages that are copied out of it, and turns for those
    that are read where they lie."""

    def __init__(self, mapped: mmap.mmap, group: dist.ProcessGroup, peers: Channel, pids: list[int]):
        ranks, start, count = len(pids), Members.numbers_of(len(pids)), Turns.numbers_of(len(pids))
        numbers = memoryview(mapped)[: 8 * (start + 2 * count)].cast("q")
        places = np.frombuffer(mapped, np.uint8)[-4 * ranks * ROOM :].reshape(2, 2, ranks, ROOM)
        self.members = Members(numbers[:start], group, peers, pids)
        self._views, self._copies = (
            Turns(numbers[start + i * count :][:count], places[i], self.members) for i in range(2)
        )
        self._seen: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, ...]] = {}
        weakref.finalize(self, _leave, self.members.left, self.members.rank, os.getpid())

    @staticmethod
    def size_of(ranks: int) -> int:
        """Returns the bytes that so many ranks share."""
        numbers = 8 * (Members.numbers_of(ranks) + 2 * Turns.numbers_of(ranks))
        return -(-numbers // _ALIGNED) * _ALIGNED + 4 * ranks * ROOM

    def view_all(self, x: Tensor) -> Tensor:
        """All-gathers x [...] of at most ROOM bytes -> [R, ...], one of two buffers: valid until the next call begins,
        in which another rank may come to its second one already.  RuntimeError as by :meth:`all_gather`."""
        turns, members, size = self._views, self.members, x.numel() * x.element_size()
        with members:
            turns.begin([size] * members.size, 0)
            views = self._seen.get((x.shape, x.dtype))
            if views is None:
                views = self._seen[x.shape, x.dtype] = self._views_of(x)
            parts = views[turns.count % 2]
            parts[members.rank].copy_(x)
            turns.arrive()
            for rank in members.peers:
                turns.wait(rank, size, 0)
        return parts

    @torch.inference_mode(False)  # tensors that are made in it cannot be written outside
    def _views_of(self, x: Tensor) -> tuple[Tensor, ...]:
        size, shape = x.numel() * x.element_size(), (self.members.size, *x.shape)
        return tuple(places[:, :size].view(x.dtype).view(shape) for places in map(torch.from_numpy, self._views.places))

    def all_gather(self, result: Tensor, x: Tensor) -> None:
        """Gathers x [...] of every rank into ``result`` [R, ...], both contiguous.

        RuntimeError where a rank has ended, has left the group, was interrupted, has come to no such call within the
        group's limit, or is in another one; and in every call after that.  CallsDiffer on every rank where one
        compares a call over this group.
        """
        self._carry(list(_bytes(result).reshape(self.members.size, -1)), [_bytes(x)])

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Sends ``sent[r]`` to rank r and receives ``received[r]`` from it, contiguous tensors of any lengths.
        RuntimeError as by :meth:`all_gather`."""
        self._carry([_bytes(part) for part in received], [_bytes(part) for part in sent])

    def _carry(self, received: list[Bytes], sent: list[Bytes]) -> None:
        """Carries bytes from each rank to each.  A place has a slot for each of ``sent``, one for all or one a rank."""
        turns, rank, slots = self._copies, self.members.rank, len(sent)
        kind, room = int(slots > 1), ROOM // slots // _ALIGNED * _ALIGNED
        lengths = [len(sent[to % slots]) for to in range(self.members.size)]
        start, longest = 0, 1
        with self.members:
            while start < longest:
                piece = slice(start, start + room)
                places = turns.begin(lengths, kind)
                for to in range(slots):
                    if slots == 1 or to != rank:
                        outgoing = sent[to][piece]
                        places[rank, to * room :][: len(outgoing)] = outgoing
                turns.arrive()
                received[rank][piece] = sent[rank % slots][piece]
                for peer in self.members.peers:
                    turns.wait(peer, len(received[peer]), kind)
                    incoming = received[peer][piece]
                    incoming[:] = places[peer, rank % slots * room :][: len(incoming)]
                start, longest = start + room, turns.longest()


def _bytes(x: Tensor) -> Bytes:
    """Returns the memory of contiguous x."""
    return x.detach().view(-1).view(torch.uint8).numpy()


def _leave(left: memoryview, rank: int, pid: int) -> None:
    if os.getpid() == pid:  # and no child of it
        left[rank] = 1
