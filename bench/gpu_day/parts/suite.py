"""make test-gpu's pytest, dealt out to many processes: most of a test's time is its compilation."""

import importlib.util
import sys

from bench.gpu_day.children import ROOT
from bench.gpu_day.part import Context

SLICES = 12
TINY = ["tests/kernels/runtime/test_tuning.py", "-k", "bucket"]


def marked() -> list[str]:
    """The files that hold a gpu test: the others' imports would only take time."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text()]


class Slice:
    """A plugin of pytest: every n-th test that is left after -m and -k, but for those that have passed, a row each."""

    def __init__(self, job: str, context: Context):
        self.number, self.of = (int(word) for word in job.removeprefix("slice ").split(" of "))
        self.context = context
        self.passed = {row["test"] for row in context.rows("gpu tests") if row.get("outcome") == "passed"}

    def pytest_collection_finish(self, session) -> None:
        mine = session.items[self.number - 1 :: self.of]
        for item in mine:
            if item.nodeid in self.passed:  # by an earlier try, whose rows this one replaces
                self.context.emit(dict(test=item.nodeid, outcome="passed", seconds=0.0))
        session.items[:] = [item for item in mine if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = "" if report.outcome == "passed" else str(report.longrepr)[-2000:]
            row = dict(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2))
            self.context.emit(row | (dict(why=why) if why else {}))
            torch = sys.modules["torch"]
            if report.outcome == "failed" and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # raises where the test has broken the GPU's context: the rest would fail too


def jobs(context: Context) -> list[str]:
    count = 2 if context.tiny else SLICES
    return [f"slice {i} of {count}" for i in range(1, count + 1)]


def run(job: str, context: Context) -> None:
    if importlib.util.find_spec("pytest") is None:
        raise RuntimeError("pytest is not installed here, and the gpu tests need it")
    import pytest

    options = ["-q", "--color=no", "-p", "no:cacheprovider", "-p", "no:xdist", "--continue-on-collection-errors"]
    status = pytest.main(
        [*options, *(TINY if context.tiny else ["-m", "gpu", *marked()])], plugins=[Slice(job, context)]
    )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise AssertionError(f"pytest ended with {pytest.ExitCode(status)!r}")


def outcomes(rows: list[dict]) -> dict[str, int]:
    return {kind: sum(row.get("outcome") == kind for row in rows) for kind in ("passed", "failed", "skipped")}


def headline(rows: list[dict]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in outcomes(rows).items())
