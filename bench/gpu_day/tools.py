"""compute-sanitizer and ncu: their output read, and programs that stand in for them in a rehearsal."""

import csv
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

# ---- compute-sanitizer: what it says of itself and of errors begins with nine signs of equality ----

SUMMARY = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (.*)$")
COUNTED = re.compile(r"(\d+) (?:error|hazard)s?")
FINDING = re.compile(r"^========= (\S.*)$")  # its details are indented, of which one names the kernel
WHERE = re.compile(r"^========= +(at .*)$")
CASE = re.compile(r"^case (\S+)$")  # printed by the program that is watched


def sanitized(lines: Iterable[str]) -> Iterator[dict]:
    """Yields {case, findings} as cases end, then {summary, errors}.  RuntimeError without a summary: it did not run."""
    case, findings, final, summary = "", [], "", None
    for line in map(str.rstrip, lines):
        final = line or final
        if begun := CASE.match(line):
            if case:
                yield dict(case=case, findings=findings)
            case, findings = begun[1], []
        elif match := SUMMARY.match(line):
            summary = match[1]
        elif (match := FINDING.match(line)) and "COMPUTE-SANITIZER" not in line:
            findings.append(match[1])
        elif (match := WHERE.match(line)) and findings and " at " not in findings[-1]:
            findings[-1] += f" {match[1]}"
    if case:
        yield dict(case=case, findings=findings)
    if summary is None:
        raise RuntimeError(f"compute-sanitizer gave no summary; its last line is {final!r}")
    yield dict(summary=summary, errors=max(map(int, COUNTED.findall(summary)), default=0))


# ---- ncu --csv --page raw: a line of names, a line of units, a line a kernel; around them what it says of itself ----

SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "ComputeWorkloadAnalysis",
    "Occupancy",
    "LaunchStats",
    "WarpStateStats",
)
KEPT = {
    "us": r"gpu__time_duration\.sum",
    "dram_percent": r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed",
    "sm_percent": r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "tensor_percent": r"sm__(?:inst_executed_pipe_tensor\w*|pipe_tensor\w*_cycles_active)"
    r"\.avg\.pct_of_peak_sustained_active",
    "l2_hit_percent": r"lts__t_sector_hit_rate\.pct",
    "warps_percent": r"sm__warps_active\.avg\.pct_of_peak_sustained_active",
    "registers": r"launch__registers_per_thread",
    "shared_bytes": r"launch__shared_mem_per_block(?:_dynamic)?",
}
STALL = re.compile(r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio")
MICROSECONDS = {
    "ns": 1e-3,
    "nsecond": 1e-3,
    "us": 1.0,
    "usecond": 1.0,
    "ms": 1e3,
    "msecond": 1e3,
    "s": 1e6,
    "second": 1e6,
}
BYTES = {"byte": 1, "Kbyte": 1000, "Mbyte": 10**6, "byte/block": 1, "Kbyte/block": 1000}


def number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # n/a, or a word
        return None


def counters(text: str) -> list[dict]:
    """A dictionary a kernel: its name, the figures of KEPT that are there, the three largest stalls.  RuntimeError with
    ncu's own words where there is no table."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        messages = [line for line in lines if line.startswith("==ERROR==")] or lines[-1:] or ["nothing"]
        raise RuntimeError(f"ncu printed no table: {messages[0]}")
    table = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    if len(table) < 3:
        raise RuntimeError("ncu printed a table without a kernel: none was launched by that name")
    names, units, *kernels = table
    return [_picked(dict(zip(names, zip(units, row)))) for row in kernels]


def _picked(row: dict[str, tuple[str, str]]) -> dict:
    figures: dict = dict(kernel=row["Kernel Name"][1])
    for key, pattern in KEPT.items():
        for name, (unit, text) in row.items():
            value = number(text)
            if key not in figures and value is not None and re.fullmatch(pattern, name):
                scale = (
                    MICROSECONDS.get(unit, 1.0) if key == "us" else BYTES.get(unit, 1) if key == "shared_bytes" else 1
                )
                figures[key] = value * scale
    stalls = {m[1]: number(text) or 0.0 for name, (_, text) in row.items() if (m := STALL.fullmatch(name))}
    figures["stalls"] = dict(sorted(stalls.items(), key=lambda item: -item[1])[:3])
    return figures


# ---- a rehearsal ----

SANITIZER = """#!{python}
import subprocess, sys
args = sys.argv[1:]
tool = args[args.index("--tool") + 1]
print("========= COMPUTE-SANITIZER", flush=True)
status = subprocess.run(args[args.index({python!r}):]).returncode
race = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
print("=========", race if tool == "racecheck" else "ERROR SUMMARY: 0 errors")
sys.exit(status)
"""
NCU = """#!{python}
import subprocess, sys
args = sys.argv[1:]
name = args[args.index("--kernel-name") + 1]
print("==PROF== Connected to process 1")
sys.stdout.flush()
status = subprocess.run(args[args.index({python!r}):]).returncode
print(f'==PROF== Profiling "{{name}}": 0%....50%....100% - 9 passes')
head = "ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size,Device,CC".split(",")
metrics = {{
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "81.5"),
    "gpu__time_duration.sum": ("ns", "12,345"),
    "launch__registers_per_thread": ("register/thread", "64"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "n/a"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "7.5"),
}}
units, values = zip(*metrics.values())
own = ["0", "1", "python", "127.0.0.1", name, "1", "7", "(128, 1, 1)", "(132, 1, 1)", "0", "9.0"]
for cells in ([*head, *metrics], [""] * len(head) + [*units], [*own, *values]):
    print(",".join('"' + cell + '"' for cell in cells))
print("==PROF== Disconnected from process 1")
sys.exit(status)
"""


def stand_ins(folder: pathlib.Path) -> None:
    """Puts programs into ``folder`` that run what they are to watch and print what the real ones would."""
    folder.mkdir(parents=True)
    for name, text in {"compute-sanitizer": SANITIZER, "ncu": NCU}.items():
        path = folder / name
        path.write_text(text.format(python=sys.executable))
        path.chmod(0o755)
