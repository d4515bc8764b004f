"""The worked diffs of CONTRIBUTING.md are of this tree: a file holds what a diff adds, and not what it takes away.

Spans: CONTRIBUTING.md.
"""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = "norm", "activation", "kernel", "collective", "model family", "wiring of a block"


def files(text: str) -> list[tuple[str, list[str]]]:
    """(path, the lines under it) of every file of every diff."""
    diffs = "".join(re.findall(r"^```diff\n(.*?)^```", text, re.S | re.M))
    parts = re.split(r"^--- \S+\n\+\+\+ (\S+)\n", diffs, flags=re.M)
    return list(zip(parts[1::2], (part.splitlines() for part in parts[2::2]), strict=True))


def wrong(path: str, lines: list[str]) -> list[list[str]]:
    """The hunks, which lines @@ separate, that the file does not hold whole and in this order, or of which it still
    holds a line that is taken away."""
    have, at, found = (ROOT / path).read_text().splitlines(), 0, []
    for hunk in re.split(r"^@@.*\n?", "\n".join(lines), flags=re.M):
        kept = [line[1:] for line in hunk.splitlines() if line[0] in "+ "]
        places = (i for i in range(at, len(have) - len(kept) + 1) if have[i : i + len(kept)] == kept)
        place = next(places, None)
        if place is None or any(line[1:] in have for line in hunk.splitlines() if line[0] == "-"):
            found.append(hunk.splitlines())
        else:
            at = place + len(kept)
    return found


def test_every_recipe_has_a_worked_diff():
    for name in RECIPES:
        section = re.search(rf"^## To add an? {name}\n(.*?)(?=^## |\Z)", TEXT, re.S | re.M)
        assert section and len(files(section[1])) >= 2, name


@pytest.mark.parametrize("path, lines", files(TEXT), ids=lambda value: value if isinstance(value, str) else "")
def test_a_diff_is_of_this_tree(path, lines):
    assert any(line.startswith("+") for line in lines) and wrong(path, lines) == []


@pytest.mark.parametrize(
    "line",
    ["+VERSION = 2", " import os", '-__version__ = "0.1.0"', '+__version__ = "0.1.0"\n+__version__ = "0.1.0"'],
    ids=["added", "kept", "taken away", "twice"],
)
def test_a_diff_of_another_tree_is_seen(line):
    assert wrong("tpfuse/_version.py", line.splitlines()) == [line.splitlines()]
