"""ncu's counters of the five longest kernels.

python -m bench.gpu_day.parts.counters OP SHAPE MODE [--rehearse]     makes the call twice: what ncu watches
"""

import pathlib
import subprocess
import sys

from bench.gpu_day.part import Absent, Context, tool
from bench.gpu_day.parts.kernels import call_of, longest
from bench.gpu_day.rehearsal import rehearses
from bench.gpu_day.tools import SECTIONS, counters


def jobs(context: Context) -> list[str]:
    """Returns jobs of the form "case mode kernel"; one that says why where no kernel was timed."""
    kernels = longest(context.rows("time of each kernel"), 2 if context.tiny else 5)
    return [f"{row['case']} {row['mode']} {row['kernel']}" for row in kernels] or ["no kernel was timed"]


def run(job: str, context: Context) -> None:
    ncu, fields = tool("ncu"), job.split()
    if len(fields) != 4:
        raise Absent(job)
    sections = [word for name in SECTIONS for word in ("--section", name)]
    options = ["--csv", "--page", "raw", "--clock-control", "none", *sections, "--kernel-name", fields[3]]
    options += ["--launch-skip", "1", "--launch-count", "1"]
    program = [sys.executable, "-m", "bench.gpu_day.parts.counters", *fields[:3], *["--rehearse"] * context.tiny]
    result = subprocess.run([ncu, *options, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(result.stdout[-2000:])
    for row in counters(result.stdout):
        context.emit(dict(case=" ".join(fields[:2]), mode=fields[2]) | row)


def headline(rows: list[dict]) -> str:
    percent = lambda row, key: f"{row[key]:.0f} %" if key in row else "?"
    cells = [f"{r['kernel']} dram {percent(r, 'dram_percent')} sm {percent(r, 'sm_percent')}" for r in rows]
    return ", ".join(cells)


def main(argv: list[str]) -> int:
    tiny = rehearses(argv, __name__)
    op, shape, mode = argv[:3]
    call = call_of(f"{op} {shape}", mode, Context(tiny, pathlib.Path(), {}, print))
    call()
    call()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
