"""One pool of gloo worker processes for the whole test session: forming a group costs milliseconds.

``Pool()(size, fn, *args)`` calls ``fn(world, *args)`` on ranks 0 .. size-1 and returns their results in rank order.
The default process group has exactly ``size`` ranks, as it has under torchrun, and is formed anew only when the size
changes, a call has failed, or calls have left many groups: a thread of each wakes a hundred times a second, so that
100 of them take an eighth of a core in each worker. Everything travels as plain pickles through pipes, so tensors go by
value, bit for bit.

Workers are forked (tests/forking.py). A pool belongs to the process that made it: under pytest-xdist each test process
has its own, on a port that the operating system chooses.
"""

import faulthandler
import functools
import math
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.forking import forking

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
MOST_GROUPS = 16  # after a call, that the next one still runs beside
GRACE = 10.0  # after one rank has failed, seconds for the others to notice


@dataclass(frozen=True)
class World:
    """What a function run by the pool is given first."""

    rank: int
    size: int

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    def mesh(self, dp: int, tp: int) -> DeviceMesh:
        """The mesh ("dp", "tp") over this world, tp innermost; made once a world. A collective call: every rank makes
        the same one."""
        if dp * tp != self.size:
            raise ValueError(f"mesh: dp={dp} x tp={tp} is not the world's size {self.size}")
        return _mesh(dp=dp, tp=tp)

    def pieces(self, dp: int, cp: int, tp: int) -> DeviceMesh:
        """As :meth:`mesh`, ("dp", "cp", "tp")."""
        if dp * cp * tp != self.size:
            raise ValueError(f"pieces: dp={dp} x cp={cp} x tp={tp} is not the world's size {self.size}")
        return _mesh(dp=dp, cp=cp, tp=tp)

    def stages(self, pp: int, dp: int, *inner: int) -> DeviceMesh:
        """As :meth:`mesh`, ("pp", "dp", "tp"), or of four sizes ("pp", "dp", "cp", "tp")."""
        sizes = dict(pp=pp, dp=dp) | dict(zip(("cp", "tp")[-len(inner) :], inner, strict=True))
        if math.prod(sizes.values()) != self.size:
            raise ValueError(f"stages: {sizes} are not the world's size {self.size}")
        return _mesh(**sizes)


@functools.cache
def _mesh(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


class RankFailed(RuntimeError):
    """A worker died, hung, or raised what cannot be pickled."""


class Remote(Exception):
    """The cause attached to an exception re-raised from a worker: every failed rank's own traceback, as text."""


Failure = tuple[int, BaseException, str]  # rank, exception, its traceback as text


# ---- in the worker


def _leave_group() -> None:
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imports triton

    _mesh.cache_clear()
    _clear_sharding_prop_cache()  # DTensor's, which would give meshes of groups that are gone
    if dist.is_initialized():
        dist.destroy_process_group()


def _work(conn: Connection, rank: int, port: int, stack_path: str, timeout: timedelta) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the session's; it ends the workers
    faulthandler.enable()  # a crash says where, on stderr
    faulthandler.register(signal.SIGUSR1, open(stack_path, "w"))  # and a hang, when asked
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: workers run the references
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    joined = None
    while True:
        try:
            task = conn.recv_bytes()
        except EOFError:
            return
        try:
            world_id, size, fn, args = pickle.loads(task)
            if joined != world_id:
                _leave_group()
                prefixed = dist.PrefixStore(f"world{world_id}", store)
                dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=timeout)
                joined = world_id
            for seed in random.seed, np.random.seed, torch.manual_seed:  # no call depends on what ran before it
                seed(0)
            result = fn(World(rank, size), *args)
            reply = pickle.dumps((True, result, len(dist.distributed_c10d._world.pg_map)))
            del result
        except BaseException as error:  # pytest's own outcomes are BaseExceptions
            reply = _failure(error)
            traceback.clear_frames(error.__traceback__)
            del error
            _leave_group()  # peers waiting for this rank fail now rather than at the timeout
            joined = None
        conn.send_bytes(reply)


def _failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        reply = pickle.dumps((False, (error, text), 0))
        pickle.loads(reply)  # some exceptions pickle but do not come back
        return reply
    except Exception:
        return pickle.dumps((False, (RankFailed(f"{type(error).__name__}: {error}"), text), 0))


# ---- in the test session


def _is_secondary(error: BaseException) -> bool:
    """Whether this says no more than that a peer went away."""
    words = ("connection", "closed by peer", "timed out", "timeout", "gloo")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


class Pool:
    def __init__(self, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
        """``timeout``: in which a collective call must have ended."""
        self._context, self._timeout = forking(), timeout
        self._store: dist.TCPStore | None = None
        self._workers: list[tuple[Any, Connection]] = []
        self._world_id, self._size, self._groups = 0, None, 0
        self._dir = tempfile.TemporaryDirectory()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._workers]

    def __call__(self, size: int, fn: Callable, *args: Any, timeout: float = 120.0) -> list[Any]:
        """``[fn(World(rank, size), *args) for rank in range(size)]``, each in its own process.

        ``fn`` is a module-level function; arguments and results pickle. An exception comes back as itself, the failed
        ranks' tracebacks as its cause. A worker that dies, or is not done after ``timeout`` seconds, is a RankFailed;
        the next call starts new workers.
        """
        self._start(size)
        if self._size != size or self._groups > MOST_GROUPS:
            self._world_id, self._size, self._groups = self._world_id + 1, size, 0
        task = pickle.dumps((self._world_id, size, fn, args))
        try:
            for _, conn in self._workers[:size]:
                conn.send_bytes(task)
            results, failures, lost = self._gather(size, time.monotonic() + timeout)
        except BaseException:  # Ctrl-C, or a dead pipe: what the workers are doing now is unknown
            self.close()
            raise
        if lost:
            self.close()
        if failures:
            self._size = None  # those who failed have left the group
            raise _primary(failures)
        return [results[rank] for rank in range(size)]

    def _stack_path(self, rank: int) -> str:
        return os.path.join(self._dir.name, str(rank))

    def _start(self, size: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if any(not process.is_alive() for process, _ in self._workers):
            self.close()
        for rank in range(len(self._workers), size):
            ours, workers_end = self._context.Pipe()
            process = self._context.Process(
                target=_work,
                args=(workers_end, rank, self._store.port, self._stack_path(rank), self._timeout),
                daemon=True,
            )
            process.start()
            workers_end.close()
            self._workers.append((process, ours))

    def _gather(self, size: int, deadline: float) -> tuple[dict[int, Any], list[Failure], bool]:
        """Results by rank, failures in the order they came, and whether a worker was lost."""
        waiting = {conn: rank for rank, (_, conn) in enumerate(self._workers[:size])}
        results, failures, lost = {}, [], False
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                return results, failures + [self._hung(rank) for rank in waiting.values()], True
            for conn in ready:
                rank = waiting.pop(conn)
                try:
                    ok, value, groups = pickle.loads(conn.recv_bytes())
                    self._groups = max(self._groups, groups)
                except (EOFError, ConnectionError):
                    process = self._workers[rank][0]
                    process.join(GRACE)
                    died = RankFailed(f"rank {rank} died (exit code {process.exitcode})")
                    lost, ok, value = True, False, (died, str(died))
                if ok:
                    results[rank] = value
                else:
                    failures.append((rank, *value))
                    deadline = min(deadline, time.monotonic() + GRACE)
        return results, failures, lost

    def _hung(self, rank: int) -> Failure:
        os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.2)  # to write its stack before it is killed
        stack = open(self._stack_path(rank)).read()
        return rank, RankFailed(f"rank {rank} was not done in time"), stack

    def close(self) -> None:
        for process, conn in self._workers:
            process.kill()
            process.join()
            conn.close()
        self._workers, self._size = [], None


def _primary(failures: list[Failure]) -> BaseException:
    """The exception to raise: the first that is a cause rather than its echo on another rank."""
    failures = sorted(failures, key=lambda failure: _is_secondary(failure[1]))
    error = failures[0][1]
    error.__cause__ = Remote("\n" + "\n".join(f"rank {rank}: {text}" for rank, _, text in failures))
    return error
