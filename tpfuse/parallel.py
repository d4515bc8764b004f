"""Tensor parallelism as a value: rank, size and group, passed as an argument, never global.  It pickles and
deep-copies."""

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OVERLAP = "auto", "pairwise", "off"


@dataclass(frozen=True, init=False)
class TensorParallel:
    """One tensor-parallel group as its members see it.

    ``group``: a one-dimensional DeviceMesh, a ProcessGroup, or nothing (size 1, no process group needed).
    ``sequence_parallel``: between GEMMs each rank holds 1/R of the rows (Korthikanti et al. 2022, arXiv:2205.05198);
    else all of them. ``overlap``: how messages hide behind GEMMs, never what is computed.  "off": they do not;
    "pairwise": tiles travel piece by piece while others are multiplied (gloo and NCCL groups; a ValueError
    elsewhere); "auto": pairwise where it was measured to win.

    ``one_machine``: all ranks of a gloo group are on one machine, where a message is a copy made by the cores that
    multiply, so that "auto" hides none.  For this the constructor, with overlap="auto" on a gloo group, is a
    collective: all ranks of the group call it.
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
        asked = overlap == "auto" and size > 1 and "gloo" in backend
        self.__dict__.update(  # the one place where a frozen value is written
            rank=rank,
            size=size,
            group_name=name,
            sequence_parallel=sequence_parallel,
            overlap=overlap,
            one_machine=asked and len(set(gather_objects(host(), group))) == 1,
        )

    @property
    def group(self) -> "dist.ProcessGroup | None":
        return None if self.group_name is None else resolve(self.group_name)

    @property
    def row_shards(self) -> int:
        """How many shards the rows between GEMMs are in: R under sequence parallelism, else 1."""
        return self.size if self.sequence_parallel else 1

    @property
    def row_rank(self) -> int:
        """The number of the shard that is here."""
        return self.rank if self.sequence_parallel else 0

    def divide(self, n: int, what: str) -> int:
        """n / size, or an error that says which sizes work."""
        if n % self.size:
            works = [d for d in range(1, min(n, 4 * self.size) + 1) if n % d == 0]
            raise ValueError(f"{what}={n} is not divisible by tensor-parallel size {self.size}; use {_either(works)}")
        return n // self.size

    def chunk(self, n: int, what: str = "size", copies: int = 1) -> tuple[int, int]:
        """Returns (start, stop) of this rank's slice, split as torch.chunk does.  ValueError if a rank gets nothing.

        ``copies`` ranks in a row have the same slice.
        """
        size, rank = self.size // copies, self.rank // copies
        step = -(-n // size)
        if step * (size - 1) >= n:
            raise ValueError(
                f"{what}={n} leaves a rank of tensor-parallel size {self.size} with nothing; use a smaller size"
            )
        return rank * step, min(n, (rank + 1) * step)

    def agree(self, what: str, value: Any) -> None:
        """Compares ``value`` over the ranks: the same ValueError on every rank where they differ."""
        if self.size == 1:
            return
        values = gather_objects(value, self.group)
        if any(v != values[0] for v in values):
            table = "; ".join(f"rank {r}: {v!r}" for r, v in enumerate(values))
            raise ValueError(f"{what} must be the same on every tensor-parallel rank, got {table}")

    def agree_tensor(self, what: str, x: Tensor, cause: str) -> None:
        """Compares a hash of an integer tensor over the ranks; a meta tensor has nothing to compare."""
        if self.size == 1 or x.is_meta:
            return
        words = x.detach().reshape(-1).to(torch.int64)
        weights = torch.arange(1, len(words) + 1, device=words.device) * 0x9E3779B97F4A7C1  # wraps
        # not linear in the position: a linear checksum misses +1, -2, +1
        weights = (weights ^ (weights >> 29)) * 0x3F58476D1CE4E5B
        mine = torch.stack([(words * weights).sum(), torch.tensor(hash(tuple(x.shape)), device=words.device)])
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self.group)
        if any(not torch.equal(e, every[0]) for e in every):
            raise ValueError(f"{what} must be the same on every tensor-parallel rank, and differs; {cause}")


def resolve(group_name: str) -> dist.ProcessGroup:
    """Returns the process group of this name."""
    return dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]  # torch's NewType of str


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the values of all ranks of ``group``, in rank order; each rank calls it."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def host() -> tuple[str, int]:
    """Identifies the machine that this process is on: its name, and on Linux its network, which another container does
    not share."""
    namespace = "/proc/self/ns/net"
    return socket.gethostname(), os.stat(namespace).st_ino if os.path.exists(namespace) else 0


def _either(values: list[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
