"""The everyday suite, once in each of several settings: the command that tests.versions and tests.processors share.

PROGRAM                       in every setting
PROGRAM NAME ..               in these
PROGRAM NAME .. tests/layers  a part of it: pytest takes all that follows the names
PROGRAM --jobs 4 ..           in so many processes (default 2; 0: in one, for a debugger)
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).parents[1]


class Setting(NamedTuple):
    """The Python that runs the suite, and variables of its environment."""

    python: pathlib.Path | str = sys.executable
    variables: dict[str, str] = {}
    about: str = ""  # a column of the table


class Outcome(NamedTuple):
    """Counts of a JUnit report, and the names of the tests that failed."""

    tests: int
    skipped: int
    failed: list[str]


def read(report: pathlib.Path) -> Outcome:
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    return Outcome(len(cases), sum(case.find("skipped") is not None for case in cases), names)


def once(setting: Setting, jobs: int, arguments: list[str]) -> tuple[int, Outcome, float]:
    """Runs the suite -> pytest's exit status, what it reports, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        report, began = pathlib.Path(folder, "report.xml"), time.monotonic()
        spread = ["-n", str(jobs), "--dist", "worksteal"] if jobs else []
        suite = ["-m", "pytest", "-q", *spread, "-m", "not slow and not gpu", f"--junitxml={report}", *arguments]
        status = subprocess.run([setting.python, *suite], cwd=ROOT, env=os.environ | setting.variables).returncode
        return status, read(report) if report.exists() else Outcome(0, 0, []), time.monotonic() - began


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """Markdown, as docs/versions.md shows it."""
    heads = "setting", "", "passed", "skipped", "failed", "seconds"
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows))


def command(program: str, about: str | None, names: Iterable[str], setting_of: Callable[[str], Setting]) -> str | None:
    """Runs the command line, prints a table and each test that failed -> which settings failed; None if none did."""
    known = list(names)
    text = f"{about}\n{__doc__}".replace("PROGRAM", f"python -m {program}")
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=f"{', '.join(known)}; pytest's arguments")
    args = parser.parse_args()
    count = next((i for i, name in enumerate(args.arguments) if name not in known), len(args.arguments))
    rest = args.arguments[count:]
    rows, broken = [], {}
    for name in args.arguments[:count] or known:
        setting = setting_of(name)
        print(f"{name}: {setting.about}", flush=True)
        status, outcome, seconds = once(setting, args.jobs, rest[1:] if rest[:1] == ["--"] else rest)
        if status:
            broken[name] = outcome.failed or [f"pytest ended with {status}"]
        passed = outcome.tests - outcome.skipped - len(outcome.failed)
        counts = passed, outcome.skipped, len(outcome.failed), round(seconds)
        rows.append((name, setting.about, *map(str, counts)))
    print(table(rows))
    for name, failed in broken.items():
        print("\n".join(f"{name}: {test}" for test in failed))
    return f"failed: {', '.join(broken)}" if broken else None
