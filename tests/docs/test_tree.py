"""docs/tree.md lists every file of tpfuse/ and nothing else, and every path that the documents name exists."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TREE, CONTRIBUTING = ROOT / "docs/tree.md", ROOT / "CONTRIBUTING.md"
PARTS = "tpfuse", "tests", "bench", "docs", "examples"


def listed(text: str) -> set[str]:
    """The paths of the drawn tree: a name, two blanks deeper than its folder, and what it is."""
    folders: list[str] = []
    found = set()
    for line in re.search(r"^```text\n(.*?)^```", text, re.S | re.M)[1].splitlines():
        indent, name, what = re.fullmatch(r"( *)(\S+) {2,}(\S.*)", line).groups()
        folders[len(indent) // 2 :] = [name]
        found.add("".join(folders))
    return found


def named(text: str) -> set[str]:
    """Paths below one of PARTS in backquotes; <op> and * stand for any name."""
    inline = re.findall(rf"`((?:{'|'.join(PARTS)})/[\w./<>*-]+)`", text)
    return {re.sub(r"<\w+>", "*", path) for path in inline}


def test_the_tree_lists_every_file():
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "tpfuse").rglob("*") if path.is_file()}
    here = {path for path in here if "__pycache__" not in path and not path.endswith("/__init__.py")}
    drawn = listed(TREE.read_text())
    assert {path for path in drawn if path.startswith("tpfuse/") and not path.endswith("/")} == here
    assert [path for path in drawn if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "page", [TREE, CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_paths_exist(page):
    assert [path for path in named(page.read_text()) if not any(ROOT.glob(path.rstrip("/")))] == []


def test_a_path_that_is_not_there_is_seen():
    assert named("see `tpfuse/nothing.py` and `bench/kernels/<op>.py`") == {"tpfuse/nothing.py", "bench/kernels/*.py"}
