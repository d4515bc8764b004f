"""Times and memory of calls that take turns, and the size of the cache.  No test depends on how long anything takes."""

from types import SimpleNamespace

import pytest
import torch

import tpfuse.tools.bench.measure as timing
from tests.tools.bench.common import CPU
from tpfuse.tools.bench.measure import interleaved, peak_bytes, quantiles, sets_needed, speedup


def test_providers_take_turns_and_sets_rotate():
    seen = []
    timings = interleaved({name: lambda i, name=name: seen.append((name, i)) for name in "ab"}, 3, CPU, 0.0, least=4)
    assert seen[-8:] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 0), ("b", 0)]
    assert all(t.p20 <= t.p50 <= t.p80 and t.method == "clock" for t in timings.values())


def test_quantiles():
    timing = quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 6.0], "clock")
    assert (timing.p20, timing.p50, timing.p80, timing.spread) == (2.0, 3.5, 5.0, 3.0)
    assert quantiles([2.0], "clock").p80 == 2.0


def test_a_speed_up_is_measured_turn_by_turn():
    """What slows both calls of a turn changes neither it nor its spread."""
    baseline, call = quantiles([2.0, 20.0, 4.0, 2.0], "clock"), quantiles([1.0, 10.0, 2.0, 1.0], "clock")
    faster = speedup(baseline, call)
    assert (faster.p20, faster.p50, faster.p80) == (2.0, 2.0, 2.0) and baseline.spread > 0


def test_small_inputs_rotate_and_large_ones_need_not():
    assert sets_needed(1 << 10, CPU) > 1 and sets_needed(1 << 40, CPU) == 1


def test_peak_memory_on_a_cpu():
    x = torch.ones(1 << 18)  # 1 MiB
    assert 2 << 20 <= peak_bytes(lambda: (x + 1) * 2, CPU) < 3 << 20
    assert peak_bytes(lambda: None, CPU) == 0


def test_counting_memory_on_a_cpu_prints_nothing(capfd):
    peak_bytes(lambda: torch.ones(8) + 1, CPU)
    assert capfd.readouterr() == ("", "")


PROFILER = "_enable_profiler_legacy", "_disable_profiler_legacy", "ProfilerConfig", "ProfilerState"


@pytest.mark.parametrize("name", PROFILER)
def test_torch_has_the_profiler_that_counts_memory(name):
    assert hasattr(torch.autograd, name) and hasattr(torch._C._profiler, "_ExperimentalConfig")


def test_the_cache_of_a_cpu_is_every_last_level_that_its_cores_reach(monkeypatch, tmp_path):
    for core, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        for index, (level, size, cores) in enumerate([(1, 32, core), (3, 32768, shared), (2, 1024, core)]):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in dict(level=level, size=f"{size}K", shared_cpu_list=cores).items():
                (folder / name).write_text(f"{text}\n")
    (tmp_path / "cpu3" / "cache" / "index1" / "size").unlink()  # its last level is unknown: L2 counts
    monkeypatch.setattr(timing, "CPUS", tmp_path)
    for cores, mib in (({0}, 32), ({0, 1}, 32), ({1, 2}, 64), ({3}, 1)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores, raising=False)
        assert timing.cache_bytes(CPU) == mib << 20
    monkeypatch.setattr(timing, "CPUS", tmp_path / "nowhere")
    monkeypatch.setattr("os.sysconf", lambda _: 1 << 24, raising=False)
    assert timing.cache_bytes(CPU) == 1 << 24
    monkeypatch.setattr("os.sysconf", lambda _: 0, raising=False)
    assert timing.cache_bytes(CPU) == 1 << 25


# ---- what only a GPU runs, on a pretended one ----


class Device:
    """Stands in for torch.cuda: a clock that calls move, and the order of what was asked."""

    def __init__(self, monkeypatch, can_capture=True):
        self.now, self.log, self.capturing, self.can_capture = 0.0, [], False, can_capture
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        class Graph:
            def replay(self):
                device.now += self.seconds

        class Capture:
            def __init__(self, graph, stream):
                self.graph = graph

            def __enter__(self):
                device.capturing, self.start = True, device.now

            def __exit__(self, *error):
                device.capturing, self.graph.seconds = False, device.now - self.start
                device.now = self.start

        fakes = dict(
            Event=Event, CUDAGraph=Graph, graph=Capture, synchronize=lambda *_: None, current_stream=lambda: None
        )
        fakes |= dict(
            _sleep=lambda ticks: self.log.append("wait"),
            get_device_properties=lambda _: SimpleNamespace(L2_cache_size=1 << 20),
        )
        for name, fake in fakes.items():
            monkeypatch.setattr(f"torch.cuda.{name}", fake)

    def call(self, name, seconds):
        def run(i):
            if self.capturing and not self.can_capture:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.log.append((name, i, self.capturing))
            self.now += seconds

        return run


CUDA = torch.device("cuda")


def test_short_calls_are_timed_as_graphs_of_all_sets_and_long_ones_between_events(monkeypatch):
    device = Device(monkeypatch)
    timings = interleaved(dict(short=device.call("short", 10e-6), long=device.call("long", 1e-3)), 12, CUDA, 0.01)
    assert (timings["short"].method, timings["long"].method) == ("graph", "events")
    assert timings["short"].p50 == pytest.approx(10e-6) and timings["long"].p50 == pytest.approx(1e-3)
    assert [entry[1] for entry in device.log if entry[0] == "short" and entry[2]] == list(range(12))


def test_what_cannot_be_captured_is_timed_between_events(monkeypatch):
    device = Device(monkeypatch, can_capture=False)
    timings = interleaved(dict(short=device.call("short", 10e-6)), 2, CUDA, 0.01)
    assert timings["short"].method == "events" and timings["short"].p50 == pytest.approx(10e-6)


def test_a_long_call_goes_into_a_graph_where_that_is_asked(monkeypatch):
    device = Device(monkeypatch)
    timings = interleaved(dict(long=device.call("long", 1e-3)), 1, CUDA, 0.01, graph_below=float("inf"))
    assert timings["long"].method == "graph" and timings["long"].p50 == pytest.approx(1e-3)


def test_sets_fill_a_gpus_cache_three_times(monkeypatch):
    Device(monkeypatch)
    assert sets_needed(1 << 18, CUDA) == 12 and sets_needed(1 << 30, CUDA) == 1 and sets_needed(16, CUDA) == 128
