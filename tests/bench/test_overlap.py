"""The bench runs, shaped where namespaces can be made and unshaped where not, and its rows say what was sent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = "--width 64 --heads 4 --seq 32 --batch 4 --layers 1 --rounds 2 --dtype fp32 --rate 1".split()


@pytest.mark.slow
def test_a_tiny_run(tmp_path):
    command = [sys.executable, "-m", "bench.overlap", *TINY, "--json", "rows.json", "--plot", "plot.svg"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "rows.json").read_text())
    assert ("no shaped link" in done.stderr) == (result["arguments"]["rate"] == [0])
    one = 64 * 64 * 4  # m D elements, 2 times in forward, 3 in backward
    assert [(row["part"], row["backward"], row["bytes"]) for row in result["rows"][:4]] == [
        (part, backward, times * one) for part in ("MLP", "attention") for backward, times in ((False, 2), (True, 5))
    ]
    assert [row["part"] for row in result["rows"][4:]] == ["train step"]
    assert all(
        set(row["seconds"]) == {"off", "on", "auto", "DTensor", "compute", "communication"} for row in result["rows"]
    )
    assert (tmp_path / "plot.svg").stat().st_size > 0
