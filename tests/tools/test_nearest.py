"""Proposals for names that are not there."""

import pytest

from tpfuse.tools.nearest import proposal

NAMES = "llama3-8b", "gpt2", "H100", "v100", "a100-80gb"


@pytest.mark.parametrize(
    "name, best",
    [
        ("llama-3-8b", "llama3-8b"),
        ("meta-llama/Llama3-8B", "llama3-8b"),
        ("h100", "H100"),
        ("gtp2", "gpt2"),
        ("A100", "a100-80gb"),
    ],
)
def test_the_name_most_alike(name, best):
    assert proposal(name, NAMES) == f"; did you mean {best!r}?"


@pytest.mark.parametrize("name", ["", "bert", "rtx4090", None, 7])
def test_nothing_is_alike(name):
    assert proposal(name, NAMES) == ""
