"""The small cases once more under compute-sanitizer, which looks at the library's kernels only."""

import os
import subprocess
import sys

from bench.gpu_day.part import Context, tool
from bench.gpu_day.parts.check import every_kernel
from bench.gpu_day.tools import sanitized
from tpfuse.tools.bench.definition import discover

OPTIONS = {"memcheck": ["--report-api-errors", "no"]}  # torch asks CUDA what it expects to be refused
TINY = "layer_norm", "linear_gelu"


def jobs(context: Context, tool: str) -> list[str]:
    return [tool]


def run(job: str, context: Context) -> None:
    names = [word for name in every_kernel() for word in ("--kernel-name", f"kns={name}")]
    clean = {row["case"]: row for row in context.rows(job) if not row.get("findings", True)}  # of an earlier try
    for row in clean.values():
        context.emit(row)
    ops = [name for name in (TINY if context.tiny else discover()) if name not in clean]
    program = [sys.executable, "-u", "-m", "bench.gpu_day.parts.check", *ops, *["--rehearse"] * context.tiny]
    variables = dict(
        PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )  # every tensor is an allocation: what lies beyond it is not ours
    options = ["--tool", job, "--launch-timeout", "120", *OPTIONS.get(job, [])]  # torch's import takes its time
    watched, errors = [tool("compute-sanitizer"), *options, *names, *program], 0
    with subprocess.Popen(
        watched, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for row in sanitized(process.stdout):
            context.emit(row)
            errors += row.get("errors", 0)
    if errors:
        raise AssertionError(f"{job}: {errors} errors")
    if process.returncode:
        raise RuntimeError(f"{job}: no errors, but the program ended with {process.returncode}")


def headline(rows: list[dict]) -> str:
    clean = [row for row in rows if "case" in row and not row["findings"]]
    summary = next((row["summary"] for row in rows if "summary" in row), "no summary")
    return f"{len(clean)} ops without a finding; {summary}"
