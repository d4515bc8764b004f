"""Launch parameters of the fused norm's kernels: without spills on sm_90; a measured table may replace them.

ROWS and A (and B beside it) are the rows and columns of a tile.  The dicts are cached: no one may change one.
"""

import functools

from ..runtime.launch import next_power_of_2

BWD_ROWS = dict(A=4096, num_warps=8)
BWD_COLUMNS = dict(ROWS=1, A=2048, ONCE=False, EARLY=False, num_warps=8)
ONCE_ROW = 16384  # columns up to which two vector gradients of a row lie in registers


def tiles(D: int) -> tuple[int, int]:
    """Returns powers of two A >= B (or B = 0) with A + B >= D, least in sum, A at most 8192: 768 -> 512 + 256, 1000 ->
    1024 + 0."""
    full = next_power_of_2(D)
    half = full // 2
    remainder = next_power_of_2(D - half) if D > half else 0
    return (half, remainder) if half >= 128 and 0 < remainder < half or full > 8192 else (full, 0)


def warps(elements: int, per_thread: int, least: int = 1) -> int:
    """Returns the number of warps, a power of two between ``least`` and 16, so that a thread has ``each`` elements or a
    few more."""
    return min(max(next_power_of_2(elements // (32 * per_thread) + 1) // 2, least), 16)


@functools.cache
def fwd_config(D: int) -> dict[str, int]:
    """D <= FWD_ROW: rows in registers"""
    A, B = tiles(D)
    rows = max(1, 1024 // next_power_of_2(A + B))
    return dict(ROWS=rows, A=A, B=B, num_warps=warps(rows * (A + B), 32))


@functools.cache
def fwd_chunks_config(D: int, arch: str) -> dict[str, int]:
    config = dict(A=min(max(D & -D, 2048), 4096), num_warps=8)  # a chunk that divides D, if there is one
    if arch.startswith("sm_"):
        config["maxnreg"] = 128  # otherwise the assembler aims at 80 registers and spills
    return config


@functools.cache
def apply_config(D: int) -> dict[str, int]:
    chunk = min(D & -D, 2048) if D % 256 == 0 else min(next_power_of_2(D), 1024)
    return dict(ROWS=max(4096 // chunk, 1), A=chunk, num_warps=4)


@functools.cache
def bwd_config(D: int, arch: str, R: int = 1) -> dict[str, int]:
    """For D <= BWD_ROW: rows in registers, about 16 elements a thread.  128 registers keep two programs of 8 warps on a
    multiprocessor.  For rows of two tiles summed over ranks ptxas takes 168 or 244 on sm_90, where it is left alone,
    and which depends on such things as the order of a kernel's parameters."""
    A, B = tiles(D)
    rows = max(1, 4096 // next_power_of_2(A + B))
    config = dict(ROWS=rows, A=A, B=B, STAGES=1, EARLY=False, LAST=False, num_warps=min(2 * warps(rows * A, 32), 16))
    if arch.startswith("sm_") and D >= 1024 and A == D:
        config["maxnreg"] = 128  # other widths would spill
    elif arch == "sm_90" and D > 2048 and R > 1:
        config["maxnreg"] = 168
    return config


@functools.cache
def once_config(D: int, arch: str) -> dict[str, int]:
    """For D <= ONCE_ROW: a row is four tiles, and 1024 threads of 64 registers, on sm_90, are all of a
    multiprocessor's."""
    A = next_power_of_2(-(-D // 4))
    return dict(A=A, num_warps=32, maxnreg=64) if arch.startswith("sm_") else dict(A=A, num_warps=16)
