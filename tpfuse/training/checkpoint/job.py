"""One folder, one job: job.json names the process whose checkpoints a folder holds.

A save takes the folder; a load takes nothing and asks nobody.  The holder keeps job.json locked (``flock``) as long as
its process lives, whoever its parent is by then, and a newcomer is refused while it is, or while the holder is seen
among this machine's processes, for file systems without locks.  Else it takes the folder over, and the earlier job,
should it be alive after all, is refused at its next save.
"""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...models.files.disk import new_file, write_whole
from ...ranks.shared_memory import host
from .errors import errors_at
from .meta import read_text

FILE = "job.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOST = 64  # folders of a process whose files stay open: handles are few, and of the others the process is seen
_mine: "dict[tuple[int, Path], JobProcess]" = {}  # by process and folder: a fork is another job
_locks: dict[Path, BinaryIO] = {}  # by folder, the last ones that were taken


class JobProcess(NamedTuple):
    """The process that saves in a folder, rank 0 of its job, and a token of its own."""

    host: list[Any]
    pid: int
    started: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host[0]}"


def this_job(token: str) -> JobProcess:
    return JobProcess(host=_host(), pid=os.getpid(), started=_started(os.getpid()) or "", token=token)


def take(directory: Path) -> JobProcess:
    """Makes ``directory`` this job's.

    OSError where another job is there or came after this one, or where what this job saved there has gone: below a file
    system that is not mounted any more another folder would take its place.
    """
    key = os.getpid(), directory.resolve()
    if key in _mine:
        check_held(directory, _mine[key], "")
        return _mine[key]
    with errors_at(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / FILE) as free:
        holder = read_job(directory / FILE)
        if not free or (holder is not None and is_alive(holder) and holder.pid != os.getpid()):
            raise OSError(f"{directory} is in use by {holder or 'another job'}, another job: end it, or save elsewhere")
        job = this_job(secrets.token_hex(8))
        _hold(directory, job)
    _mine[key] = job
    return job


def check_held(directory: Path, job: JobProcess, moment: str = " during the save") -> None:
    """OSError where another job took the folder over, or the folder is not the one that this job took."""
    path, locked = directory / FILE, _locks.get(directory.resolve())
    if not os.path.lexists(path):
        raise OSError(
            f"{path}, which this job wrote, has gone{moment}: the folder was removed, or its file system is not"
            " mounted any more; bring it back, or save elsewhere"
        )
    if locked is not None and os.path.samestat(os.fstat(locked.fileno()), os.lstat(path)):
        return  # whatever stands in it
    holder = read_job(path)
    if holder is None or holder.token != job.token:
        means = moment or ", another job: this one may not save there any more"
        raise OSError(f"{directory} was taken over by {holder or 'another job'}{means}")


def _hold(directory: Path, job: JobProcess) -> None:
    """Puts a job's file in place, locked before it is seen."""
    path = directory / FILE
    new = path.with_name(f"{FILE}.{job.token}")
    with errors_at(path):
        file = new_file(new)
        try:
            _lock(file)
            file.write(_text(job))
            file.flush()
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            file.close()
            raise
    _locks[directory.resolve()] = file
    for folder in list(_locks)[:-_MOST]:
        _locks.pop(folder).close()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Locks a job's file, where there is one -> whether nobody else has it, or one in its place."""
    try:
        file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError:  # none, or none that can be opened: what is there is no job's
        yield True
        return
    with file:
        yield _lock(file) and os.path.samestat(os.fstat(file.fileno()), os.lstat(path))


def _lock(file: BinaryIO) -> bool:
    """Locks a file until its process ends -> False where another process has; True on file systems without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _text(job: JobProcess) -> bytes:
    return json.dumps(job._asdict()).encode()


def write_job(path: Path, job: JobProcess) -> None:
    """Writes a file that names a job, whole or not at all."""
    with errors_at(path):
        write_whole(path, _text(job), durable=False)


def read_job(path: Path) -> JobProcess | None:
    """Returns the job that a file names; None where there is none, or nothing that can be read."""
    try:
        fields = json.loads(read_text(path))
        job = JobProcess(*(fields[name] for name in JobProcess._fields))
        types = [list, int, str, str]
        return job if [type(value) for value in job] == types and len(job.host) == len(_host()) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def is_here(job: JobProcess) -> bool:
    """Returns whether the process ran where this one can look it up."""
    return job.host == _host() and _started(os.getpid()) is not None


def is_alive(job: JobProcess) -> bool:
    return is_here(job) and _started(job.pid) == job.started


def _host() -> list[Any]:
    """Returns the machine, and on Linux the space of process numbers, which another container does not share."""
    numbers = "/proc/self/ns/pid"
    return [*host(), os.stat(numbers).st_ino if os.path.exists(numbers) else 0]


def _started(pid: int) -> str | None:
    """Returns when a process started; None where it is not alive, or the system does not tell."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else f"{_BOOT.read_text().strip()} {fields[18]}"
    except (OSError, ValueError, IndexError):
        return None


def _let_go() -> None:
    """A forked process does not keep its parent's folders locked."""
    for file in _locks.values():
        file.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
