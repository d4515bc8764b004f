"""Parts for the tests of bench.gpu_day, whose jobs do as they are called and need no torch."""

import os
import subprocess
import time

from bench.gpu_day.day import Day
from bench.gpu_day.part import Absent, Part
from bench.gpu_day.results import load

NAME = __name__


def part(*jobs: str, name: str = "part", seconds: float = 60, job_seconds: float = 30, **rest) -> Part:
    return Part(name, NAME, seconds, job_seconds, options=dict(names=jobs), **rest)


def day(out, *stages, **options) -> Day:
    return Day(out, options.pop("seconds", 60.0), False, plan=[list(stage) for stage in stages], **options)


def jobs_of(out, name="part") -> dict:
    return load(out)["parts"][name]["jobs"]


def jobs(context, names):
    return list(names)


def run(job, context):
    context.emit(dict(job=job, pid=os.getpid(), tiny=context.tiny))
    if job == "fails":
        raise ValueError("no such kernel\nand more")
    if job == "exits":
        raise SystemExit(4)
    if job == "absent":
        raise Absent("nvtool is not installed here")
    if job == "dies":
        print("illegal memory access", flush=True)
        os._exit(7)
    if job == "hangs":
        sleeper = subprocess.Popen(["sleep", "600"])
        context.emit(dict(pid=sleeper.pid))
        sleeper.wait()
    if job == "sees":
        context.emit(dict(seen=context.known_rows))
    if job.startswith("waits for "):
        mine, other = (context.scratch / name for name in job.removeprefix("waits for ").split(" as "))
        other.touch()
        while not mine.exists():
            time.sleep(0.01)


def headline(rows):
    return f"{len(rows)} rows"
