"""The doctor itself: its sections in order, exceptions as faults, one report of all ranks."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...ranks.messages import channel, gather
from . import backends, compiler, devices, ops, versions
from . import group as group_section
from .connections import device_of
from .report import FAULT, OK, Finding, Report
from .selftest import block, kernels

Section = Callable[[], list[Finding]]


def examine(folder: str | Path, group: dist.ProcessGroup | None) -> Report:
    """Returns the report, the same on every rank.  Each rank of ``group`` calls it."""
    path, device = Path(folder), device_of(group)
    meeting, ranks = met(group)
    sections: dict[str, Section] = {
        "versions": versions.findings,
        "compiler": compiler.findings,
        "devices": lambda: devices.findings(path),
        "backends": lambda: backends.findings(group),
        "group": lambda: [*meeting, *group_section.findings(path, ranks)],
        f"ops on {device.type}": lambda: ops.findings(device),
        f"self-test on {device.type}": lambda: [*kernels.results(device), *block.alone(device)],
        "self-test over the group": lambda: block.over(ranks),
    }
    with undisturbed():
        results = {title: guarded(section) for title, section in sections.items()}
    return Report(results if ranks is None else merged(results, ranks))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keeps the caller's modes and default device out, and torch's generator, whose seed blocks ask for, as it was."""
    modes: list[contextlib.AbstractContextManager[Any]] = [
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.random.fork_rng(devices=[]),
    ]
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        torch.default_generator.manual_seed(0)
        yield


def met(group: dist.ProcessGroup | None) -> tuple[list[Finding], dist.ProcessGroup | None]:
    """Returns the group whose ranks have all come, and None where there is one rank, or where one does not come."""
    try:
        return [], group if channel(group) is not None else None
    except Exception as error:
        return [Finding("ranks", f"{error}", FAULT, "Call the doctor on every rank, and see why one has ended.")], None


def guarded(section: Section) -> list[Finding]:
    """Returns a section's findings; an exception is a fault of it, and stops no other."""
    try:
        return section()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        return [Finding("not finished", message, FAULT, "Mend what this message says, then run the doctor again.")]


def merged(results: dict[str, list[Finding]], group: dist.ProcessGroup) -> dict[str, list[Finding]]:
    """Returns rank 0's findings, and those of the other ranks that are not ok and that rank 0 does not have."""

    def merge() -> list[Finding]:
        merged, *peers = gather(results, channel(group))
        for rank, peer in enumerate(peers, 1):
            for title, lines in merged.items():
                new = [f for f in peer[title] if f.status != OK and f not in lines]
                lines += [f._replace(name=f"rank {rank}: {f.name}") for f in new]
        results.update(merged)
        return []

    return results | {"report": guarded(merge)}
