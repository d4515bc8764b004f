"""A rank that raises ends the others at once, and they say which rank it was and why."""

import re
from pathlib import Path

import pytest

from tests.examples.launch import run
from tpfuse.ranks import failure

SCRIPT = Path(__file__).with_name("failing.py")


@pytest.mark.slow
@pytest.mark.parametrize("where", [pytest.param("backward", marks=pytest.mark.rare), "between calls", "forward"])
def test_every_rank_names_the_one_that_failed(where):
    """The group's own limit is torch's, half an hour; run() has one of five minutes."""
    done = run(SCRIPT, where, procs=3, forked=False)
    assert done.returncode == 1
    for rank in 0, 2:
        said = [line for line in done.stderr.splitlines() if re.search(rf"\[rank{rank}\]: RuntimeError: .* of 3", line)]
        assert said and "rank 1 has failed: KeyError: 'document 7 has no text'" in said[-1], done.stderr


def test_without_a_note_the_error_has_its_own_words():
    assert failure.noted() == "" and failure.explained(RuntimeError("closed")) == "closed"
