"""What an installation is, what runs where, and whether it works: ``tpfuse.doctor()``, ``python -m tpfuse doctor``."""

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
