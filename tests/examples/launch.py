"""Runs the examples as a user does: real processes under torchrun, or plain python."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

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


def command(script: str, *args, procs: int = 1, killed: tuple | None = None) -> list[str]:
    """``procs`` 0 is plain python; ``killed`` (where, count): see killed.py."""
    target = [str(EXAMPLES / script), *map(str, args)]
    if killed:
        target = [str(KILLED), *map(str, killed), *target]
    if not procs:
        return [sys.executable, *target]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return [sys.executable, "-m", "torch.distributed.run", "--master-port", str(port), "--nproc-per-node", str(procs), *target]


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return env | dict(
        OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", MPLCONFIGDIR="/tmp/matplotlib"
    )


def run(script: str, *args, timeout: float = 300, **how) -> subprocess.CompletedProcess:
    return subprocess.run(command(script, *args, **how), env=environment(), capture_output=True, text=True, timeout=timeout)


def ok(script: str, *args, **how) -> str:
    """Runs it to its good end -> stdout."""
    done = run(script, *args, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def interrupted(script: str, *args, when, number: signal.Signals, timeout: float = 300, **how) -> tuple[int, str]:
    """Starts it, sends the launcher a signal once ``when()`` holds -> (exit code, stdout and stderr)."""
    process = subprocess.Popen(
        command(script, *args, **how),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + timeout
        while not when():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.01)
        process.send_signal(number)
        return process.wait(timeout), process.communicate()[0]
    finally:
        process.kill()
        process.wait()
