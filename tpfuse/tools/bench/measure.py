"""Time and memory of calls that differ only in who does the work.

All of them take turns, so that what slows the machine down slows all of them.  Successive calls use successive sets
of inputs, together larger than the cache.  On a GPU times are those between two CUDA events, with a short wait queued
before each so that the host runs ahead; what takes under 100 us is captured in a CUDA graph of several calls and
timed a replay at a time, or its launches would be what is timed.  On a CPU they are wall-clock times of single calls.
"""

import contextlib
import functools
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import autograd

Name = TypeVar("Name")
Call = Callable[[int], object]  # called with the number of a set of inputs
GRAPH_BELOW = 100e-6
# clock ticks, about 0.2 ms, for which the device waits before each sample: the host queues what follows
AHEAD = 400_000
FILL, MOST_SETS = 3, 128  # sets of inputs fill the cache so often, but there are no more of them
CPUS, CACHE = pathlib.Path("/sys/devices/system/cpu"), ("level", "size", "shared_cpu_list")


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, by quantile."""

    p20: float
    p50: float
    p80: float
    method: str  # "graph", "events" or "clock"
    samples: tuple[float, ...] = ()

    @property
    def spread(self) -> float:
        """Seconds between the outer quantiles."""
        return self.p80 - self.p20


def quantiles(samples: list[float], method: str) -> Timing:
    """Returns the Timing of samples in seconds."""
    fifths = statistics.quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else [samples[0]] * 4
    return Timing(fifths[0], statistics.median(samples), fifths[3], method, samples=tuple(samples))


def speedup(baseline: Timing, timing: Timing) -> Timing:
    """Returns how many times as fast as ``baseline`` a call is, turn by turn, which what slows both does not change."""
    ratios = [a / b for a, b in zip(baseline.samples, timing.samples, strict=True)]
    return quantiles(ratios, timing.method)


def cache_bytes(device: torch.device) -> int:
    """Returns the size of the last cache before memory: a GPU's L2; on a CPU the sum over this process's cores."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _linux_cache() or _posix_cache() or 1 << 25


def _linux_cache() -> int:
    """Returns the bytes of every last-level cache that this process's cores reach; 0 where nothing tells."""
    shared: dict[str, int] = {}  # the cores that share a cache -> its bytes
    for core in getattr(os, "sched_getaffinity", lambda _: ())(0):
        levels: dict[int, tuple[str, int]] = {}
        for entry in CPUS.glob(f"cpu{core}/cache/index*"):
            with contextlib.suppress(OSError, ValueError):  # a virtual machine may leave a file out
                level, size, cores = ((entry / name).read_text().strip() for name in CACHE)
                levels[int(level)] = cores, int(size.removesuffix("K")) << 10
        shared.update([levels[max(levels)]] if levels else [])
    return sum(shared.values())


def _posix_cache() -> int:
    """Returns what the C library says of L3; 0 where it says nothing."""
    try:
        return max(os.sysconf("SC_LEVEL3_CACHE_SIZE"), 0)
    except (AttributeError, ValueError, OSError):
        return 0


def fills_cache(total: int, device: torch.device) -> bool:
    """Returns True where calls that read so many bytes in turn find few of them in the cache."""
    return total >= FILL * cache_bytes(device)


def sets_needed(one_set: int, device: torch.device) -> int:
    """Returns how many sets of inputs of so many bytes fill the cache three times; MOST_SETS where that is too few."""
    return min(max(1, -(-FILL * cache_bytes(device) // max(one_set, 1))), MOST_SETS)


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """A context in which to make inputs and measure calls, on a stream that is not the default one.

    A backward is captured on the stream its forward ran on, never on the default one.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize(device)


# ---- samplers: each takes one sample of the seconds of one call ----


def _clock(call: Call) -> Callable[[int], Callable[[], float]]:
    def sample(i: int) -> Callable[[], float]:
        start = time.perf_counter()
        call(i)
        seconds = time.perf_counter() - start
        return lambda: seconds

    return sample


def _events(run: Call, calls: int) -> Callable[[int], Callable[[], float]]:
    """``run(i)`` makes so many calls; their time is read later, when the device has got there."""

    def sample(i: int) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        start.record()
        run(i)
        end.record()
        return lambda: start.elapsed_time(end) * 1e-3 / calls

    return sample


def _replayed(graph: torch.cuda.CUDAGraph) -> Call:
    return lambda _: graph.replay()


def _graph(call: Call, calls: int, sets: int) -> torch.cuda.CUDAGraph:
    """Captured on the current stream, where the forward whose backward this may be has run."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(calls):
            call(i % sets)
    return graph


# ---- public ----


def interleaved(
    calls: dict[Name, Call],
    sets: int,
    device: torch.device,
    seconds: float,
    *,
    least: int = 10,
    most: int = 1000,
    graph_below: float = GRAPH_BELOW,
) -> dict[Name, Timing]:
    """Times every call for about ``seconds`` altogether; ``least`` to ``most`` samples of each.  A call of less than
    ``graph_below`` seconds goes into a graph."""
    gpu = device.type == "cuda"
    samplers, methods, cost = {}, {}, {}
    for name, call in calls.items():
        make = functools.partial(_events, calls=1) if gpu else _clock
        for i in range(3 if gpu else 1):  # compiles, allocates, creates handles
            call(i % sets)
        once_each = [_read(make(call)(i % sets), device) for i in range(3)]
        cost[name], samplers[name], methods[name] = min(once_each), make(call), "events" if gpu else "clock"
        if gpu and cost[name] < graph_below:
            turns = max(sets, 10) if cost[name] < GRAPH_BELOW else sets
            try:
                graph = _graph(call, turns, sets)
            except RuntimeError:  # something in it waits for the device, which a graph cannot
                torch.cuda.synchronize(device)
            else:
                samplers[name] = _events(_replayed(graph), turns)
                methods[name], cost[name] = "graph", cost[name] * turns
    turn = sum(cost.values()) + (3e-4 * len(calls) if gpu else 0.0)
    rounds = int(min(max(seconds / max(turn, 1e-9), least), most))
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        pending = {name: sampler(i % sets) for name, sampler in samplers.items()}
        for name, read in pending.items():
            samples[name].append(_read(read, device))
    return {name: quantiles(samples[name], methods[name]) for name in calls}


def _read(sample: Callable[[], float], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return sample()


def once(call: Callable[[], object], device: torch.device, seconds: float = 0.2) -> float:
    """Returns the seconds of one call, the median."""
    return interleaved({"": lambda _: call()}, 1, device, seconds, most=50)[""].p50


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Returns the bytes that a call holds at its peak beyond those before it, its outputs included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        allocated = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - allocated
    result, events = _profiled(call)
    del result
    held = peak = 0
    for event in events:
        if event.kind() == "memory_alloc":  # negative where memory is freed
            held += event.cpu_memory_usage()
            peak = max(peak, held)
    return peak


def _profiled(call: Callable[[], object]) -> tuple[object, list[Any]]:
    """Returns a call's result, and the events that PyTorch's older profiler recorded.

    Its older one, because the newer one prints two lines about itself each time.
    """
    experimental = torch._C._profiler._ExperimentalConfig()
    flags = False, True, False, False, False  # the second: memory
    config = autograd.ProfilerConfig(autograd.ProfilerState.CPU, *flags, experimental)
    autograd._enable_profiler_legacy(config)
    try:
        result = call()
    finally:
        events = [event for thread in autograd._disable_profiler_legacy() for event in thread]
    return result, events
