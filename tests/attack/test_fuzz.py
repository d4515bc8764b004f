"""Spoilt directories by the hundred, and that the fuzz sees what is wrong."""

import itertools
import os
from collections import Counter

import pytest

from tests.attack import fuzz

HUNDREDS = [("base", 300), ("adapter", 150)]
THOUSANDS = [pytest.param(reader, 2000, marks=pytest.mark.slow) for reader in fuzz.READERS]


@pytest.mark.parametrize("reader, count", HUNDREDS + THOUSANDS)
def test_a_spoilt_directory_is_accepted_or_refused_by_name(reader, count):
    found = list(fuzz.outcomes(reader, range(count)))
    assert [o for o in found if o.kind == "other"] == []
    kinds = Counter(o.kind for o in found)
    assert kinds.total() == count and kinds["accepted"] > count / 50 and kinds["ValueError"] > count / 4


BAD = {
    "another type": lambda path: {}["x"],
    "a surrogate": lambda path: "\ud800".encode(),
    "more than it says": lambda path: (path / ("x" * 4000)).read_text(),
    "a pipe that waits": lambda path: os.read(os.pipe()[0], 1),
    "a loop": lambda path: sum(1 for _ in itertools.count()),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_seen(monkeypatch, tmp_path, case):
    monkeypatch.setattr(fuzz, "WAIT", 1)
    assert fuzz.outcome(BAD[case], tmp_path)[0] == "other"


def test_what_is_right_is_seen(tmp_path):
    assert fuzz.outcome(lambda path: None, tmp_path) == ("accepted", "")
    assert fuzz.outcome(lambda path: (path / "x").read_text(), tmp_path)[0] == "OSError"
    assert fuzz.outcome(lambda path: int("x"), tmp_path)[0] == "ValueError"
