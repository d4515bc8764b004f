"""Runs the examples as a user does, in real processes under torchrun or plain python.

``forked`` processes start at once (tests/forking.py) and torchrun runs in one of them, with its own options for it
(--run-path, --start-method); without it the command is exactly a user's, and every process imports torch for itself.
"""

import contextlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.forking import START_METHOD, forking

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
KILLED = Path(__file__).with_name("killed.py")


def example(name: str):
    """An example as a module of this process, its own helpers found as when it is run."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def arguments(script: str, *args, killed: tuple | None = None) -> list[str]:
    """The script and its arguments; ``killed`` (where, count): see killed.py."""
    before = (KILLED, *killed) if killed else ()
    return [*map(str, before), str(EXAMPLES / script), *map(str, args)]


def torchrun(procs: int) -> list[str]:
    return ["--standalone", "--nproc-per-node", str(procs)]


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return env | dict(
        OMP_NUM_THREADS="1",
        PYTHONPATH=str(ROOT),
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        MPLCONFIGDIR="/tmp/matplotlib",
    )


def _main(target: list[str], procs: int, env: dict[str, str], out: str, err: str) -> None:
    """In the forked process: what ``python target`` does, or ``torchrun target``."""
    os.setsid()
    for path, descriptor in (out, 1), (err, 2):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(env)
    sys.path.insert(0, str(EXAMPLES))
    if procs:
        from torch.distributed.run import main

        method = "fork" if START_METHOD == "forkserver" else START_METHOD
        main([*torchrun(procs), "--run-path", "--start-method", method, *target])
    else:
        sys.argv = target
        runpy.run_path(target[0], run_name="__main__")


@contextlib.contextmanager
def started(target: list[str], procs: int, out: Path, err: Path) -> Iterator:
    """The forked process; it and all that it started are gone afterwards."""
    process = forking().Process(target=_main, args=(target, procs, environment(), str(out), str(err)))
    process.start()
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def run(
    script: str, *args, procs: int = 1, killed: tuple | None = None, forked: bool = True, timeout: float = 300
) -> subprocess.CompletedProcess:
    """``procs`` 0 is plain python."""
    target = arguments(script, *args, killed=killed)
    if not forked:
        command = [sys.executable, *(("-m", "torch.distributed.run", *torchrun(procs)) if procs else ()), *target]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        with started(target, procs, out, err) as process:
            process.join(timeout)
            code = process.exitcode
        assert code is not None, f"not done in {timeout} s: {out.read_text()}{err.read_text()}"
        return subprocess.CompletedProcess(target, code, out.read_text(), err.read_text())


def ok(script: str, *args, **how) -> str:
    """Runs it to its good end -> stdout."""
    done = run(script, *args, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def interrupted(script: str, *args, procs: int, when, send, timeout: float = 300) -> tuple[int | None, str]:
    """Starts it, with steps that wait, calls ``send(its process id)`` once ``when()`` holds -> (exit code, stdout and
    stderr)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        with started(arguments(script, *args, killed=("slow", 2)), procs, out, out) as process:
            deadline = time.monotonic() + timeout
            while not when():
                assert process.is_alive() and time.monotonic() < deadline, out.read_text()
                time.sleep(0.01)
            workers = children(process.pid)
            send(process.pid)
            process.join(timeout)
            while any(running(worker) for worker in workers):
                assert time.monotonic() < deadline, out.read_text()
                time.sleep(0.05)
            return process.exitcode, out.read_text()


def running(pid: int) -> bool:
    """Whether there is such a process, and no mere entry that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
