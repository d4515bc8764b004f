"""ncu's counters of the five longest kernels.

python -m bench.gpu_day.parts.counters OP SHAPE MODE [--rehearse]     makes the call twice: what ncu watches
"""

import pathlib
import subprocess
import sys

from bench.gpu_day.part import Absent, Context, tool
from bench.gpu_day.parts.kernels import call_of, longest
from bench.gpu_day.tools import SECTIONS, counters


def jobs(context: Context) -> list[str]:
    """Of "case mode kernel"; one that says why where there is nothing to look at."""
    found = longest(context.rows("time of each kernel"), 2 if context.tiny else 5)
    return [f"{row['case']} {row['mode']} {row['kernel']}" for row in found] or ["no kernel was timed"]


def run(job: str, context: Context) -> None:
    ncu, words = tool("ncu"), job.split()
    if len(words) != 4:
        raise Absent(job)
    sections = [word for name in SECTIONS for word in ("--section", name)]
    how = ["--csv", "--page", "raw", "--clock-control", "none", *sections, "--kernel-name", words[3]]
    how += ["--launch-skip", "1", "--launch-count", "1"]
    program = [sys.executable, "-m", "bench.gpu_day.parts.counters", *words[:3], *["--rehearse"] * context.tiny]
    done = subprocess.run([ncu, *how, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout[-2000:])
    for row in counters(done.stdout):
        context.emit(dict(case=" ".join(words[:2]), mode=words[2]) | row)


def headline(rows: list[dict]) -> str:
    percent = lambda row, key: f"{row[key]:.0f} %" if key in row else "?"
    cells = [f"{r['kernel']} dram {percent(r, 'dram_percent')} sm {percent(r, 'sm_percent')}" for r in rows]
    return ", ".join(cells)


def main(argv: list[str]) -> int:
    tiny = "--rehearse" in argv
    if tiny:
        from bench.gpu_day import rehearsal

        rehearsal.install(__name__)
    op, shape, mode = argv[:3]
    call = call_of(f"{op} {shape}", mode, Context(tiny, pathlib.Path(), {}, print))
    call()
    call()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
