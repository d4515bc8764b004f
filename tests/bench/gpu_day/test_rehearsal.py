"""All of a day on a CPU."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from bench.gpu_day.day import Day
from bench.gpu_day.part import Part
from bench.gpu_day.plan import DAY, SETUP, parts
from bench.gpu_day.results import NAME, Results, load
from tpfuse.tools.bench.definition import discover

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.slow
def test_a_rehearsal(tmp_path):
    """Every part does all of its jobs; what leaves is small and marked; a second call has nothing left to do."""
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    out, again = tmp_path / "out", tmp_path / "again"
    command = [sys.executable, "-m", "bench.gpu_day", "--rehearse", "--minutes", "40", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    data = load(out)
    assert data["rehearsed"] and {part["status"] for part in data["parts"].values()} == {"done"}
    assert list(data["parts"]) == [part.name for part in DAY]
    found = Results(out / NAME, True)
    found.data = data
    every = found.rows()
    assert all(every.values()) and not [row for some in every.values() for row in some if "left_out" in row]
    assert {row["op"] for row in every["correctness"]} == set(discover())
    assert {row["op"] for name in ("rows of worth", "other rows") for row in every[name] if "op" in row} == set(
        discover()
    )
    assert {row["provider"] for row in every["layers"]} == {"tpfuse", "torch", "compile"}
    assert {row["what"] for row in every["CUDA graphs"]} == {"block", "training step"}
    files = list(out.iterdir())
    assert len(files) <= 8 and all(re.fullmatch(r"[\w.-]+", f.name) and f.stat().st_size < 16e6 for f in files)
    small = Day(again, 60.0, True, resume=out, plan=[[part] for part in parts(True) if part.name != SETUP])
    assert small.run() == 0 and load(again)["parts"]["layers"] == data["parts"]["layers"]


def test_a_part_is_data():
    """A process is told its part in full."""
    assert all(Part(**json.loads(json.dumps(vars(each)))) for each in DAY)
