"""A day's results, in one JSON file that is whole at any moment: each part's status, seconds, error and jobs."""

import json
import os
import pathlib
from typing import Any

NAME = "results.json"
DONE, FAILED, TIMED_OUT, PARTIAL, NOT_REACHED = "done", "failed", "timed out", "partial", "not reached"


class Broken(ValueError):
    """A file of an earlier call that cannot be used; the text names it."""


class Results:
    """``parts``: {part: {status, seconds, error, jobs: {job: {status, seconds, error, rows}}}}."""

    def __init__(self, path: pathlib.Path, rehearsed: bool):
        self.path = path
        self.data: dict[str, Any] = dict(rehearsed=rehearsed, calls=[], notes=[], parts={})

    # ---- the file ----

    def save(self) -> None:
        """Replaces the file as a whole, so that a kill leaves the old one or the new one.  A part's status and first
        error follow from its jobs."""
        for _, part in self.parts():
            errors = [f"{name}: {job['error']}" for name, job in part["jobs"].items() if job["error"]]
            part["status"] = status_of([job["status"] for job in part["jobs"].values()])
            part["error"] = errors[0] if errors else ""
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(new, self.path)

    def note(self, line: str) -> None:
        if line not in self.data["notes"]:
            self.data["notes"].append(line)

    # ---- parts and jobs ----

    def part(self, name: str) -> dict[str, Any]:
        empty = dict(status=NOT_REACHED, seconds=0.0, error="", jobs={})
        return self.data["parts"].setdefault(name, empty)

    def plan(self, name: str, jobs: list[str]) -> list[str]:
        """Enters a part's jobs; returns those that are not done, in order."""
        entered = self.part(name)["jobs"]
        for job in jobs:
            entered.setdefault(job, dict(status=NOT_REACHED, seconds=0.0, error="", rows=[]))
        return [job for job in jobs if entered[job]["status"] != DONE]

    def begin(self, part: str, job: str) -> None:
        """Leaves nothing of an earlier try."""
        self.part(part)["jobs"][job] |= dict(status=TIMED_OUT, error="cut off while it ran", rows=[])

    def row(self, part: str, job: str, row: dict) -> None:
        self.part(part)["jobs"][job]["rows"].append(row)

    def end(self, part: str, job: str, status: str, *, seconds: float, error: str = "") -> None:
        self.part(part)["jobs"][job] |= dict(status=status, seconds=round(seconds, 2), error=error)

    def rows(self) -> dict[str, list[dict]]:
        return {name: [row for job in part["jobs"].values() for row in job["rows"]] for name, part in self.parts()}

    def parts(self) -> list[tuple[str, dict[str, Any]]]:
        return list(self.data["parts"].items())


def status_of(jobs: list[str]) -> str:
    kinds = set(jobs)
    if len(kinds) <= 1:
        return kinds.pop() if kinds else NOT_REACHED
    if DONE in kinds:
        return PARTIAL
    return FAILED if FAILED in kinds else TIMED_OUT


def load(folder: pathlib.Path) -> dict[str, Any]:
    """The results of an earlier call.  Broken, with the file's name, where they are missing or cut off."""
    path = folder / NAME
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise Broken(f"{path}: there is no such file, so nothing to go on from") from None
    except (ValueError, OSError) as error:
        raise Broken(f"{path} is not whole JSON ({error}); take an earlier copy, or start without it") from None
    if not isinstance(data, dict) or not {"rehearsed", "calls", "notes", "parts"} <= set(data):
        raise Broken(f"{path} is JSON, but not of a day's results")
    return data
