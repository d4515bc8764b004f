"""The time of each kernel that an op starts, at its first shape: which are the longest is what ncu looks at."""

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from bench.gpu_day import cases
from bench.gpu_day.part import Context
from tpfuse.kernels import replay
from tpfuse.kernels.runtime import launch
from tpfuse.tools.bench.definition import DTYPES, Random, discover
from tpfuse.tools.bench.measure import AHEAD
from tpfuse.tools.bench.run import calls

TURNS = 5


@contextlib.contextmanager
def timed() -> Iterator[dict[str, list[float]]]:
    """Yields {kernel: milliseconds of each launch}, full after the block.  Launchers run every time, and the device is
    waited for after each launch; it waits before, or the host's time for the launch would be what is timed."""
    times: dict[str, list[float]] = defaultdict(list)
    start = launch._start

    def watched(kernel, grid, device, **call):
        if device.type != "cuda":
            began = time.perf_counter()
            compiled = start(kernel, grid, device, **call)
            times[kernel.fn.__name__].append(1e3 * (time.perf_counter() - began))
            return compiled
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        begin.record()
        compiled = start(kernel, grid, device, **call)
        end.record()
        end.synchronize()
        times[kernel.fn.__name__].append(begin.elapsed_time(end))
        return compiled

    with mock.patch.object(launch, "_start", watched), mock.patch.object(replay, "REPLAY", False):
        yield times


def call_of(name: str, mode: str, context: Context) -> Callable[[], object]:
    """One forward or backward of a case, dropout on."""
    bench, shape = cases.case(name)
    sets = [bench.inputs(Random(DTYPES["bf16"], context.device, 0), *shape)]
    call = calls(bench.providers["tpfuse"], sets, bench.p, mode, Random(torch.bfloat16, context.device, 1))
    return lambda: call(0)


def jobs(context: Context) -> list[str]:
    return [cases.name_of(*case) for case in cases.in_turn(tuple(discover()), context.tiny)[: len(discover())]]


def run(job: str, context: Context) -> None:
    bench, _ = cases.case(job)
    for mode in (mode for mode in ("fwd", "bwd") if mode in bench.modes):
        call = call_of(job, mode, context)
        call()
        with timed() as times:
            for _ in range(1 if context.tiny else TURNS):
                call()
        for kernel, ms in times.items():
            context.emit(dict(case=job, mode=mode, kernel=kernel, us=1e3 * statistics.median(ms), launches=len(ms)))


def longest(rows: list[dict], most: int = 5) -> list[dict]:
    """One row for each kernel, where it takes longest."""
    by_time = sorted((row for row in rows if "us" in row), key=lambda row: -row["us"])
    by_name = {row["kernel"]: row for row in reversed(by_time)}
    return sorted(by_name.values(), key=lambda row: -row["us"])[:most]


def headline(rows: list[dict]) -> str:
    return ", ".join(f"{row['kernel']} {row['us']:.0f} us" for row in longest(rows, 3))
