"""The output of compute-sanitizer and ncu, real and of the programs that stand in for them."""

import subprocess
import sys

import pytest

from bench.gpu_day import tools
from bench.gpu_day.parts import check

SANITIZED = """========= COMPUTE-SANITIZER
case layer_norm
right: True
case linear
========= Invalid __global__ write of size 4 bytes
=========     at _bwd_kernel+0x70 in gemm.py:8
=========     by thread (32,0,0) in block (3,0,0)
=========
========= ERROR SUMMARY: 1 error
"""


def test_findings_belong_to_the_case_that_ran():
    *found, summary = tools.sanitized(SANITIZED.splitlines())
    write = "Invalid __global__ write of size 4 bytes at _bwd_kernel+0x70 in gemm.py:8"
    assert found == [dict(case="layer_norm", findings=[]), dict(case="linear", findings=[write])]
    assert summary == dict(summary="1 error", errors=1)
    race = ["case a", "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)"]
    assert list(tools.sanitized(race))[-1]["errors"] == 2
    with pytest.raises(RuntimeError, match="no summary; its last line is 'Device not supported'"):
        list(tools.sanitized(["case a", "Device not supported"]))


NAMES = [
    "ID",
    "Process ID",
    "Kernel Name",
    "Device",
    "CC",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__time_duration.sum",
    "launch__registers_per_thread",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
]
NCU = """==PROF== Connected to process 1234 (/usr/bin/python3.12)
==PROF== Profiling "_dkdv_kernel" - 0: 0%....50%....100% - 12 passes
some line of the program
==PROF== Disconnected from process 1234
{names}
"","","","","","%","ms","register/thread","%","%","inst","inst"
"0","1234","_dkdv_kernel","0","9.0","12.34","1.5","255","n/a","61.0","0.5","1,234.5"
""".replace("{names}", ",".join(f'"{name}"' for name in NAMES))


def test_counters_are_read_by_name_and_unit():
    (found,) = tools.counters(NCU)
    assert found == dict(
        kernel="_dkdv_kernel", dram_percent=12.34, us=1500.0, registers=255.0, tensor_percent=61.0,
        stalls=dict(long_scoreboard=1234.5, wait=0.5),
    )  # fmt: skip


@pytest.mark.parametrize(
    "text, message",
    [
        ("==PROF== x\n==ERROR== ERR_NVGPUCTRPERM - The user does not", "ERR_NVGPUCTRPERM"),
        ("", "nothing"),
        ("\n".join(NCU.splitlines()[:-1]), "without a kernel"),
    ],
)
def test_what_ncu_refuses_is_said(text, message):
    with pytest.raises(RuntimeError, match=message):
        tools.counters(text)


def test_the_stand_ins_speak_the_tools_languages(tmp_path):
    tools.stand_ins(tmp_path / "bin")
    program = [sys.executable, "-c", "print('case a')"]
    run = lambda *words: subprocess.run([str(word) for word in words], capture_output=True, text=True).stdout
    printed = run(tmp_path / "bin/compute-sanitizer", "--tool", "racecheck", *program)
    assert list(tools.sanitized(printed.splitlines())) == [
        dict(case="a", findings=[]),
        dict(summary="0 hazards displayed (0 errors, 0 warnings)", errors=0),
    ]
    (found,) = tools.counters(run(tmp_path / "bin/ncu", "--csv", "--kernel-name", "_some_kernel", *program))
    assert (found["kernel"], found["us"], found["registers"]) == ("_some_kernel", 12.345, 64.0)


def test_every_kernel_is_watched():
    assert {"_dkdv_kernel", "_row_sums_kernel", "_contract_kernel"} <= set(check.every_kernel())
