"""The command that runs the suite in several settings names what failed, and where.

Spans: tests/suites.py, and the tables of tests/versions.py and tests/processors.py that it is run with.
"""

import sys

import pytest

from tests import processors, suites, versions
from tests.suites import Outcome

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes" /><testcase classname="tests.a" name="skips"><skipped /></testcase>
<testcase classname="tests.b" name="fails[1]"><failure /></testcase><testcase classname="tests.b" name="e"><error />
</testcase></testsuite></testsuites>"""


def test_a_report_is_counted(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert suites.read(tmp_path / "report.xml") == Outcome(4, 1, ["tests.b::fails[1]", "tests.b::e"])


@pytest.mark.parametrize(
    "argv, names, rest",
    [
        ([], ["all", "avx512", "avx2", "sse4"], []),
        (["sse4", "tests/layers", "-k", "norm"], ["sse4"], ["tests/layers", "-k", "norm"]),
        (["--jobs", "0", "tests/layers"], ["all", "avx512", "avx2", "sse4"], ["tests/layers"]),
        (["avx2", "sse4", "--", "-x"], ["avx2", "sse4"], ["-x"]),
    ],
)
def test_settings_are_chosen_and_the_rest_is_pytests(monkeypatch, capsys, argv, names, rest):
    """One setting fails, one cannot start: both are named."""
    runs = []

    def once(setting, jobs, arguments):
        runs.append((setting.variables, arguments))
        status = {"default": 1, "avx2": 4}.get(setting.variables.get("ATEN_CPU_CAPABILITY"), 0)
        return status, Outcome(3 if status < 4 else 0, 1, ["tests.b::fails"] if status == 1 else []), 2.0

    monkeypatch.setattr(suites, "once", once)
    monkeypatch.setattr(sys, "argv", ["processors.py", *argv])
    failed = suites.command("tests.processors", "", processors.PROCESSORS, processors.setting)
    assert runs == [(processors.PROCESSORS[name], rest) for name in names]
    assert failed == f"failed: {', '.join(name for name in names if name in ('avx2', 'sse4'))}"
    out = capsys.readouterr().out
    assert "sse4: tests.b::fails" in out and " | 1 | 1 | 1 | 2 |" in out
    assert ("avx2: pytest ended with 4" in out) == ("avx2" in names)


def test_the_environments_pins_replace_those_of_the_tree():
    pins = versions.constraints(versions.ENVIRONMENTS["oldest"].packages).splitlines()
    assert "torch==2.11.0" in pins and sum(line.startswith("torch==") for line in pins) == 1
    assert sum(line.startswith("pytest==") for line in pins) == 1
