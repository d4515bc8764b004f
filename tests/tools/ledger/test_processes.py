"""Processes of this machine: they end with the one that made them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
def test_ctrl_c_ends_ranks_that_wait(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS.format(path=str(tmp_path / "begun")))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen([sys.executable, str(tmp_path / "ends.py")], env=environment)
    try:
        while not (tmp_path / "begun").exists() and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) != 0 and (tmp_path / "begun").exists()
    finally:
        process.kill()
