"""docs/tree.md lists every folder of tpfuse/, the folders' docstrings every file, and every path that the documents
name exists.

Spans: docs/tree.md and the docstrings of tpfuse/**/__init__.py.
"""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TREE, CONTRIBUTING = ROOT / "docs/tree.md", ROOT / "CONTRIBUTING.md"
PARTS = "tpfuse", "tests", "bench", "docs", "examples"
FOLDERS = sorted(path.parent for path in (ROOT / "tpfuse").rglob("__init__.py"))


def drawing(text: str) -> set[str]:
    """Paths of the drawn tree.  A line is names of one folder, indented by two blanks a level, and what they are."""
    folders: list[str] = []
    paths = set()
    for line in re.search(r"^```text\n(.*?)^```", text, re.S | re.M)[1].splitlines():
        indent, names, what = re.fullmatch(r"( *)(\S+(?: \S+)*?) {2,}(\S.*)", line).groups()
        for name in names.split():
            folders[len(indent) // 2 :] = [name]
            paths.add("".join(folders))
    return paths


def listing(docstring: str) -> set[str]:
    """Names of a docstring's lines ``name  what it is``."""
    return set(re.findall(r"^([\w.]+/?) {2,}\S", docstring, re.M))


def named(text: str) -> set[str]:
    """Paths below one of PARTS in backquotes; <op> and * stand for any name."""
    inline = re.findall(rf"`((?:{'|'.join(PARTS)})/[\w./<>*-]+)`", text)
    return {re.sub(r"<\w+>", "*", path) for path in inline}


def test_the_tree_draws_every_folder():
    drawn = drawing(TREE.read_text())
    folders = {f"{path.relative_to(ROOT)}/" for path in FOLDERS}
    assert {path for path in drawn if path.startswith("tpfuse/") and path.endswith("/")} == folders
    assert [path for path in drawn if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_lists_every_file(folder):
    entries = {path for path in folder.iterdir() if not path.name.startswith("__")}
    names = {f"{path.name}/" if path.is_dir() else path.name.removesuffix(".py") for path in entries}
    assert listing(ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "") == names


@pytest.mark.parametrize(
    "page", [TREE, CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_paths_exist(page):
    assert [path for path in named(page.read_text()) if not any(ROOT.glob(path.rstrip("/")))] == []


def test_a_path_that_is_not_there_is_seen():
    assert named("see `tpfuse/nothing.py` and `bench/kernels/<op>.py`") == {"tpfuse/nothing.py", "bench/kernels/*.py"}


def test_a_file_that_is_not_listed_is_seen():
    assert listing("A room.\n\nfirst  what it is\nrest/  more\n") == {"first", "rest/"}
