"""How a candidate wins, what is asked and what is kept; a fake clock in place of a GPU."""

import dataclasses
import json
import sys
import types

import pytest
import torch

from bench import tune
from tpfuse.kernels.runtime import tuning as _tuning
from tpfuse.tools.bench.measure import Timing

BF16 = torch.bfloat16


def timing(p50, spread=0.0):
    return Timing(p50 - spread / 2, p50, p50 + spread / 2, "graph")


@pytest.mark.parametrize(
    "times, won",
    [
        ([timing(10), timing(9), timing(8)], 2),
        ([timing(10), timing(11)], 0),
        ([timing(10, spread=2), timing(9)], 0),  # within the default's own spread
        ([timing(10), timing(9, spread=2)], 0),  # or the candidate's
        ([timing(10, spread=0.5), timing(9, spread=0.5)], 1),
    ],
)
def test_a_winner_beats_the_spread(times, won):
    assert tune.winner(dict(enumerate(times)), 0) == won


def test_neighbours_change_one_parameter():
    found = tune.neighbours(dict(A=128, num_warps=4, num_stages=1, WIDTH=8))
    changed = [{k: v for k, v in c.items() if dict(A=128, num_warps=4, num_stages=1, WIDTH=8)[k] != v} for c in found]
    assert changed == [{"A": 64}, {"A": 256}, {"num_warps": 2}, {"num_warps": 8}, {"num_stages": 2}]


def test_the_choice_between_a_fused_gemm_and_torchs_is_one_of_them():
    found = tune.neighbours(dict(path="torch", BM=128))
    assert found == [dict(path="fused", BM=128), dict(path="fused", BM=64), dict(path="fused", BM=256)]
    assert tune.neighbours(dict(path="tpfuse")) == [dict(path="sdpa")]
    own = [dict(path="tpfuse", BLOCK_M=128), dict(path="tpfuse", BLOCK_M=64), dict(path="tpfuse", BLOCK_M=256)]
    assert tune.neighbours(dict(path="sdpa", BLOCK_M=128)) == own
    assert tune.neighbours(dict(FLATTEN=True)) == [dict(FLATTEN=False)]
    assert tune.neighbours(dict(EARLY=False, STAGES=1)) == [dict(EARLY=True, STAGES=1), dict(EARLY=False, STAGES=2)]


def test_another_form_is_tried_with_its_own_neighbours():
    found = tune.neighbours(dict(TRANSPOSED=False, num_stages=1))
    forms = [dict(TRANSPOSED=True, num_stages=1), dict(TRANSPOSED=True, num_stages=2)]
    assert found == [*forms, dict(TRANSPOSED=False, num_stages=2)]
    assert tune.neighbours(dict(AHEAD=False)) == [dict(AHEAD=True)]
    assert tune.neighbours(forms[1]) == [dict(TRANSPOSED=True, num_stages=n) for n in (1, 3)]


def test_a_sweep_climbs_passes_over_what_is_wrong_and_stops():
    """Time falls with A up to 1024, but 512 gives a wrong answer at 8 warps, and 16 warps would be fastest of all."""
    fields = []

    def right(p):
        return p["num_warps"] <= 4

    def time(field):
        fields.append(field)
        return {i: timing(100 / p["A"] + (0 if p["num_warps"] == 4 else 1)) for i, p in enumerate(field)}

    best = tune.sweep(dict(A=256, num_warps=4), right, time)
    assert best == dict(A=2048, num_warps=4) and len(fields) == tune.ROUNDS
    assert not any(p["num_warps"] > 4 for field in fields for p in field)
    tried = [tuple(p.items()) for field in fields for p in field[1:]]
    assert len(tried) == len(set(tried))  # nothing is timed as new twice


def test_a_default_that_is_best_stays():
    assert tune.sweep(dict(A=256), lambda p: True, lambda field: {i: timing(1 + i) for i in range(len(field))}) == dict(
        A=256
    )
    assert tune.sweep(dict(A=256), lambda p: False, None) == dict(A=256)  # nothing right: nothing is timed


# ---- between launchers and the table ----


def ask(kernel="k", bucket="bf16 8x8", arch="sm_90"):
    return tune.Ask(kernel, arch, bucket, (("A", 128), ("num_warps", 4)))


def test_only_what_differs_is_kept_and_the_rest_is_merged():
    table = {"sm_80": {"k": {"bf16 8x8": {"A": 64}}}, "sm_90": {"other": {"bf16 8x8": {"A": 1}}}}
    made = tune.put(table, ask(), dict(A=256, num_warps=4))
    assert made == {"sm_80": table["sm_80"], "sm_90": {"k": {"bf16 8x8": {"A": 256}}, "other": {"bf16 8x8": {"A": 1}}}}
    assert tune.put(made, ask(), dict(A=128, num_warps=4)) == table  # the default again: the entry goes
    assert "k" not in table["sm_90"] and tune.put({}, ask(), dict(A=128, num_warps=4)) == {}


@pytest.fixture
def launcher(monkeypatch):
    """A module of the library whose launcher asks for parameters, and what it was given."""
    module = types.ModuleType("tpfuse.kernels._pretended")
    module.tuned, module.given = _tuning.tuned, []
    module.launch = lambda M: module.given.append(module.tuned("k", "sm_90", BF16, (M, 8), dict(A=128, num_warps=4)))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_what_launchers_ask_is_heard(launcher):
    with tune.questions() as asks:
        launcher.launch(8)
        launcher.launch(7)  # the same bucket
        launcher.launch(16)
    assert asks == [ask(), ask(bucket="bf16 16x8")] and launcher.tuned is _tuning.tuned


def test_a_trial_runs_under_its_parameters(launcher):
    calls = dict(call=lambda i: launcher.launch(8), results=lambda: (launcher.launch(8), [0.1])[1])
    trial = tune.Trial(
        ask(), **calls, allowed=[0.2], table={}, sets=1, device=torch.device("cpu"), seconds=0.0, say=print
    )
    assert trial.right(dict(A=256, num_warps=4)) and launcher.given == [dict(A=256, num_warps=4)]
    timings = trial.time([dict(A=128, num_warps=4), dict(A=64, num_warps=8)])
    assert launcher.given[-2:] == [dict(A=128, num_warps=4), dict(A=64, num_warps=8)] and set(timings) == {0, 1}


@pytest.mark.parametrize("error", [0.3, float("nan")])
def test_a_wrong_answer_is_not_right(error):
    trial = tune.Trial(ask(), None, lambda: [0.1, error], [0.2, 0.2], {}, 1, torch.device("cpu"), 0.0, print)
    assert not trial.right(dict(A=256, num_warps=4))


def test_what_does_not_compile_is_passed_over(capsys):
    def fails():
        raise RuntimeError("out of resource: shared memory\nRequired: 300000")

    trial = tune.Trial(ask(), None, fails, [], {}, 1, torch.device("cpu"), 0.0, print)
    assert not trial.right(dict(A=256, num_warps=4))
    assert capsys.readouterr().out == "k {'A': 256, 'num_warps': 4}: out of resource: shared memory\n"


def test_an_op_is_tuned_end_to_end(launcher, monkeypatch):
    """A whole op whose provider asks: on a fake clock the candidate with A = 256 is faster."""
    bench = tune.load("layer_norm")
    plain = bench.providers["tpfuse"]

    def provider(x, weight, bias):
        launcher.launch(8)
        return plain(x, weight, bias)

    bench = dataclasses.replace(bench, providers=bench.providers | dict(tpfuse=provider))
    clock = lambda self, field: {i: timing(1 if p["A"] == 256 else 2) for i, p in enumerate(field)}
    monkeypatch.setattr(tune.Trial, "time", clock)
    table = tune.tune(bench, (8, 8), "fp32", {"sm_80": {}}, torch.device("cpu"), 0.0)
    assert table == {"sm_80": {}, "sm_90": {"k": {"bf16 8x8": {"A": 256}}}}


def test_a_kernel_that_drops_is_judged_with_dropout(launcher, monkeypatch, capsys):
    """It asks for parameters of its own: what does not fit into the GPU, or drops something else, must not win."""
    bench = tune.load("reduce_bias_dropout_add_norm")
    plain = bench.providers["tpfuse"]

    def provider(*inputs, p):
        if p:
            launcher.launch(8)
            if launcher.given[-1]["A"] == 256:
                raise RuntimeError("out of resource: shared memory")
            p = 0.5 if launcher.given[-1]["num_warps"] == 8 else p
        return plain(*inputs, p=p)

    bench = dataclasses.replace(bench, providers=bench.providers | dict(tpfuse=provider))
    seconds = lambda p: 1 if p["A"] == 256 or p["num_warps"] == 8 else 2 if p["A"] == 64 else 3
    clock = lambda self, field: {i: timing(seconds(p)) for i, p in enumerate(field)}
    monkeypatch.setattr(tune.Trial, "time", clock)
    table = tune.tune(bench, (1, 8, 8), "fp32", {}, torch.device("cpu"), 0.0)
    assert table == {"sm_90": {"k": {"bf16 8x8": {"A": 64}}}}


def _warps() -> list[tuple[str, int, set[int]]]:
    """Tunes layer_norm with twice the warps as candidates -> of each kernel those asked for, and those started."""
    from bench import idle

    found = []

    def right(trial, parameters):
        idle.STARTED = []
        with trial.under(parameters):
            trial.call(0)
        found.append((trial.ask.kernel, parameters["num_warps"], {kernel.launch[3] // 32 for kernel in idle.STARTED}))
        return False

    tune.Trial.right = right
    tune.neighbours = lambda p: [p | dict(num_warps=2 * p["num_warps"])] if "num_warps" in p else []
    tune.tune(tune.load("layer_norm"), (64, 256), "bf16", {}, torch.device("cpu"), 0.0)
    return found


@pytest.mark.slow  # its kernels are compiled
def test_a_candidate_is_what_is_started(idle):
    """Not what an earlier call has left on a tape."""
    pytest.importorskip("triton")
    found = idle(_warps)
    assert {kernel for kernel, *_ in found} == {"fused_norm_fwd", "fused_norm_bwd"}
    assert all(warps in started for _, warps, started in found)


def test_ops_that_drop_are_tuned_without_dropout_first():
    forms = tune.with_and_without_dropout(tune.load("attention"))
    assert [bench.p for bench in forms] == [0.0, 0.1]
    assert tune.with_and_without_dropout(tune.load("layer_norm")) == [tune.load("layer_norm")]


def test_it_needs_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tune.main(["--table", str(tmp_path / "t.json")]) == 2
    error = capsys.readouterr().err
    assert "sees no GPU" in error and error.count("\n") == 1 and not (tmp_path / "t.json").exists()
    json.loads(_tuning.TABLE.read_text())
