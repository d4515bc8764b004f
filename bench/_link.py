"""A link whose time is real and costs no CPU: two network namespaces joined by a veth pair with a token bucket at each
end (Linux, root).

tbf counts every byte of a frame; the burst of 256 kB is 2 ms of it at 1 Gbit/s.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

T = TypeVar("T")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class End(NamedTuple):
    """One end: its namespace (None: this process's), its interface, and the address of rank 0."""

    namespace: str | None
    interface: str
    master: str

    def join(self) -> None:
        """Moves this process into the namespace, and gloo to the interface; call it before a socket is opened."""
        if self.namespace is not None:
            with open(Path("/var/run/netns") / self.namespace) as handle:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(handle.fileno(), _NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), f"setns {self.namespace}")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


def _ip(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")


def unshaped(ranks: int) -> list[End]:
    return [End(None, "lo", "127.0.0.1")] * ranks


@contextlib.contextmanager
def namespaces() -> Iterator[list[End]]:
    """Two ends without a rate yet; removed afterwards.  OSError, with what failed, where they cannot be made."""
    names = [f"tpfuse{os.getpid()}n{i}" for i in range(2)]
    ends = [End(name, f"tpf{i}", "10.99.0.1") for i, name in enumerate(names)]
    try:
        for name in names:
            _ip("ip", "netns", "add", name)
        _ip("ip", "link", "add", "tpf0", "netns", names[0], "type", "veth", "peer", "name", "tpf1", "netns", names[1])
        for i, end in enumerate(ends):
            _ip("ip", "-n", end.namespace, "address", "add", f"10.99.0.{i + 1}/24", "dev", end.interface)
            for interface in "lo", end.interface:
                _ip("ip", "-n", end.namespace, "link", "set", interface, "up")
        yield ends
    except FileNotFoundError as error:
        raise OSError(f"{error.filename} is not installed") from error
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                _ip("ip", "netns", "delete", name)


def shape(ends: list[End], gbit: float) -> None:
    """Both directions at ``gbit`` Gbit/s."""
    for end in ends:
        bucket = "rate", f"{round(gbit * 1000)}mbit", "burst", "256kb", "latency", "100ms"
        _ip("tc", "-n", end.namespace, "qdisc", "replace", "dev", end.interface, "root", "tbf", *bucket)


def at_rates(rates: list[float], ranks: int, run: Callable[[float, list[End]], T]) -> list[T]:
    """Returns ``run(Gbit/s, the end of each rank)`` at every rate, 0 unshaped; half of the ranks are at either end.

    Where no link can be shaped, it runs once, unshaped, and says so.
    """
    with contextlib.ExitStack() as stack:
        try:
            ends = stack.enter_context(namespaces())
            shape(ends, 1.0)
        except OSError as error:
            print(f"no shaped link ({error}): unshaped", file=sys.stderr)
            return [run(0.0, unshaped(ranks))]
        halves = [ends[len(ends) * rank // ranks] for rank in range(ranks)]
        results = []
        for gbit in rates:
            if gbit:
                shape(ends, gbit)
            results.append(run(gbit, halves if gbit else unshaped(ranks)))
        return results


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def of_ranks(
    work: Callable[..., T], ends: list[End], *arguments: Any, environment: Mapping[str, str] | None = None
) -> T:
    """Returns what ``work(*arguments)`` returns on rank 0.  Every rank runs it, in a process with one thread at its own
    end, and in the default group, over gloo.  ``work`` is a module's function."""
    results = mp.get_context("spawn").SimpleQueue()
    os.environ.update(OMP_NUM_THREADS="1", **environment or {})
    mp.spawn(_rank, (work, ends, free_port(), results, arguments), nprocs=len(ends))
    answer: T = results.get()
    return answer


def _rank(rank: int, work: Callable[..., Any], ends: list[End], port: int, results: Any, arguments: Any) -> None:
    ends[rank].join()
    torch.set_num_threads(1)
    address = f"tcp://{ends[rank].master}:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(ends))
    answer = work(*arguments)
    if rank == 0:
        results.put(answer)
    dist.barrier()
    dist.destroy_process_group()
