"""Time and memory of calls that differ only in who does the work.

All of them take turns, so that what slows the machine down slows all of them.  Successive calls use successive sets
of inputs, together larger than the cache.  On a GPU times are those between two CUDA events, with a short wait queued
before each so that the host runs ahead; what takes under 100 us is captured in a CUDA graph of several calls and
timed a replay at a time, or its launches would be what is timed.  On a CPU they are wall-clock times of single calls.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

Name = TypeVar("Name")
Call = Callable[[int], object]  # called with the number of a set of inputs
GRAPH_BELOW = 100e-6
AHEAD = (
    400_000  # clock ticks, about 0.2 ms, for which the device waits before each sample: the host queues what follows
)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, by quantile."""

    p20: float
    p50: float
    p80: float
    how: str  # "graph", "events" or "clock"

    @property
    def spread(self) -> float:
        return self.p80 - self.p20


def quantiles(samples: list[float], how: str) -> Timing:
    fifths = statistics.quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else [samples[0]] * 4
    return Timing(fifths[0], statistics.median(samples), fifths[3], how)


def cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or 1 << 25
    except (ValueError, OSError):
        return 1 << 25


def sets_needed(one_set: int, device: torch.device) -> int:
    """How many sets of inputs of so many bytes fill the cache three times."""
    return min(max(1, -(-3 * cache_bytes(device) // max(one_set, 1))), 128 if device.type == "cuda" else 8)


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


def _graph(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """Captured on the current stream, where the forward whose backward this may be has run."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(calls):
            call(i)
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
    samplers, how, cost = {}, {}, {}
    for name, call in calls.items():
        make = (lambda call: _events(call, 1)) if gpu else _clock
        for i in range(3 if gpu else 1):  # compiles, allocates, creates handles
            call(i % sets)
        once_each = [_read(make(call)(i % sets), device) for i in range(3)]
        cost[name], samplers[name], how[name] = min(once_each), make(call), "events" if gpu else "clock"
        if gpu and cost[name] < graph_below:
            turns = max(sets, 10) if cost[name] < GRAPH_BELOW else sets
            try:
                graph = _graph(lambda i, call=call: call(i % sets), turns)
            except RuntimeError:  # something in it waits for the device, which a graph cannot
                torch.cuda.synchronize(device)
            else:
                samplers[name] = _events(lambda _, graph=graph: graph.replay(), turns)
                how[name], cost[name] = "graph", cost[name] * turns
    each = sum(cost.values()) + (3e-4 * len(calls) if gpu else 0.0)
    rounds = int(min(max(seconds / max(each, 1e-9), least), most))
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        pending = {name: sampler(i % sets) for name, sampler in samplers.items()}
        for name, read in pending.items():
            samples[name].append(_read(read, device))
    return {name: quantiles(samples[name], how[name]) for name in calls}


def _read(sample: Callable[[], float], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return sample()


def once(call: Callable[[], object], device: torch.device, seconds: float = 0.2) -> float:
    """Seconds of one call, the median."""
    return interleaved({"": lambda _: call()}, 1, device, seconds, most=50)[""].p50


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Returns the bytes that a call holds at its peak beyond those before it, its outputs included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    del kept
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
