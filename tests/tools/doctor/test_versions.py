"""The table of tested versions agrees with pyproject.toml, tests/versions.py, constraints.txt and docs/versions.md."""

import pathlib
import re

import pytest

from tests.versions import ENVIRONMENTS
from tpfuse.tools.doctor import versions
from tpfuse.tools.doctor.report import FAULT, NOTE, OK
from tpfuse.tools.doctor.versions import TESTED, Range, findings, judged, release

ROOT = pathlib.Path(__file__).parents[3]


def least() -> dict[str, str]:
    """What pyproject.toml asks for, by package."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.S | re.M)[1]
    found = {name: number or "" for name, number in re.findall(r'"([\w-]+)(?:>=([\d.]+))?[";]', listed)}
    return found | {"Python": re.search(r'requires-python = ">=([\d.]+)"', text)[1]}


def pinned(name: str) -> str:
    return re.search(rf"^{name}==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M)[1]


def test_least_is_what_pyproject_asks_for():
    assert {name: tested.least for name, tested in TESTED.items()} == least()


def test_oldest_and_newest_are_those_of_the_environments():
    for end, environment in ENVIRONMENTS.items():
        assert getattr(TESTED["Python"], end) == environment.python
        for name in set(TESTED) - {"Python"}:
            assert getattr(TESTED[name], end) == (environment.packages.get(name) or pinned(name))
    assert {"torch", "triton", "numpy"} <= {name for e in ENVIRONMENTS.values() for name in e.packages}


def test_documents_say_the_same():
    text = (ROOT / "docs/versions.md").read_text()
    columns = "torch", "triton", "numpy", "Python"
    for end in "oldest", "newest":
        row = re.search(rf"^\| {end} \| (.*) \|$", text, re.M)[1].split(" | ")
        assert row == [getattr(TESTED[name], end) for name in columns]


NEEDED = Range("2.11", "2.12.0", "2.15.0")


@pytest.mark.parametrize(
    "version, status, words",
    [
        ("2.10.1", FAULT, "Install it 2.11 or later"),
        ("2.9", FAULT, "Install it 2.11 or later"),
        ("2.11.0", NOTE, "this old"),
        ("2.12.0+cpu", OK, ""),
        ("2.15.3", OK, ""),
        ("2.16.0rc1", NOTE, "this new"),
        (None, FAULT, "Install it 2.11 or later"),
    ],
)
def test_a_version_is_judged(version, status, words):
    found = judged("it", version, NEEDED)
    assert found.status == status and words in found.advice and (status == OK) == (not found.advice)


def test_an_old_package_is_a_fault(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda name: "1.9" if name == "torch" else TESTED[name].newest)
    assert [(f.name, f.status) for f in findings() if f.status != OK] == [("torch", FAULT)]


def test_releases_compare_as_numbers():
    assert release("2.9.1") < release("2.10.0+cu130") == (2, 10) and release("2.10.0a0") == (2, 10)
