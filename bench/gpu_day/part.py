"""A part of the day, what its jobs are given, and how they say what they found.

Its module offers jobs(context) -> names, run(job, context), and headline(rows) -> a few words.
"""

import glob
import importlib
import importlib.util
import pathlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TOOLS = "/usr/local/cuda/bin/{}", "/opt/nvidia/nsight-compute/*/{}"  # where they lie when the PATH does not say


class Absent(Exception):
    """Raised for what is missing on this machine and may be: the job is done, and has no result."""


@dataclass(frozen=True)
class Part:
    """``seconds`` for all of it, ``each`` for one job; its jobs run in ``parallel`` processes, one after another in
    each.  Neighbours of the same ``stage`` run side by side."""

    name: str
    module: str
    seconds: float
    job_seconds: float
    parallel: int = 1
    stage: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def _loaded(self) -> Any:
        return importlib.import_module(self.module)

    def jobs(self, context: "Context") -> list[str]:
        return self._loaded().jobs(context, **self.options)

    def run(self, job: str, context: "Context") -> None:
        self._loaded().run(job, context)

    def headline(self, rows: list[dict]) -> str:
        left_out = [row["left_out"] for row in rows if "left_out" in row]
        return left_out[0] if left_out else self._loaded().headline(rows) if rows else ""


@dataclass(frozen=True)
class Context:
    """A job's arguments: ``known_rows`` of each part so far; ``until``, the time.time() that ends the job."""

    tiny: bool  # a rehearsal
    scratch: pathlib.Path
    known_rows: dict[str, list[dict]]
    emit: Callable[[dict], None]
    until: float = float("inf")

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu" if self.tiny else "cuda")

    def rows(self, part: str) -> list[dict]:
        return self.known_rows.get(part, [])

    @property
    def left(self) -> float:
        return self.until - time.time()


def tool(name: str) -> str:
    """The path of one of CUDA's programs.  Absent where there is none."""
    paths = [shutil.which(name), *(path for place in TOOLS for path in sorted(glob.glob(place.format(name))))]
    path = next(filter(None, paths), None)
    if path is None:
        raise Absent(f"{name} is not installed here")
    return path


def require(name: str) -> None:
    """Absent where a package that a part compares with is not installed."""
    if importlib.util.find_spec(name) is None:
        raise Absent(f"{name} is not installed here")
