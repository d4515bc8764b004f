"""Processes that do a part's jobs: each leads a group of its own, which is killed as a whole when its time is over.

A child appends JSON lines to a file: {"job", "event": "begin"}, {"job", "row"}, {"job", "event": "end", "error"}.  Only
what ends in a newline counts, so a kill in the middle of a line costs that line.
"""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.gpu_day.part import Part
from bench.gpu_day.results import DONE, FAILED, TIMED_OUT, Results

ROOT = pathlib.Path(__file__).parents[2]
TAIL = 1500  # characters of what a process printed, in the error of one that died
FRESH = 3  # the exit status of a process that must not be used for the jobs that are left
COUNT = itertools.count()


@dataclass
class Setting:
    """Options that every process is started with."""

    rehearse: bool
    scratch: pathlib.Path
    environment: dict[str, str]
    command: tuple[str, ...] = (sys.executable, "-u", "-m", "bench.gpu_day.child")


class Child:
    """One process, and what it has said so far."""

    def __init__(self, part: Part, jobs: list[str], *, setting: Setting, rows: dict, until: float):
        stem = setting.scratch / f"{next(COUNT):03d}-{part.name.replace(' ', '-').replace(',', '')}"
        spec, self.events, self.log = (stem.with_suffix(end) for end in (".spec", ".events", ".log"))
        self.events.touch()
        request = dict(part=vars(part), jobs=jobs, rehearse=setting.rehearse, until=until, rows=rows)
        spec.write_text(json.dumps(request | dict(scratch=str(setting.scratch))))
        with open(self.log, "w") as log:
            command = *setting.command, str(spec), str(self.events)
            options: dict[str, Any] = dict(cwd=ROOT, env=setting.environment, start_new_session=True)
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **options
            )
        self.read, self.partial = 0, b""

    def new_events(self) -> Iterator[dict]:
        """Yields the events that are new."""
        with open(self.events, "rb") as file:
            file.seek(self.read)
            new = file.read()
        self.read += len(new)
        *lines, self.partial = (self.partial + new).split(b"\n")
        yield from map(json.loads, lines)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL:].strip()


class Lane:
    """Jobs that run one after another in one process, and in a fresh one after each that kills it."""

    def __init__(self, part: Part, jobs: list[str], *, setting: Setting, results: Results, until: float):
        self.part, self.jobs, self.setting, self.results, self.until = part, list(jobs), setting, results, until
        self.child: Child | None = None
        self.running, self.since = False, 0.0  # whether a job has begun; when it, or its process, did, by our clock
        self.began = 0.0  # by the child's

    def step(self) -> bool:
        """Takes in what was said, and ends what takes too long; returns whether anything goes on here."""
        now = time.time()
        if self.child is None:
            if not self.jobs or now >= self.until:
                return False
            self._start(now)
        child = self.child
        exited = child.process.poll() is not None  # asked before reading: nothing is said after it
        for event in child.new_events():
            self._take(event)
        if exited:
            child.kill()  # what it left running
            self.child = None
            if self.jobs and (self.running or child.process.returncode != FRESH):
                self._end(FAILED, f"the process ended with {child.process.returncode}: {child.tail()}")
        elif now >= self.until or now - self.since >= self.part.job_seconds:
            child.kill()
            for event in child.new_events():
                self._take(event)
            self.child = None
            if self.jobs:
                self._end(TIMED_OUT, f"ended after {now - self.since:.0f} s: {child.tail()[-300:]}")
        return True

    def _start(self, now: float) -> None:
        self.since, self.running = now, False
        until = min(self.until, now + self.part.job_seconds * len(self.jobs))
        self.child = Child(self.part, self.jobs, setting=self.setting, rows=self.results.rows(), until=until)

    def _take(self, event: dict) -> None:
        job = event["job"]
        if event.get("event") == "begin":
            self.running, self.since, self.began = True, time.time(), event["time"]
            self.results.begin(self.part.name, job)
        elif event.get("event") == "end":
            self._end(FAILED if event["error"] else DONE, event["error"], event["time"] - self.began)
        else:
            self.results.row(self.part.name, job, event["row"])
        self.results.save()

    def _end(self, status: str, error: str, seconds: float | None = None) -> None:
        now = time.time()
        seconds = now - self.since if seconds is None else seconds
        self.results.end(self.part.name, self.jobs.pop(0), status, seconds=seconds, error=error)
        self.running, self.since = False, now
        self.results.save()

    def stop(self) -> None:
        if self.child is not None:
            self.child.kill()
            for event in self.child.new_events():
                self._take(event)
            self.child = None
