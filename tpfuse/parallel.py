"""Tensor parallelism as a value: rank, size and group, passed as an argument, never global.  It pickles and
deep-copies."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ._version import __version__
from .ranks.agreement import Header, agree
from .ranks.messages import channel, gather

OVERLAP = "auto", "pairwise", "off"


@dataclass(frozen=True, init=False)
class TensorParallel:
    """One tensor-parallel group, seen from this rank.

    ``group``: a one-dimensional DeviceMesh, a ProcessGroup, or nothing (size 1, no process group needed).
    ``sequence_parallel``: between GEMMs each rank holds 1/R of the rows (Korthikanti et al. 2022, arXiv:2205.05198);
    else all of them.  ``overlap``: hides messages behind GEMMs, and never changes the result.  "off": not; "pairwise":
    tiles travel piece by piece while others are multiplied (gloo and NCCL groups; a ValueError elsewhere); "auto":
    pairwise where it was measured to win.

    ``one_machine``: all ranks of a gloo group are on one machine, where the cores that multiply also copy messages, so
    that "auto" hides none.

    The constructor is a collective: all ranks of the group call it, with the same arguments and versions of tpfuse and
    torch, or get the same ValueError.
    """

    rank: int
    size: int
    group_name: str | None
    sequence_parallel: bool
    overlap: str
    one_machine: bool

    def __init__(
        self,
        group: "dist.ProcessGroup | dist.DeviceMesh | None" = None,
        *,
        sequence_parallel: bool = False,
        overlap: str = "auto",
    ):
        if overlap not in OVERLAP:
            raise ValueError(f"TensorParallel: overlap must be one of {', '.join(OVERLAP)}, got {overlap!r}")
        if isinstance(group, dist.DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"TensorParallel: a DeviceMesh must have one dimension, got {group}; pass mesh['tp']")
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"TensorParallel: group must be a DeviceMesh or a ProcessGroup this process is in, got {group!r}"
            )
        backend = "" if group is None else dist.get_backend_config(group)
        if overlap == "pairwise" and group is not None and "gloo" not in backend and "nccl" not in backend:
            raise ValueError(
                f"TensorParallel: overlap='pairwise' needs a gloo or NCCL group, got {backend}; use 'auto'"
            )
        rank, size, name = (0, 1, None) if group is None else (group.rank(), group.size(), group.group_name)
        messages = channel(group)
        if messages is not None:
            shared = dict(sequence_parallel=sequence_parallel, overlap=overlap, versions=versions())
            agree(group, Header("TensorParallel"), shared)
        gloo = overlap == "auto" and "gloo" in backend
        self.__dict__.update(  # the one place where a frozen value is written
            rank=rank,
            size=size,
            group_name=name,
            sequence_parallel=sequence_parallel,
            overlap=overlap,
            one_machine=gloo and messages is not None and len(set(gather(host(), messages))) == 1,
        )

    @property
    def group(self) -> "dist.ProcessGroup | None":
        return None if self.group_name is None else resolve(self.group_name)

    @property
    def row_shards(self) -> int:
        """The number of shards of the rows between GEMMs: R under sequence parallelism, else 1."""
        return self.size if self.sequence_parallel else 1

    @property
    def row_rank(self) -> int:
        """The index of this rank's shard of rows."""
        return self.rank if self.sequence_parallel else 0

    def divide(self, n: int, name: str) -> int:
        """Returns n / size; ValueError, with the sizes that work, if n is not divisible."""
        if n % self.size:
            works = [d for d in range(1, min(n, 4 * self.size) + 1) if n % d == 0]
            raise ValueError(f"{name}={n} is not divisible by tensor-parallel size {self.size}; use {_either(works)}")
        return n // self.size

    def chunk(self, n: int, name: str = "size", copies: int = 1) -> tuple[int, int]:
        """Returns (start, stop) of this rank's slice, split as by torch.chunk.  ValueError if a rank gets nothing.

        ``copies`` consecutive ranks have the same slice.
        """
        size, rank = self.size // copies, self.rank // copies
        step = -(-n // size)
        if step * (size - 1) >= n:
            raise ValueError(
                f"{name}={n} leaves a rank of tensor-parallel size {self.size} with nothing; use a smaller size"
            )
        return rank * step, min(n, (rank + 1) * step)

    def agree(self, name: str, values: Mapping[str, Any]) -> None:
        """Compares ``values`` over the ranks; if they differ, raises one ValueError with all values on every rank.

        "NAME: KEY must be the same on every tensor-parallel rank, got rank 0: ...".  Each rank calls it.
        """
        agree(self.group, Header(name), values)


def resolve(group_name: str) -> dist.ProcessGroup:
    """Returns the process group of this name."""
    return dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]  # torch's NewType of str


def versions() -> str:
    """Returns the versions that must agree for ranks to compute the same."""
    return f"tpfuse {__version__}, torch {torch.__version__}"


def host() -> tuple[str, int]:
    """Returns an identity of this machine: its name, and on Linux its network namespace, which a container has of its
    own."""
    namespace = "/proc/self/ns/net"
    return socket.gethostname(), os.stat(namespace).st_ino if os.path.exists(namespace) else 0


def _either(values: list[int]) -> str:
    *most, final = map(str, values)
    return f"{', '.join(most)} or {final}" if most else final
