"""The step-time model, on a machine whose speed is given; what it says of a real one is measured by hand (--check)."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing import start_processes

from tests.forking import START_METHOD, forking
from tpfuse.__main__ import main
from tpfuse.models import GPTConfig
from tpfuse.models.files import disk
from tpfuse.tools.ledger import machine, processes, steptime
from tpfuse.tools.ledger.dryrun import Plan, run
from tpfuse.tools.ledger.machine import Line, Machine, Speeds, fit

SMALL = GPTConfig(vocab_size=96, max_positions=64, hidden_size=64, num_layers=2, num_heads=4)
FREE = Line(0.0, 0.0, 0.0)
KINDS = dict.fromkeys(("GEMM", "attention", "normalisation", "elementwise"), FREE)
MESSAGES = dict.fromkeys(("all_gather of 2", "all_to_all of 2", "all_reduce of 2"), FREE)


def plan(tp=1, dp=1, micro_batch=4):
    return Plan(tp, dp, 64, micro_batch, dtype=torch.float32)


def built(ops=(), messages=(), overhead=0.0, cores=4, worlds=(1, 2, 4)):
    table = Speeds(KINDS | dict(ops), MESSAGES | dict(messages), overhead)
    return Machine(cores, {"float32": dict.fromkeys(worlds, table)})


LINES = (
    Line(1e-5, 1e-11, 0),
    Line(0, 2e-11, 1e-10),
    Line(3e-6, 0, 5e-10),
    Line(4e-6, 1e-11, 2e-10),
    Line(2e-6, 1e-11, 3e-10, 1e-9),
)


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_found_again(line):
    sizes = [(0, 1e3, 0), (1e5, 1e4, 1e3), (1e7, 1e4, 3e5), (1e8, 1e6, 1e6), (3e8, 1e7, 6e6), (0, 1e7, 0)]
    found = fit([(*size, line.seconds(*size)) for size in sizes])
    for size in sizes:
        assert found.seconds(*size) == pytest.approx(line.seconds(*size), rel=1e-3)


def test_no_part_of_a_line_is_negative():
    found = fit([(0, 1.0, 0, 3.0), (0, 2.0, 0, 2.0), (0, 3.0, 0, 1.0)])
    assert min(found) >= 0 and found.seconds(0, 2.0) > 0


def test_flops_over_their_rate():
    found = steptime.predict(SMALL, plan(), built(ops=dict(GEMM=Line(0, 1e-9, 0))), batch=8)
    assert found.seconds == pytest.approx(2 * run(SMALL, plan()).work.gemm_flops * 1e-9)
    assert list(found.parts) == ["GEMM"]


def test_an_ops_own_line_comes_before_its_kinds():
    own = steptime.predict(SMALL, plan(), built(ops=dict(linear_fwd=Line(1.0, 0, 0), GEMM=Line(0, 1e-30, 0))), batch=4)
    assert own.seconds == pytest.approx(4 * SMALL.num_layers + 1)  # four GEMMs a layer forward, and the head


def test_dropout_is_another_op():
    line = {"attention_fwd + dropout": Line(1.0, 0, 0)}
    assert steptime.predict(SMALL, plan(), built(ops=line), batch=4).seconds == SMALL.num_layers
    dry = GPTConfig(**{**SMALL.__dict__, "attention_dropout": 0.0})
    assert steptime.predict(dry, plan(), built(ops=line), batch=4).seconds == 0


def test_collectives_over_tp_and_dp():
    work = run(SMALL, plan(2, 2, 2)).work
    found = steptime.predict(SMALL, plan(2, 2, 2), built(messages=dict.fromkeys(MESSAGES, Line(0, 0, 1e-9))), batch=8)
    assert found.parts["communication"] == pytest.approx(2 * work.wire * 1e-9)  # two micro-batches, and one reduction
    assert found.parts["dp"] == pytest.approx(run(SMALL, plan(2, 2, 2)).held.reduced[1] * 1e-9)


def test_collectives_over_cp():
    """Gathers and exchanges among four, where those among two cost nothing."""
    lines = {f"{op} of 4": Line(0, 0, 1e-9) for op in ("all_gather", "all_to_all")}
    on = plan(2, 1, 2)._replace(cp=4, cp_kind="keys")
    found = steptime.predict(SMALL, on, built(messages=lines, cores=8), batch=8)
    assert found.parts["communication"] == pytest.approx(4 * run(SMALL, on).work.cp_wire * 1e-9)


def test_rows_to_experts_take_as_long_as_an_exchange():
    """Of the busiest rank, which was not measured, as many seconds a byte as an even exchange takes."""
    experts = dict(gated=True, activation="silu", mlp_bias=False, num_experts=4, experts_per_token=2)
    config, speeds = replace(SMALL, **experts), built(messages={"all_to_all of 2": Line(0, 0, 1e-9)})
    for imbalance in (1.0, 1.5):
        on = plan(2, 1, 4)._replace(imbalance=imbalance)
        sent = run(config, on).work.messages
        wire = sum(size for (_, op, _), (_, size) in sent.items() if op in ("exchange_rows", "all_to_all"))
        assert {op for _, op, _ in sent} >= {"exchange_rows", "all_to_all"}
        assert steptime.predict(config, on, speeds, batch=4).seconds == pytest.approx(wire * 1e-9)


def test_experts_over_replicas():
    """Their rows go among all ranks, where those among two cost nothing; no replica sums their gradients."""
    experts = dict(gated=True, activation="silu", mlp_bias=False, num_experts=4, experts_per_token=2)
    config, on = replace(SMALL, **experts), plan(2, 2, 2)._replace(over_replicas=True)
    speeds = built(messages={"all_to_all of 4": Line(0, 0, 1e-9), "all_reduce of 4": Line(0, 0, 1e-6)})
    parts = steptime.predict(config, on, speeds, batch=4).parts
    sent = run(config, on).work.messages
    wire = sum(size for (_, op, _), (_, size) in sent.items() if op == "exchange_rows")
    assert parts["communication"] == pytest.approx(wire * 1e-9) and wire > 0
    each = steptime.predict(config, on._replace(over_replicas=False), speeds, batch=4).parts
    experts_of_rank = 4 // 2 * 3 * config.ffn_width * config.hidden_size * config.num_layers
    assert each["dp"] - parts["dp"] == pytest.approx(4 * experts_of_rank * 1e-6)


def test_a_collective_of_more_ranks_than_were_measured():
    table = Speeds({}, {"all_gather of 2": Line(2.0, 0, 0), "all_gather of 4": Line(4.0, 0, 0)}, 0.0)
    assert [getattr(table.message("all_gather", ranks), "alpha", None) for ranks in (1, 2, 3, 4, 64)] == [
        None,
        2.0,
        2.0,
        4.0,
        4.0,
    ]
    assert table.message("all_to_all", 2) is None


def test_more_ranks_than_cores_take_turns():
    times = [
        steptime.predict(SMALL, plan(2, 2, 1), built(overhead=1e-3, cores=c, worlds=(1, 2)), batch=2).seconds
        for c in (4, 2, 1)
    ]
    assert times[1] == pytest.approx(2 * times[0]) and times[2] == pytest.approx(
        2 * times[0]
    )  # at 1 core, 2 had shared it already


def test_a_machine_goes_to_a_file_and_back(tmp_path):
    before = built(ops=dict(GEMM=Line(1e-6, 1e-11, 0)), overhead=2e-5)
    before.save(tmp_path / "deep" / "machine.json")
    assert Machine.load(tmp_path / "deep" / "machine.json") == before
    assert "overhead of an op" in str(before)


def test_a_machine_is_written_whole_or_not_at_all(monkeypatch, capsys, tmp_path):
    """By way of a link, too; what was measured is printed before."""
    (tmp_path / "machine.json").symlink_to("real.json")
    before = built()
    before.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "real.json") == before

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(disk.os, "replace", full)
    monkeypatch.setattr(machine, "calibrate", lambda *_, **__: built(overhead=1.0))
    assert main(["calibrate", "--out", str(tmp_path / "machine.json")]) == 2
    assert "overhead of an op" in capsys.readouterr().out
    assert Machine.load(tmp_path / "machine.json") == before and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "does not exist"),
        *((text, "is not what calibrate writes") for text in ("{}", "[]", "no JSON")),
        ('{"version": 0}', "of version 0"),
        ('{"version": 2, "cores": 2, "tables": []}', "is not what calibrate writes"),
        ('{"version": 2, "cores": 2, "tables": {}}', "tables must not be empty"),
        ('{"version": 2, "cores": 2, "tables": {"float32": {}}}', "tables must not be empty"),
        ('{"version": 2, "cores": 0, "tables": {}}', "cores must be at least 1, got 0"),
    ],
)
def test_a_file_that_is_no_machine(tmp_path, text, message):
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"machine: .*{message}.*calibrate"):
        Machine.load(path)


def test_what_was_not_calibrated():
    with pytest.raises(ValueError, match="bfloat16 was not calibrated, only float32"):
        built().table(torch.bfloat16, 1)
    with pytest.raises(ValueError, match="over 2 ranks was not calibrated; run python -m tpfuse calibrate --ranks 2"):
        alone = Machine(2, {"float32": {1: Speeds(KINDS, {}, 0.0)}})
        steptime.predict(SMALL, plan(2), alone, batch=4)
    with pytest.raises(ValueError, match="predict: there must be at most 256 processes on this machine, got 512"):
        steptime.check(SMALL, [plan(), plan(dp=512)], built(), batch=2048)
    with pytest.raises(ValueError, match="batch=6 is not divisible by dp 2 x micro_batch 2"):
        steptime.predict(SMALL, plan(1, 2, 2), built(), batch=6)


def test_ranking_and_report():
    checked = [
        steptime.Checked(steptime.predict(SMALL, plan(tp), built(overhead=1e-4), batch=4), measured)
        for tp, measured in ((1, 0.02), (2, 0.03))
    ]
    assert steptime.ranking_is_right(checked)
    assert not steptime.ranking_is_right([c._replace(measured=0.1 - c.measured) for c in checked])
    assert "ranking of the choices right" in steptime.report(checked)
    assert checked[0].error == pytest.approx(100 * (checked[0].prediction.seconds / 0.02 - 1))


@pytest.mark.slow
def test_a_machine_is_calibrated_and_steps_are_measured(monkeypatch):
    """Real processes and real collectives, at their smallest; how exact it is depends on how idle the machine is."""
    forking()  # the server, from which processes start at once
    monkeypatch.setattr(processes.mp, "spawn", functools.partial(start_processes, start_method=START_METHOD))
    found = machine.calibrate(worlds=(2,), seconds=1, sizes=[machine.Size(32, 2, 32, 1), machine.Size(64, 2, 64, 1)])
    assert list(found.tables["float32"]) == [2]
    assert {"linear_fwd", "attention_bwd + dropout", "GEMM"} <= found.tables["float32"][2].ops.keys()
    assert found.tables["float32"][2].messages.keys() == MESSAGES.keys()
    checked = steptime.check(SMALL, [plan(2, 1, 2)], found, batch=4, steps=2)
    assert 0.01 < checked[0].prediction.seconds / checked[0].measured < 100


def test_lines_are_stretched_to_whole_steps():
    """Ops that take twice as long inside a step, and a microsecond of Python each."""
    samples = [(0, n, 0, 1e-9 * n) for n in (1e3, 1e4, 1e5)]
    steps = [([("add", 0, n, 0)] * calls, calls * (2e-9 * n + 1e-6)) for n, calls in ((1e3, 10), (1e4, 20), (1e5, 30))]
    table = machine._fit_all({"add": samples}, {}, steps)
    assert table.ops["add"] == pytest.approx(Line(0, 0, 2e-9), rel=1e-6) and table.overhead == pytest.approx(1e-6)
