"""Parts that fail, hang, die and are killed, and what a later call picks up."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import pytest

from bench.gpu_day.__main__ import main
from bench.gpu_day.plan import SETUP
from bench.gpu_day.results import NAME, Broken, Results, load, status_of
from tests.bench.gpu_day.fakes import day, jobs_of, part

ROOT = pathlib.Path(__file__).parents[3]


def gone(pid: int) -> bool:
    for _ in range(1000):
        try:
            if "State:\tZ" in pathlib.Path(f"/proc/{pid}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


# ---- parts that fail ----


def test_what_fails_costs_the_others_nothing(tmp_path, capsys):
    """One process does the jobs until one kills it; the rest go on in another."""
    names = "good", "fails", "exits", "absent", "dies", "last"
    assert day(tmp_path, [part(*names)], [part("good", name="next")]).run() == 1
    jobs = jobs_of(tmp_path)
    assert [jobs[name]["status"] for name in names] == ["done", "failed", "failed", "done", "failed", "done"]
    assert jobs["fails"]["error"].startswith("ValueError: no such kernel") and "fakes.py:" in jobs["fails"]["error"]
    assert re.search(r"the process ended with 7: (.|\n)*illegal memory access", jobs["dies"]["error"])
    assert jobs["absent"]["rows"][-1] == dict(left_out="nvtool is not installed here")
    pids = [jobs[name]["rows"][0]["pid"] for name in names]
    assert len(set(pids[:5])) == 1 and pids[5] != pids[0]
    assert load(tmp_path)["parts"]["part"]["status"] == "partial" and jobs_of(tmp_path, "next")["good"]["rows"]
    out = capsys.readouterr().out
    assert "not done: part" in out and re.search(r"^next +done", out, re.M) and "left] part: partial in" in out


def test_what_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    """The clock jumps as soon as it hangs."""
    late, now = [0.0], time.time

    def clock() -> float:
        if len(jobs_of(tmp_path).get("hangs", {}).get("rows", [])) == 2:
            late[0] = 1000.0
        return now() + late[0]

    monkeypatch.setattr("bench.gpu_day.children.time", types.SimpleNamespace(time=clock))
    assert day(tmp_path, [part("hangs", "good", job_seconds=500, seconds=5000)], seconds=9000).run() == 1
    jobs = jobs_of(tmp_path)
    assert (jobs["hangs"]["status"], jobs["good"]["status"]) == ("timed out", "done")
    assert all(gone(row["pid"]) for row in jobs["hangs"]["rows"])


def test_a_part_and_the_day_end_in_time(tmp_path, capsys, monkeypatch):
    """What is begun too late is not reached, which is no failure."""
    monkeypatch.setattr("bench.gpu_day.day.LEAST", 1e9)
    plan = [part("hangs", "good", seconds=0.5)], [part("good", name="late", seconds=1e9)]
    assert day(tmp_path, *plan).run() == 1
    assert [job["status"] for job in jobs_of(tmp_path).values()] == ["timed out", "not reached"]
    found = load(tmp_path)["parts"]
    assert (found["part"]["status"], found["late"]["status"], found["late"]["jobs"]) == ("timed out", "not reached", {})
    assert "not reached: late" in capsys.readouterr().out


def test_jobs_and_parts_of_a_stage_run_side_by_side(tmp_path):
    """Each waits for the others."""
    first = part("waits for a as b", "waits for b as c", parallel=2, stage="warm")
    assert day(tmp_path, [first, part("waits for c as a", name="other", stage="warm")]).run() == 0


def test_a_later_part_sees_the_rows_of_earlier_ones(tmp_path):
    day(tmp_path, [part("good")], [part("sees", name="next")]).run()
    assert jobs_of(tmp_path, "next")["sees"]["rows"][1]["seen"]["part"][0]["job"] == "good"


def test_a_list_that_cannot_be_made_is_a_failed_part(tmp_path):
    broken = dataclasses.replace(part("good"), module="tests.bench.there_is_none")
    assert day(tmp_path, [broken], [part("good", name="next")]).run() == 1
    assert "there_is_none" in jobs_of(tmp_path)["list"]["error"] and jobs_of(tmp_path, "next")["good"]["rows"]


KILLED = """
import os
import pathlib, sys
from bench.gpu_day.day import Day
from tests.bench.gpu_day.fakes import part
Day(pathlib.Path(sys.argv[1]), 60.0, False, plan=[[part("good", "hangs", "last")]]).run()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_leaves_what_was_found_and_no_process(tmp_path, how):
    command, environment = [sys.executable, "-c", KILLED, str(tmp_path)], os.environ | dict(TMPDIR=str(tmp_path))
    running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    hangs = {}
    while len(hangs.get("rows", [])) < 2:
        time.sleep(0.02)
        hangs = jobs_of(tmp_path).get("hangs", {}) if (tmp_path / NAME).exists() else {}
    running.send_signal(how)
    assert running.wait(20) != 0
    assert load(tmp_path)["parts"]["part"]["status"] == "partial"
    assert {name: job["status"] for name, job in jobs_of(tmp_path).items()} == {
        "good": "done", "hangs": "timed out", "last": "not reached",
    }  # fmt: skip
    assert all(gone(row["pid"]) for row in hangs["rows"])
    assert day(tmp_path / "next", [part("good", "hangs", "last", job_seconds=1.0)], resume=tmp_path).run() == 1


# ---- a later call ----


def test_a_later_call_does_what_is_missing_and_nothing_twice(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    day(first, [part("good", "dies")], [part("good", name="next")]).run()
    done = jobs_of(first)
    first.chmod(0o555)
    assert day(second, [part("good", "dies", "new")], [part("good", name="next")], resume=first).run() == 1
    jobs = jobs_of(second)
    assert jobs["good"] == done["good"] and jobs["new"]["status"] == "done"
    assert jobs["dies"]["status"] == "failed" and jobs["dies"]["rows"][0]["pid"] != done["dies"]["rows"][0]["pid"]
    assert len(jobs["dies"]["rows"]) == 1 and jobs_of(second, "next") == jobs_of(first, "next")
    assert jobs_of(first) == done and len(load(second)["calls"]) == 2
    first.chmod(0o755)
    assert day(first, [part("good", name="next")], resume=first).run() == 0  # into the same folder


def test_results_are_never_written_over(tmp_path):
    day(tmp_path, [part("good")]).run()
    with pytest.raises(Broken, match="--resume .* goes on with it"):
        day(tmp_path, [part("good")])


@pytest.mark.parametrize("text", ['{"parts": {"a"', "", "[]", '{"rows": []}'])
def test_broken_results_are_named(tmp_path, text, capsys):
    (tmp_path / NAME).write_text(text)
    assert main(["--out", str(tmp_path / "new"), "--resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / NAME) in error and error.count("\n") == 1 and not (tmp_path / "new").exists()
    assert main(["--out", str(tmp_path / "new"), "--resume", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_another_cards_results_are_dropped(tmp_path):
    results = day(tmp_path, [part("good")])
    results.results.plan(SETUP, ["machine"])
    results.results.row(SETUP, "machine", dict(device="NVIDIA H200"))
    results.results.end(SETUP, "machine", "done", seconds=1.0)
    results.results.plan("part", ["good"])
    results.results.data["device"] = "NVIDIA H200"
    assert results._ready() and results.results.part("part")["jobs"]
    results.results.data["device"] = "NVIDIA H100"
    assert results._ready() and not results.results.part("part")["jobs"]
    assert "NVIDIA H100's results were dropped: this is NVIDIA H200" in results.results.data["notes"]
    results.results.end(SETUP, "machine", "failed", seconds=1.0, error="no GPU")
    assert not results._ready()


@pytest.mark.parametrize(
    "jobs, status",
    [
        ([], "not reached"),
        (["done", "done"], "done"),
        (["done", "failed"], "partial"),
        (["failed", "not reached"], "failed"),
        (["timed out", "not reached"], "timed out"),
        (["not reached"], "not reached"),
    ],
)
def test_a_parts_status_follows_from_its_jobs(jobs, status):
    assert status_of(jobs) == status


def test_the_file_is_whole_at_any_moment(tmp_path, monkeypatch):
    results = Results(tmp_path / NAME, False)
    results.save()
    results.note("new")
    monkeypatch.setattr(json, "dumps", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        results.save()
    assert load(tmp_path)["notes"] == []
