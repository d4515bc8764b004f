"""Every kernel as its launcher would launch it compiles for GPUs that are not here: no spills, and shared memory that they have.

Every day: the first call of each op for sm_90.  Slow: all calls, for sm_80 and gfx942 too.  The table of what came out is checked in.
"""

import importlib
import json
import os
import pkgutil
import subprocess
import sys

import pytest

pytest.importorskip("triton")
import triton

import tpfuse.kernels
from bench.compile._compile import capture
from bench.compile._pool import ARCHS, HERE, OPS, wanted

TABLE = HERE / "table.md"


def compiled(*options: str) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.compile", "--json", *options]
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def everyday() -> list[dict]:
    return compiled("--default", "--arch", "sm_90")


@pytest.fixture(scope="module")
def everything() -> list[dict]:
    return compiled()


def assert_sound(rows: list[dict]) -> None:
    assert rows
    for row in rows:
        assert row["spill_bytes"] <= row["spills_allowed"], row
        assert row["why"] or not row["spills_allowed"], "an exception carries its reason"
        assert row["shared_bytes"] <= row["shared_limit"], row
        assert all(row["opcodes"][name] for name in row["uses"]), row


def assert_in_table(rows: list[dict]) -> None:
    table = TABLE.read_text()
    if f"Triton {triton.__version__}:" not in table:
        pytest.skip(f"the table was made by another Triton than {triton.__version__}")
    missing = [row["line"] for row in rows if row["line"] not in table]
    assert not missing, "no longer what the table says; look at the change, then python -m bench.compile --write:\n" + "\n".join(missing)


@pytest.mark.parametrize("op", OPS)
def test_default_calls(everyday, op):
    rows = [row for row in everyday if row["op"] == op]
    assert_sound(rows)
    assert_in_table(rows)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_all_calls_on_all_archs(everything, op):
    rows = [row for row in everything if row["op"] == op]
    assert {row["arch"] for row in rows} == set(ARCHS)
    assert_sound(rows)
    assert_in_table(rows)


@pytest.mark.slow
def test_the_table_holds_nothing_else(everything):
    assert TABLE.read_text().count("\n| ") == 1 + len(everything)


def _name(kernel) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def test_every_kernel_is_compiled():
    modules = [importlib.import_module(f"tpfuse.kernels.{m.name}") for m in pkgutil.iter_modules(tpfuse.kernels.__path__)]
    found = (value for module in modules for name, value in vars(module).items() if name.endswith("_kernel") and hasattr(value, "fn"))
    kernels = {_name(kernel) for kernel in found}
    calls = [importlib.import_module(f"bench.compile.{op}").CALLS[label] for op, label, _ in wanted(OPS, ["sm_90"], False)]
    launched = {_name(launch.kernel) for call in calls for launch in capture(call.run, "sm_90")}
    assert kernels and kernels <= launched, f"no call compiles {sorted(kernels - launched)}"
