"""What the machine leaves to this process, from files as Linux writes them, and the disk."""

import os

import pytest

from tpfuse.tools.doctor import devices, limits
from tpfuse.tools.doctor.folder import writable
from tpfuse.tools.doctor.report import FAULT, NOTE, OK

V2 = {"cpu.max": "150000 100000", "memory.max": "1000", "memory.current": "400"}
V1 = {
    "cpu/cpu.cfs_quota_us": "150000",
    "cpu/cpu.cfs_period_us": "100000",
    "memory/memory.limit_in_bytes": "1000",
    "memory/memory.usage_in_bytes": "400",
}
UNLIMITED = {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "400"}
V1_UNLIMITED = {"memory/memory.limit_in_bytes": str(1 << 63), "memory/memory.usage_in_bytes": "1"}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(files)`` are those of the control groups."""

    def make(files: dict[str, str]) -> None:
        for name, text in ({"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   12 kB\n"} | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    monkeypatch.setattr(limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    return make


@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_a_quota_and_a_limit_are_seen(machine, files):
    machine(files)
    assert limits.cores() == 1.5 and limits.memory() == (12 * 1024, 600)


@pytest.mark.parametrize("files", [UNLIMITED, V1_UNLIMITED, {}], ids=["v2", "v1", "none"])
def test_no_limit(machine, files):
    machine(files)
    assert limits.cores() == 4 and limits.memory() == (12 * 1024, None)


def test_a_group_below_the_root(machine):
    machine({"proc/self/cgroup": "0::/a/b", "a/b/cpu.max": "50000 100000"} | UNLIMITED)
    assert limits.cores() == 0.5


def test_more_threads_than_cores_are_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "cores", lambda: 0.5)
    assert {f.name: f.status for f in devices.findings(tmp_path)}["cores"] == OK  # one thread is the least
    monkeypatch.setattr(devices.torch, "get_num_threads", lambda: 3)
    assert {f.name: f.status for f in devices.findings(tmp_path)}["cores"] == NOTE


@pytest.mark.parametrize("free, status", [(1 << 40, OK), (1 << 29, NOTE), (4096, FAULT)])
def test_a_full_disk(monkeypatch, tmp_path, free, status):
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((real[0], 4096, real[2], real[3], free // 4096, *real[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    found = devices.disk(tmp_path)
    assert found.status == status and (status == OK) == (not found.advice)


def test_a_folder_that_is_not_there(tmp_path):
    found = {f.name: f for f in devices.findings(tmp_path / "nowhere")}
    assert found["disk"].status == found["folder"].status == FAULT and found["CPU"].status == OK
    assert "nowhere" in found["disk"].value


def test_nothing_is_left_in_the_folder(tmp_path):
    assert writable(tmp_path).status == OK and list(tmp_path.iterdir()) == []
