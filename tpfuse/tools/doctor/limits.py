"""The share of the machine that this process may use: cores by affinity and quota, memory by the control group."""

import os
from pathlib import Path

CGROUP, PROC = Path("/sys/fs/cgroup"), Path("/proc")


def cores() -> float:
    """Returns how many cores this process may use: those of its affinity, or its control group's quota if less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else min(cores, quota)


def memory() -> tuple[int | None, int | None]:
    """Returns the machine's free bytes, and those that the control group still allows; None where nobody says."""
    lines = dict(line.split(":", 1) for line in _read(PROC / "meminfo").splitlines() if ":" in line)
    free = lines.get("MemAvailable")
    return None if free is None else int(free.split()[0]) * 1024, _allowed()


def _allowed() -> int | None:
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for folder in _folders("memory"):
            most, now = _read(folder / limit), _read(folder / used)
            if most.isdigit() and now.isdigit() and int(most) < 1 << 60:  # version 1 says "no limit" by a huge number
                return max(int(most) - int(now), 0)
    return None


def _quota() -> float | None:
    for folder in _folders("cpu"):
        most, _, period = _read(folder / "cpu.max").partition(" ")
        if most.isdigit():
            return int(most) / int(period)
        most, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if most.isdigit() and period.isdigit():
            return int(most) / int(period)
    return None


def _folders(controller: str) -> list[Path]:
    """Returns this process's control group, and the root, which is the container's own where it sees no other; in both
    versions' places."""
    paths = {line.split(":", 2)[2].lstrip("/") for line in _read(PROC / "self/cgroup").splitlines() if ":" in line}
    return [root / path for root in (CGROUP, CGROUP / controller) for path in (*sorted(paths - {""}), "")]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
