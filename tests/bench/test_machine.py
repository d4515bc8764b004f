"""Results say their machine, and tables have a column for each kind of processor."""

import json
import os
import subprocess
import sys

import pytest

from bench import machine, measured
from tpfuse.kernels.runtime.processor import LIMITS

QUICK = dict(processor="Some CPU", instructions="AVX512 amx_bf16", limits={}, cores=8, torch="2.13", date="2026-01-02")
SLOW = QUICK | dict(instructions="AVX2 amx_bf16", limits=dict(ATEN_CPU_CAPABILITY="avx2"))


def result(of, fp32, bf16):
    row = lambda dtype, speed: dict(
        kind="gpt2", dtype=dtype, attention_dropout=0.0, provider="tpfuse fastest",
        speed=[speed - 0.1, speed, speed + 0.1], saved_sbh=34.0, peak_rss_mib=100.0,
    )  # fmt: skip
    return dict(rows=[row("fp32", fp32), row("bf16", bf16)]) | (dict(machine=of) if of else {})


def test_a_column_for_each_kind_of_processor_and_the_claims_that_flip(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    for name, value in {"train_step.avx2": result(SLOW, 0.9, 1.3), "train_step": result(QUICK, 1.1, 1.2)}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    lines = measured.train_step(measured.of_kinds("train_step")).splitlines()
    column = "tokens/s relative to DTensor (quartiles)"
    assert f"| {column}: Some CPU, AVX512 amx_bf16 | {column}: Some CPU, limited to AVX2 |" in lines[0]
    assert "| gpt2 | fp32 | 0 | tpfuse fastest | 1.10 (1.00 to 1.20) | 0.90 (0.80 to 1.00) | 34.0 | 100 |" in lines
    where = "Some CPU, AVX512 amx_bf16, 8 cores, torch 2.13, 2026-01-02; Some CPU, limited to AVX2"
    assert lines[5].startswith(f"Measured on: {where}")
    assert lines[-1] == "Above 1 on one kind of processor and below it on another: gpt2 fp32 0 tpfuse fastest."


def test_one_result_has_one_column_and_says_where_it_was_measured():
    text = measured.train_step([result(QUICK, 0.9, 1.2)])
    assert "(quartiles) |" in text and text.endswith("2026-01-02.") and "Above 1" not in text
    assert measured.train_step([result(None, 1.1, 1.2)]).endswith("Measured before results said their processor.")


@pytest.mark.slow
def test_a_limit_of_the_instructions_is_said():
    code = "from bench import machine; m = machine.this_machine(); print(m['limits'], machine.kind(m))"
    limit = {name: value for name, value in os.environ.items() if name not in LIMITS}
    limit["ATEN_CPU_CAPABILITY"] = "default"
    told = subprocess.run([sys.executable, "-c", code], env=limit, capture_output=True, text=True, check=True).stdout
    assert "{'ATEN_CPU_CAPABILITY': 'default'}" in told and "limited to" in told
    assert {"processor", "cores", "date", "libraries"} <= machine.this_machine().keys()
