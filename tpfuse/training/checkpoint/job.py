"""One folder, one job: job.json names the process whose checkpoints a folder holds.

A save takes the folder; a load takes nothing and asks nobody.  A newcomer is refused only where the holder is seen to
be alive: on this machine, the same process (by its number and start), still under the parent that started it.  Else
it takes the folder over, and the earlier job, should it be alive after all, is refused at its next save.
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from ...models.files.disk import write_whole
from ...parallel import host
from .errors import errors_at
from .meta import read_text

FILE = "job.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_mine: "dict[tuple[int, Path], JobProcess]" = {}  # by process and folder: a fork is another job


class JobProcess(NamedTuple):
    """The process that saves in a folder, rank 0 of its job, and a token of its own."""

    host: list[Any]
    pid: int
    started: str
    parent: int
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host[0]}"


def this_job(token: str) -> JobProcess:
    """Returns this process."""
    started, parent = _started(os.getpid()) or ("", os.getppid())
    return JobProcess(host=_host(), pid=os.getpid(), started=started, parent=parent, token=token)


def take(directory: Path) -> JobProcess:
    """Makes ``directory`` this job's; OSError where another job is there, or came after this one."""
    key = os.getpid(), directory.resolve()
    holder, mine = read_job(directory / FILE), _mine.get(key)
    if holder is not None and mine is not None and holder.token != mine.token:
        raise OSError(f"{directory} was taken over by {holder}, another job: this one may not save there any more")
    if holder is None or mine is None:
        if holder is not None and is_alive(holder) and not _is_orphan(holder) and holder.pid != os.getpid():
            raise OSError(f"{directory} is in use by {holder}, another job: end it, or save elsewhere")
        mine = _mine[key] = this_job(secrets.token_hex(8))
        write_job(directory / FILE, mine)
    return mine


def check_held(directory: Path, job: JobProcess) -> None:
    """OSError where another job took the folder over."""
    holder = read_job(directory / FILE)
    if holder is None or holder.token != job.token:
        raise OSError(f"{directory} was taken over by {holder or 'another job'} during the save")


def write_job(path: Path, job: JobProcess) -> None:
    """Writes a file whole or not at all; two jobs may write it at once."""
    with errors_at(path):
        write_whole(path, json.dumps(job._asdict()).encode(), suffix=f".{job.token}", durable=False)


def read_job(path: Path) -> JobProcess | None:
    """Returns the job that a file names; None where there is none, or nothing that can be read."""
    try:
        job = JobProcess(**json.loads(read_text(path)))
        types = [list, int, str, int, str]
        return job if [type(value) for value in job] == types and len(job.host) == len(_host()) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def is_here(job: JobProcess) -> bool:
    """Returns whether the process ran where this one can look it up."""
    return job.host == _host() and _started(os.getpid()) is not None


def is_alive(job: JobProcess) -> bool:
    """Returns whether the process is seen to be alive."""
    process = _started(job.pid) if is_here(job) else None
    return process is not None and process[0] == job.started


def _is_orphan(job: JobProcess) -> bool:
    process = _started(job.pid)
    return process is not None and process[1] != job.parent


def _host() -> list[Any]:
    """Returns the machine, and on Linux the space of process numbers, which another container does not share."""
    numbers = "/proc/self/ns/pid"
    return [*host(), os.stat(numbers).st_ino if os.path.exists(numbers) else 0]


def _started(pid: int) -> tuple[str, int] | None:
    """Returns when a process started and its parent; None where it is not alive, or the system does not tell."""
    try:
        state, parent, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else (f"{_BOOT.read_text().strip()} {fields[17]}", int(parent))
    except (OSError, ValueError, IndexError):
        return None
