"""The bench of plans against real runs: its rows, and tiny runs of both halves."""

import pytest

from bench.plan import check
from tests.tools.ledger.test_steptime import built
from tpfuse.tools.ledger.machine import Line
from tpfuse.tools.ledger.presets import load_config
from tpfuse.tools.plan.split import Job

MESSAGES = dict.fromkeys(("all_gather of 2", "all_to_all of 2", "all_reduce of 2"), Line(1e-6, 1e-9, 0.0))


def test_a_row():
    pytest.importorskip("scipy")
    compared = check.PlanErrors("three", ["a", "b", "c"], [1.0, 2.0, 3.0], [1.25, 2.0, 2.0])
    assert compared.row() == "| three | 3 | 20.0 % | 50.0 % | 0.866 |"
    assert "-20.0 %" in compared.text() and "+50.0 %" in compared.text()


@pytest.mark.slow
def test_all_plans_of_two_processes_run():
    job = Job(load_config("gpt-3m"), 2, 32, check.torch.float32)
    compared = check.training(built(messages=MESSAGES), job, steps=1)
    assert len(compared.measured) == 9 and min(compared.measured) > 0  # dp 2, tp 2 at 1 and 2, of three ways to save


@pytest.mark.slow
def test_all_plans_of_sleeping_stages_run():
    job = Job(load_config("gpt-3m"), 4, 32)
    compared = check.sleeping_stages(job, fastest=0.05, rounds=1)
    assert len(compared.measured) == len(compared.predicted) > 10
    assert all(m > 0.5 * p for p, m in zip(compared.predicted, compared.measured, strict=True))  # none is left out
