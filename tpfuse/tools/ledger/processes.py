"""Runs a function on real gloo processes of this machine, one thread each."""

import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ...kernels.runtime.errors import check

T = TypeVar("T")
MOST = 256  # processes: each has its own torch


def check_count(caller: str, ranks: int) -> None:
    """Raises ValueError of ``caller`` for more ranks than MOST."""
    check(ranks <= MOST, f"{caller}: there must be at most {MOST} processes on this machine, got {ranks:,}")


def on_ranks(size: int, fn: Callable[..., T], *args: Any) -> T:
    """Runs fn(*args) on every rank of a world of ``size``; returns rank 0's result.

    ``fn`` and its arguments pickle.  ValueError for more ranks than MOST.
    """
    check_count("on_ranks", size)
    with tempfile.TemporaryDirectory() as folder:
        # Ctrl-C ends this process, and daemons end with it: by themselves, ranks that wait for one another would not,
        # and those that have just begun would print where.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            ranks: Any = mp.spawn(_work, (size, folder, fn, args), nprocs=size, join=False, daemon=True)
        finally:
            signal.signal(signal.SIGINT, handler)
        while not ranks.join():
            pass
        return pickle.loads((Path(folder) / "result").read_bytes())


def _work(rank: int, size: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    result = fn(*args)
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _end_with_parent(folder: str) -> None:
    """Ends this rank, and removes the folder, when the process that made it has been killed: the signal that torch asks
    for then is SIGINT, which ranks ignore."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
