"""What is counted, timed and compared is what the harness says it is.  No test depends on how long anything takes."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import tpfuse.tools.bench.measure as timing
from tpfuse.kernels.norm.records import ALONE, Add, Norm, Saved, Wanted
from tpfuse.kernels.norm.triton_backward import BWD_ROW
from tpfuse.kernels.norm.verbs import NORM
from tpfuse.kernels.runtime.op import Cost
from tpfuse.kernels.runtime.philox import Mask
from tpfuse.tools.bench import output
from tpfuse.tools.bench.count import Call, Counted, Kernel, _Watched, count
from tpfuse.tools.bench.definition import Bench, Random, discover, load
from tpfuse.tools.bench.measure import interleaved, peak_bytes, quantiles, sets_needed
from tpfuse.tools.bench.roofline import Card, measure_card
from tpfuse.tools.bench.run import COLUMNS, Case, Errors, Setting, available, bound, calls, measure, speed

CPU = torch.device("cpu")
CARD = Card("a card", 1000.0, {"bf16": 100.0, "fp32": 10.0})
LAYER_NORM = load("layer_norm")
HERE = Setting(CARD, CPU, 0.0)


def random(seed=0, dtype=torch.float32):
    return Random(dtype, CPU, seed)


# ---- counting ----


def test_counted_bytes_are_the_declared_costs():
    x, weight, bias = LAYER_NORM.inputs(random(), 8, 16)
    with count() as counted:
        y = LAYER_NORM.providers["tpfuse"](x, weight, bias)
        torch.autograd.grad(y, [x, weight, bias], torch.ones_like(y))
    args = x[None], Add(), Norm(weight, bias, 1e-5), Mask(), ALONE
    made = NORM.fwd(*args)
    saved, wanted = Saved(x, made[2], made[3], weight, "layer"), Wanted(None, True, None, x.dtype)
    back = torch.ones(1, 8, 16), None, saved, Mask(), ALONE, wanted
    costs = NORM.fwd.cost(args, made), NORM.bwd.cost(back, NORM.bwd(*back))
    assert [call.op for call in counted.calls] == ["norm_fwd", "norm_bwd"]
    assert counted.bytes == sum(cost.read + cost.written for cost in costs) > 0
    assert counted.flops == sum(cost.flops for cost in costs)


def test_the_roofline_counts_the_least_bytes():
    """The backward of a wide row reads it twice, as declared: no useful work."""
    M, D = 2, 2 * BWD_ROW
    x, weight, bias = LAYER_NORM.inputs(random(dtype=torch.bfloat16), M, D)
    y = LAYER_NORM.providers["tpfuse"](x, weight, bias)
    with count() as counted:
        torch.autograd.grad(y, [x, weight, bias], torch.ones_like(y))
    rows, vectors, statistics = 2 * M * D, 2 * D, 4 * M
    assert counted.least == 3 * rows + 3 * vectors + 2 * statistics < counted.bytes - rows
    assert speed(counted, "bf16", 1.0, CARD)["bytes"] == counted.least


def test_a_table_is_not_read_whole():
    bench = load("embedding")
    weight, ids = bench.inputs(random(), 1000, 4, 8)
    with count() as counted:
        bench.providers["tpfuse"](weight, ids)
    assert counted.least == 8 * 4 + 2 * (4 * 4 * 8)


def test_what_is_not_ours_counts_nothing():
    with count() as counted:
        torch.ones(4).softmax(0)
    assert counted.calls == [] and counted.bytes == 0 and counted.path == "" and counted.largest("registers") is None


def test_a_launch_leaves_its_registers():
    def _some_kernel(): ...

    class Compiled:
        fn = _some_kernel

        def __getitem__(self, grid):
            return lambda *args, **config: SimpleNamespace(n_regs=args[0], n_spills=2)

    launched: list[Kernel] = []
    watched = _Watched(Compiled(), launched)
    assert watched[(1,)](128, num_warps=4).n_regs == 128
    watched[(1,)](96)
    counted = Counted([Call("norm_fwd", Cost(1, 1), launched, "cuda"), Call("norm_bwd", Cost(1, 1), [], "cuda")])
    assert counted.largest("registers") == 128 and counted.largest("spills") == 8
    assert counted.path == "_some_kernel, norm_bwd by torch"


def _counted_thrice() -> list[list[str]]:
    """The kernels of layer_norm in three calls, each of which runs its launcher as on a GPU, or replays it."""
    from tpfuse.kernels.runtime.op import NAMESPACE

    library = torch.library.Library(NAMESPACE, "IMPL")
    library.impl(NORM.fwd.name, NORM.fwd._flat(NORM.fwd._cuda), "CPU", allow_override=True)
    inputs, found = LAYER_NORM.inputs(random(dtype=torch.bfloat16), 8, 64), []
    for _ in range(3):
        with count() as counted:
            LAYER_NORM.providers["tpfuse"](*inputs)
        found.append([kernel.name for call in counted.calls for kernel in call.kernels])
    return found


@pytest.mark.slow
def test_what_a_call_launches_is_counted_each_time(idle):
    """A replay starts kernels past what counts them."""
    pytest.importorskip("triton")
    assert idle(_counted_thrice) == [["_fwd_kernel"]] * 3


# ---- time and memory ----


def test_providers_take_turns_and_sets_rotate():
    seen = []
    timings = interleaved({name: lambda i, name=name: seen.append((name, i)) for name in "ab"}, 3, CPU, 0.0, least=4)
    assert seen[-8:] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 0), ("b", 0)]
    assert all(t.p20 <= t.p50 <= t.p80 and t.how == "clock" for t in timings.values())


def test_quantiles():
    timing = quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 6.0], "clock")
    assert (timing.p20, timing.p50, timing.p80, timing.spread) == (2.0, 3.5, 5.0, 3.0)
    assert quantiles([2.0], "clock").p80 == 2.0


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


# ---- the roofline ----


def test_the_floor_is_the_larger_of_two_times():
    assert CARD.floor("bf16", 10**12, 0) == pytest.approx(1.0)
    assert CARD.floor("bf16", 10**12, 2 * 10**14) == pytest.approx(2.0)
    assert CARD.floor("fp32", 10**12, 2 * 10**14) == pytest.approx(20.0)


def test_rates_count_the_useful_work():
    counted = Counted([Call("norm_fwd", Cost(3 * 10**9, 10**9, 10**11), [], "cpu")])
    assert speed(counted, "bf16", 0.01, CARD) == pytest.approx(
        dict(tflops=10.0, gbs=400.0, roofline=0.4, bytes=4 * 10**9, flops=10**11)
    )
    assert set(speed(None, "bf16", 0.01, CARD).values()) == {None}


def test_a_card_is_measured():
    card = measure_card(CPU, {"fp32": torch.float32}, copy_mib=1, side=16)
    assert card.copy_gbs > 0 and card.matrix_tflops["fp32"] > 0 and card.name


# ---- the cache ----


def rates(moved, flops, share):
    return dict(bytes=moved, flops=flops, roofline=share)


def test_what_a_share_is_of():
    assert bound(rates(10**9, 0, 0.5), "bf16", CARD, cached=False) == "memory"
    assert bound(rates(10**9, 0, 0.5), "bf16", CARD, cached=True) == "cache"
    assert bound(rates(10**9, 0, 1.01), "bf16", CARD, cached=False) == "cache"
    assert bound(rates(10**9, 10**12, 0.5), "bf16", CARD, cached=True) == "matrix"
    assert bound(rates(None, None, None), "bf16", CARD, cached=True) is None


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


@pytest.mark.parametrize("cache, marked", [(1 << 10, False), (1 << 30, True)])
def test_inputs_that_fit_into_the_cache_are_marked(monkeypatch, cache, marked):
    """64 rows of 4 KiB: 128 sets of them are 32 MiB."""
    monkeypatch.setattr(timing, "cache_bytes", lambda _: cache)
    slow = dataclasses.replace(HERE, card=Card("a card", 1e9, {"fp32": 10.0}))  # no call is faster than its memory
    rows, _ = measure(Case(LAYER_NORM, (64, 1024), "fp32", ["fwd", "bwd"], ["torch"]), slow)
    assert [row["bound"] for row in rows] == ["cache" if marked else "memory"] * 2
    assert ["cache" in line for line in output.cached(rows, cache)] == [True] * marked


def test_a_table_counts_as_far_as_it_is_read(monkeypatch):
    """Two sets of a table of 4 MiB fill a cache of 2 MiB, but the rows that are looked up do not."""
    monkeypatch.setattr(timing, "cache_bytes", lambda _: 2 << 20)
    slow = dataclasses.replace(HERE, card=Card("a card", 1e9, {"fp32": 10.0}))
    rows, _ = measure(Case(load("embedding"), (1 << 15, 4, 32), "fp32", ["fwd"], ["torch"]), slow)
    assert [row["bound"] for row in rows] == ["cache"]


# ---- errors ----


def test_errors_are_against_fp64_and_beside_torch():
    errors = Errors(LAYER_NORM, lambda: LAYER_NORM.inputs(random(dtype=torch.bfloat16), 8, 64))
    assert errors.of("torch", LAYER_NORM.providers["torch"])["step"][1] == 1.0
    wrong = errors.of("tpfuse", lambda x, w, b: LAYER_NORM.providers["tpfuse"](x * 1.1, w, b + 0.25))
    right = errors.of("tpfuse", LAYER_NORM.providers["tpfuse"])
    assert right["fwd"][0] < 0.01 < 0.05 < wrong["fwd"][0] and right["bwd"][1] <= 2 < wrong["fwd"][1]
    assert set(right) == {"fwd", "bwd", "step"}


def test_inputs_and_output_gradients_are_exact_for_everybody():
    """What only moves numbers has no error: those of the truth were rounded too."""
    copy = dict.fromkeys(("tpfuse", "torch"), lambda x: x * 1)
    bench = Bench("copy", ("M",), (), ((8,),), lambda random, M: (random(M),), copy)
    errors = Errors(bench, lambda: bench.inputs(random(dtype=torch.bfloat16), 64))
    assert errors.of("tpfuse", copy["tpfuse"]) == {mode: (0.0, 0.0) for mode in ("fwd", "bwd", "step")}


def test_a_mask_of_ones_own_is_not_compared():
    bench = load("dropout")
    errors = Errors(bench, lambda: bench.inputs(random(), 8, 64))
    assert errors.of("torch", bench.providers["torch"]) == {}
    assert max(errors.of("tpfuse", bench.providers["tpfuse"])["step"]) <= 2.0
    assert errors.of("tpfuse", bench.providers["torch"])["fwd"][0] > 0.1  # another mask would be seen


def test_a_loss_starts_its_backward_with_one():
    bench = load("cross_entropy")
    loss = calls(bench.providers["torch"], [bench.inputs(random(), 4, 8)], None, "step", random())(0)[1][0]
    assert torch.allclose(loss.sum(-1), torch.zeros(4), atol=1e-6) and loss.abs().sum() > 0


# ---- rows ----


def fails(*_):
    raise RuntimeError("no such kernel\nand a long story")


def test_a_provider_that_fails_costs_the_others_nothing():
    bench = dataclasses.replace(LAYER_NORM, providers=LAYER_NORM.providers | dict(broken=fails))
    rows, notes = measure(Case(bench, (4, 8), "fp32", ["fwd", "bwd"], ["broken", "tpfuse", "torch"]), HERE)
    assert [(row["mode"], row["provider"]) for row in rows] == [
        (m, p) for m in ("fwd", "bwd") for p in ("tpfuse", "torch")
    ]
    assert "layer_norm 4x8 fp32 fwd: broken is left out: no such kernel" in notes
    assert all(set(row) == {*COLUMNS, "bytes", "flops"} for row in rows)


def test_bytes_are_those_of_tpfuse_for_everybody():
    rows, notes = measure(Case(LAYER_NORM, (4, 8), "fp32", ["fwd"], ["torch"]), HERE)
    x, *vectors = LAYER_NORM.inputs(random(), 4, 8)
    with count() as counted:
        LAYER_NORM.providers["tpfuse"](x, *vectors)
    assert [row["bytes"] for row in rows] == [counted.bytes] and rows[0]["path"] == "eager" and notes == []


def test_peers_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names, notes = available(LAYER_NORM, None)
    assert names == ["tpfuse", "torch", "compile"] and notes == ["liger is left out: pip install liger-kernel"]
    assert available(load("linear_gelu"), ["gemm", "liger"])[0] == ["gemm"]


@pytest.mark.parametrize("name", discover())
def test_every_op_runs_as_torch_does(name):
    """A small shape of each: tpfuse and torch take the same inputs and agree, forward and backward."""
    bench = load(name)
    shape = tuple(min(n, 16) for n in bench.cpu_shapes[0])
    assert isinstance(bench, Bench) and bench.name == name
    assert all(len(each) == len(bench.axes) for each in (*bench.shapes, *bench.cpu_shapes))
    errors = Errors(bench, lambda: bench.inputs(random(), *shape))
    error, ratio = errors.of("tpfuse", bench.providers["tpfuse"])["step"]
    assert error < 1e-5


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
    assert (timings["short"].how, timings["long"].how) == ("graph", "events")
    assert timings["short"].p50 == pytest.approx(10e-6) and timings["long"].p50 == pytest.approx(1e-3)
    assert [entry[1] for entry in device.log if entry[0] == "short" and entry[2]] == list(range(12))


def test_what_cannot_be_captured_is_timed_between_events(monkeypatch):
    device = Device(monkeypatch, can_capture=False)
    timings = interleaved(dict(short=device.call("short", 10e-6)), 2, CUDA, 0.01)
    assert timings["short"].how == "events" and timings["short"].p50 == pytest.approx(10e-6)


def test_a_long_call_goes_into_a_graph_where_that_is_asked(monkeypatch):
    device = Device(monkeypatch)
    timings = interleaved(dict(long=device.call("long", 1e-3)), 1, CUDA, 0.01, graph_below=float("inf"))
    assert timings["long"].how == "graph" and timings["long"].p50 == pytest.approx(1e-3)


def test_sets_fill_a_gpus_cache_three_times(monkeypatch):
    Device(monkeypatch)
    assert sets_needed(1 << 18, CUDA) == 12 and sets_needed(1 << 30, CUDA) == 1 and sets_needed(16, CUDA) == 128


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """The card's ceilings, graphs, registers and memory are there."""
    bench, device = load("reduce_bias_dropout_add_norm"), torch.device("cuda")
    card = measure_card(device, {"bf16": torch.bfloat16}, copy_mib=256, side=2048)
    case = Case(bench, (1, 512, 1024), "bf16", ["fwd", "bwd", "step"], ["tpfuse", "torch"])
    rows, notes = measure(case, Setting(card, device, 0.05))
    assert notes == [] and len(rows) == 6 and {row["timed"] for row in rows if row["mode"] != "step"} == {"graph"}
    for row in rows:
        assert row["p50_us"] > 0 and row["peak_mib"] > 0 and row["roofline"] < 2
        assert row["provider"] == "torch" or (row["registers"] > 0 and row["spills"] == 0 and "_kernel" in row["path"])
        assert row["error_ratio"] <= 2
