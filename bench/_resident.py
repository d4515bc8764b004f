"""Resident memory of this process, as Linux counts it."""

from pathlib import Path


def resident(field: str) -> int:
    """Returns bytes: "VmRSS" is what is resident now, "VmHWM" the most so far.

    getrusage's ru_maxrss is no substitute: a process begins with its parent's, so that it tells of whoever started it.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) << 10
