"""One folder, one job: a live job is not disturbed, a dead one's folder is taken over, an overtaken one stops."""

import errno
import json
import os
import signal
import subprocess
import time
from unittest import mock

import pytest

from tests.forking import forking
from tests.training.checkpoint.common import made, names
from tpfuse import load_checkpoint, save_checkpoint
from tpfuse.training.checkpoint import folder, job


def save_then_wait(directory, step, conn):
    """Saves, says so, and saves once more when told to -> the error or the path."""
    model, optimizer = made()
    save_checkpoint(directory, model, optimizer, step=step)
    conn.send("saved")
    while conn.recv() == "again":
        try:
            conn.send(save_checkpoint(directory, model, optimizer, step=step + 1).name)
        except Exception as error:
            conn.send(f"{type(error).__name__}: {error}")


class Other:
    """Another job, in a process of its own that has saved in the folder."""

    def __init__(self, directory, step=1, target=save_then_wait):
        self.conn, theirs = forking().Pipe()
        self.process = forking().Process(target=target, args=(directory, step, theirs))
        self.process.start()
        theirs.close()
        assert self.conn.recv() == "saved"

    def saves_again(self):
        self.conn.send("again")
        return self.conn.recv()

    def end(self):
        self.process.kill()
        self.process.join()


@pytest.fixture
def other(tmp_path):
    it = Other(tmp_path)
    yield it
    it.end()


@pytest.mark.parametrize("job", ["other", "other_without_locks"])
def test_a_live_job_is_not_disturbed(request, tmp_path, job):
    other = request.getfixturevalue(job)
    before = names(tmp_path)
    with pytest.raises(OSError, match=rf"save_checkpoint: {tmp_path} is in use by process {other.process.pid} on "):
        save_checkpoint(tmp_path, *made(), step=5)
    assert names(tmp_path) == before
    assert load_checkpoint(tmp_path, *made()) == (1, None)  # a load asks nobody, and takes nothing
    assert other.saves_again() == "step-00000002"


def in_a_child(*args):
    """Does so in a process whose parent, which is this one, does nothing."""
    if os.fork() == 0:
        save_then_wait(*args)
        os._exit(0)
    os.wait()


def save_and_fork(directory, step, conn):
    save_checkpoint(directory, *made(), step=step)
    if os.fork() == 0:
        conn.recv()
        os._exit(0)
    conn.send("saved")
    os.kill(os.getpid(), signal.SIGKILL)


def no_locks(*args):
    raise OSError(errno.ENOLCK, "No locks available")


def without_locks(*args):
    with mock.patch("fcntl.flock", no_locks):
        save_then_wait(*args)


@pytest.fixture
def other_without_locks(tmp_path, monkeypatch):
    """Another job, on a file system that has no locks."""
    monkeypatch.setattr("fcntl.flock", no_locks)
    it = Other(tmp_path, target=without_locks)
    yield it
    it.end()


def test_a_living_job_keeps_its_folder_when_its_launcher_has_ended(tmp_path):
    other = Other(tmp_path, target=in_a_child)
    other.end()  # the parent: a shell that was left, a launcher that was killed
    with pytest.raises(OSError, match=rf"save_checkpoint: {tmp_path} is in use by process \d+ on "):
        save_checkpoint(tmp_path, *made(), step=5)
    assert other.saves_again() == "step-00000002"
    other.conn.send("end")


@pytest.mark.parametrize("change", [dict(host=["elsewhere", 0, 0]), dict(started="earlier"), dict(pid="one")], ids=str)
def test_a_living_job_keeps_its_folder_whatever_is_known_of_its_process(tmp_path, other, change):
    """By the lock, which another machine sees on a file system that both share."""
    found = json.loads((tmp_path / "job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps(found | change))
    with pytest.raises(OSError, match=f"save_checkpoint: {tmp_path} is in use by "):
        save_checkpoint(tmp_path, *made(), step=5)
    assert other.saves_again() == "step-00000002"


def test_a_fork_does_not_keep_its_parents_folder(tmp_path):
    """A data loader's process outlives the training that was killed."""
    other = Other(tmp_path, target=save_and_fork)
    other.process.join()
    save_checkpoint(tmp_path, *made(), step=5)
    other.conn.send("end")


def test_a_folder_that_vanished_is_no_new_one(tmp_path):
    """As under a file system that is mounted no more: nothing is written on what lies below."""
    run, away, model = tmp_path / "run", tmp_path / "away", made(steps=1)
    save_checkpoint(run, *model, step=1)
    run.rename(away)
    for _ in range(2):
        with pytest.raises(OSError, match=rf"save_checkpoint: {run}/job.json, which this job wrote, has gone: "):
            save_checkpoint(run, *model, step=2)
        assert not run.exists() or not list(run.iterdir())
        run.mkdir(exist_ok=True)
    run.rmdir()
    away.rename(run)
    save_checkpoint(run, *model, step=2)
    assert names(run) == {"step-00000001", "step-00000002", "latest"}


def test_a_folder_that_vanishes_during_a_save(tmp_path, monkeypatch):
    model = made()
    save_checkpoint(tmp_path, *model, step=1)
    from tpfuse.training.checkpoint import save

    write = save.write_shard
    monkeypatch.setattr(save, "write_shard", lambda *a: (write(*a), (tmp_path / "job.json").unlink())[0])
    with pytest.raises(OSError, match=r"save_checkpoint: .*job.json, which this job wrote, has gone during the save"):
        save_checkpoint(tmp_path, *model, step=2)


@pytest.mark.parametrize("name", ["latest.new", "job.json"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_no_file_is_written_through_a_link(tmp_path, name, link):
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("PRECIOUS")
    run.mkdir()
    link(precious, run / name)
    save_checkpoint(run, *made(), step=1)
    assert precious.read_text() == "PRECIOUS" and names(run) == {"step-00000001", "latest"}
    assert not any(path.is_symlink() for path in run.iterdir())


def test_handles_of_folders_are_few(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_MOST", 2)
    before = len(os.listdir("/proc/self/fd")) - len(job._locks)
    for i in range(4):
        save_checkpoint(tmp_path / str(i), *made(), step=1)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    for i in range(4):
        save_checkpoint(tmp_path / str(i), *made(), step=2)


def test_a_dead_job_is_followed(tmp_path, other):
    other.process.kill()
    other.process.join()
    save_checkpoint(tmp_path, *made(), step=5)
    assert names(tmp_path) == {"step-00000001", "step-00000005", "latest"}


def test_a_process_that_has_ended_and_is_not_waited_for_is_dead(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        holder = job.this_job("x")._replace(pid=process.pid, started=job._started(process.pid))
        job.write_job(tmp_path / "job.json", holder)
        with pytest.raises(OSError, match=f"in use by process {process.pid}"):
            save_checkpoint(tmp_path, *made(), step=5)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        save_checkpoint(tmp_path, *made(), step=5)


@pytest.mark.parametrize("how", ["another machine", "another start", "unreadable"])
def test_a_job_that_may_be_dead_is_overtaken_and_told(tmp_path, other_without_locks, how):
    other = other_without_locks
    found = json.loads((tmp_path / "job.json").read_text())
    changes = {
        "another machine": dict(host=["elsewhere", 0, 0]),
        "another start": dict(started="earlier"),
        "unreadable": dict(pid="one"),
    }
    (tmp_path / "job.json").write_text(json.dumps(found | changes[how]))
    save_checkpoint(tmp_path, *made(), step=5)
    before = names(tmp_path)
    said = other.saves_again()
    assert said.startswith(f"OSError: save_checkpoint: {tmp_path} was taken over by process {os.getpid()} on ")
    assert names(tmp_path) == before and (tmp_path / "latest").read_text() == "step-00000005\n"
    save_checkpoint(tmp_path, *made(), step=6)


def test_many_models_of_a_process_are_one_job(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, *made(seed=step), step=step)
    first = (tmp_path / "job.json").read_text()
    save_checkpoint(tmp_path / "other", *made(), step=1)
    assert (tmp_path / "job.json").read_text() == first


def test_a_load_takes_nothing(tmp_path, other):
    job_before = (tmp_path / "job.json").read_bytes()
    model, optimizer = made()
    load_checkpoint(tmp_path, model, optimizer)
    save_checkpoint(tmp_path / "elsewhere", model, optimizer, step=2)
    assert (tmp_path / "job.json").read_bytes() == job_before and other.saves_again() == "step-00000002"


def test_overtaken_during_a_save(tmp_path, monkeypatch):
    model, optimizer = made()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    from tpfuse.training.checkpoint import save

    def overtaken(path, pieces):
        job.write_job(tmp_path / "job.json", job.this_job("another"))
        return write(path, pieces)

    write = save.write_shard
    monkeypatch.setattr(save, "write_shard", overtaken)
    with pytest.raises(OSError, match=r"save_checkpoint: .* was taken over by process .* during the save"):
        save_checkpoint(tmp_path, model, optimizer, step=2)
    assert names(tmp_path) == {"step-00000001", "latest"} and (tmp_path / "latest").read_text() == "step-00000001\n"


def unfinished(directory, name, writer, age=0.0):
    path = directory / name
    path.mkdir()
    (path / "shard-00000.safetensors").write_bytes(b"half")
    if writer is not None:
        (path / "saving.json").write_text(json.dumps(writer._asdict()))
    for file in (*path.iterdir(), path):
        os.utime(file, (time.time() - age,) * 2)


def test_what_another_job_may_be_writing_stays(tmp_path, other):
    """Live on this machine, or elsewhere and not silent for an hour."""
    live = job.read_job(tmp_path / "job.json")
    (tmp_path / "job.json").unlink()
    me = job.this_job("x")
    away = me._replace(host=["elsewhere", 0, 0])
    dead = live._replace(started="before")
    unfinished(tmp_path, "step-00000010", live)
    unfinished(tmp_path, "step-00000011", live, age=1e5)
    unfinished(tmp_path, "step-00000012", away)
    unfinished(tmp_path, "step-00000013", away, age=1e5)
    unfinished(tmp_path, "step-00000014", dead)
    unfinished(tmp_path, "step-00000015", me)  # of a save of this process, which has ended
    unfinished(tmp_path, "step-00000016", None)
    unfinished(tmp_path, "step-00000017", None, age=1e5)
    (tmp_path / "step-00000010" / "meta.json").write_text('{"name": "step-00000010"}')  # about to be published
    save_checkpoint(tmp_path, *made(), step=20)
    stays = {f"step-000000{n}" for n in (10, 11, 12, 16, 20)}
    assert names(tmp_path) == stays | {"step-00000001", "latest"}
    assert folder._STALE < 1e5


JUNK = [b"", b"[]", b"{", b"null", b'{"pid": 1}', b"[" * 100_000, b"\xff"]


@pytest.mark.parametrize("text", JUNK, ids=lambda text: repr(text[:10]))
def test_a_job_file_that_is_none_stops_nobody(tmp_path, text):
    (tmp_path / "job.json").write_bytes(text)
    save_checkpoint(tmp_path, *made(), step=1)
    assert load_checkpoint(tmp_path, *made()) == (1, None)
