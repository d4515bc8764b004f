"""The doctor on one rank, on two, and by the command line.

Spans: tpfuse/tools/doctor/: all sections together, by `tpfuse.doctor` and the command.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import tpfuse
from tests.common import Recorder, own_ops
from tpfuse.__main__ import main
from tpfuse.tools.doctor import devices, run
from tpfuse.tools.doctor.report import FAULT, OK, Finding

SECTIONS = ["versions", "compiler", "devices", "backends", "group", "ops on cpu", "self-test on cpu"]


def examined(world, folder):
    """-> text, JSON, the ops that ran, and whether torch's generator and its groups are as they were."""
    groups, state = dict(dist.distributed_c10d._world.pg_names), torch.get_rng_state()
    with Recorder() as recorder, torch.no_grad():
        report = tpfuse.doctor(folder)
    left = dict(dist.distributed_c10d._world.pg_names) == groups, torch.equal(state, torch.get_rng_state())
    return report.text, report.json(), {call.name for call in recorder.calls if call.ours}, left


@pytest.mark.slow
def test_two_ranks(ranks, tmp_path):
    (text, values, ran, left), (other, _, also_ran, _) = ranks(2, examined, tmp_path)
    assert text == other and values["ok"], text
    assert ran == also_ran == own_ops()
    assert left == (True, True) and list(tmp_path.iterdir()) == []
    assert [title for title, found in values["sections"].items() if found] == [*SECTIONS, "self-test over the group"]
    listed = [name for f in values["sections"]["ops on cpu"] for name in f["value"].split(", ")]
    assert sorted(listed) == sorted(own_ops())
    for found in values["sections"].values():
        for f in found:
            assert f.keys() == set(Finding._fields) and f["name"] in text
            assert (f["status"] == OK) == (not f["advice"])


def examined_as_group(world, folder):
    group = dist.new_group([1, 2])
    if world.rank == 0:
        return ""
    first, second = tpfuse.doctor(folder, group), tpfuse.doctor(folder, group)
    return (first.text if first.ok and second.ok else "") and first.text


@pytest.mark.slow
def test_some_ranks_of_three_twice(ranks, tmp_path):
    none, first, second = ranks(3, examined_as_group, tmp_path)
    assert none == "" and first == second and "2 on one host" in first


def test_the_callers_modes_change_nothing(tmp_path):
    """Without gradients, under autocast, with tensors on another device."""
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        report = tpfuse.doctor(tmp_path)
    assert report.ok, report.text


def test_a_group_that_is_none():
    with pytest.raises(ValueError, match="doctor: group must be a ProcessGroup that this process is in, got 'tp'"):
        tpfuse.doctor(group="tp")


def test_a_section_that_raises_stops_no_other(monkeypatch, tmp_path):
    def planted(folder):
        raise RuntimeError("planted")

    monkeypatch.setattr(devices, "findings", planted)
    monkeypatch.setattr(run.kernels, "results", lambda device: [])
    report = tpfuse.doctor(tmp_path)
    wrong = {title: found for title, found in report.sections.items() if any(f.status == FAULT for f in found)}
    assert wrong.keys() == {"devices"} and "RuntimeError: planted" in report.text and not report.ok
    assert not dist.is_initialized()


def test_the_exit_code_is_1_for_a_fault(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run.kernels, "results", lambda device: [])
    assert main(["doctor", "--folder", str(tmp_path / "nowhere")]) == 1
    assert "! folder" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_as_text_and_json(tmp_path):
    command = [sys.executable, "-m", "tpfuse", "doctor", "--folder", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_under_torchrun_one_rank_prints(tmp_path):
    """And a group that the caller makes afterwards finds nothing of it."""
    code = (
        "import sys, torch.distributed as dist; from tpfuse.__main__ import main\n"
        "assert main(['doctor', '--folder', sys.argv[1]]) == 0 and not dist.is_initialized()\n"
        "dist.init_process_group('gloo'); dist.barrier(); dist.destroy_process_group()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    (tmp_path / "folder").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*command, script, str(tmp_path / "folder")], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tpfuse doctor: all is well") == 1 and list((tmp_path / "folder").iterdir()) == []
