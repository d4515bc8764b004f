"""Processes of this machine: they end with the one that made them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpfuse.tools.ledger.processes import on_ranks

ENDS = """
from tests.tools.ledger.test_processes import wait
from tpfuse.tools.ledger.processes import on_ranks
if __name__ == "__main__":
    on_ranks(1, wait, {path!r})
"""


def wait(path):
    """Does not end at Ctrl-C, as a rank that waits for another inside torch."""
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # so that it prints nothing either
    Path(path).touch()
    time.sleep(1000)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_ranks_that_wait(tmp_path, number):
    """They hold the pipe of its output, and no folder is left."""
    (tmp_path / "ends.py").write_text(ENDS.format(path=str(tmp_path / "begun")))
    (temporary := tmp_path / "temporary").mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(temporary)}
    command = [sys.executable, str(tmp_path / "ends.py")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    try:
        while not (tmp_path / "begun").exists() and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode != 0 and (tmp_path / "begun").exists()
        assert [path for path in temporary.iterdir() if path.is_dir()] == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_there_are_not_too_many():
    with pytest.raises(ValueError, match="on_ranks: there must be at most 256 processes on this machine, got 257"):
        on_ranks(257, wait, "")
