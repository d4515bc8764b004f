"""The examination of an installation: ``tpfuse.doctor()``, ``python -m tpfuse doctor``.

backends     gloo, NCCL, the group's
command      python -m tpfuse doctor
compiler     Triton and its C compiler
connections  a group of the doctor's own, which a failed rank closes
devices      CPU, memory, GPUs, the folder's disk
folder       tests of the folder: writing to it, the same one on all ranks
group        versions, hosts and links of a group's ranks
launched     the group that is examined, under torchrun one for the call
limits       cores and memory that affinity and control groups leave to this process
links        delay and bandwidth by pairs of ranks, and their clocks
ops          the implementation that each op runs on
report       one finding, and all of them as text and JSON
run          the sections in order, exceptions as faults, one report of all ranks
selftest/    every op against its definition in fp64
versions     TESTED: the versions that the suite has passed with
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from .report import Report


def doctor(folder: str | Path = ".", group: dist.ProcessGroup | None = None) -> Report:
    """Examines this installation and returns a report: ``print(report.text)``, ``report.json()``, ``report.ok``.

    Versions, compiler, devices, backends, what the ranks of ``group`` share and how fast their links are, what each op
    runs on, and a self-test of every op against fp64.  ``folder`` is where disk and sharedness are looked at.

    Every rank of ``group`` calls it and gets the same report.  Without one it is torch's world, where there is one;
    under torchrun the world is made for the call.  Whatever goes wrong is a fault in the report.  ValueError for a
    ``group`` that this process is not in.
    """
    from .launched import world
    from .run import examine

    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"doctor: group must be a ProcessGroup that this process is in, got {group!r}")
    with world(group) as ranks:
        return examine(folder, ranks)


__all__ = ["doctor"]
