"""Names and docstrings: plain terms, one name a thing.

Spans: every source of tpfuse/, bench/ and examples/: a rule of words holds for a tree.
"""

import ast
import collections
import functools
import pathlib
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = [path for tree in ("tpfuse", "bench", "examples") for path in sorted((ROOT / tree).rglob("*.py"))]
# Names that say nothing of what they name; of functions and classes, bar underscores and capitals.
VAGUE = set(
    "found made given own kept how like on at told asked wants look said whole every some more rest way ways means "
    "between among beside again by then here theirs last first many each none other others wide into out after before "
    "when where which what its words stands holds takes needs does did done seen show shown known".split()
)
OPENERS = {"what", "which", "whether", "how", "of", "where", "that", "as", "who"}
MOST_VAGUE, MOST_OPENERS = 0.01, 0.02  # of a room's bindings, and of its docstrings
DEEP = {"bench", "kernels", "models", "tools", "training"}  # whose folders are rooms

# Limits of rooms that are not there yet, as counts: vague bindings, openers.  A kernel's names decide its registers, so
# that new ones are new code, which is compiled and measured anew (bench/compile/table.md).
LATE: dict[str, tuple[int, int]] = {
    "kernels": (6, 0),
    "kernels/attn": (63, 5),
    "kernels/losses": (11, 0),
    "kernels/lookup": (8, 0),
    "kernels/norm": (23, 4),
    "kernels/runtime": (10, 3),
}
# Functions and classes with such a name: those that users call (Saving.done, as a future's, and WholeMatrices.others),
# and those of kernels.
PLAIN = {
    "training/checkpoint": ["done"],
    "training": ["others"],
    "kernels/attn": ["_seen"],
    "kernels/norm": ["_means"],
    "kernels/runtime": ["Last"],
}
# Class names that still stand in several files.
TWICE = {"Rows"}


class Words(NamedTuple):
    """Counts of some sources; the lists say where, as "path:line: name"."""

    bindings: int
    docstrings: int
    vague: list[str]
    openers: list[str]
    definitions: list[str]
    classes: list[tuple[str, str]]  # name, path


def words(sources):
    """Counts {path: text} as one room."""
    count = Words(0, 0, [], [], [], [])
    bindings = docstrings = 0
    for path, text in sources.items():
        named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module | ast.arg | ast.Name
        for node in filter(lambda node: isinstance(node, named), ast.walk(ast.parse(text))):
            at = f"{path}:{getattr(node, 'lineno', 1)}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                if (doc := ast.get_docstring(node)) and doc.split():
                    docstrings += 1
                    if doc.split()[0].strip('`"').lower() in OPENERS:
                        count.openers.append(f"{at}: {doc.splitlines()[0]}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if node.name.strip("_").lower() in VAGUE:
                    count.definitions.append(f"{at}: {node.name}")
            if isinstance(node, ast.ClassDef):
                count.classes.append((node.name, str(path)))
            name = node.arg if isinstance(node, ast.arg) else None
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            if name is not None:
                bindings += 1
                if name in VAGUE:
                    count.vague.append(f"{at}: {name}")
    return count._replace(bindings=bindings, docstrings=docstrings)


def room_of(path):
    """The folder whose words are counted together: "kernels/norm", "layers", "bench", "examples"; "door" for files at
    the package's door."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "tpfuse":
        parts = parts[1:] if len(parts) > 2 else ("door", *parts[1:])
    return "/".join(parts[: 2 if parts[0] in DEEP and len(parts) > 2 else 1])


ROOMS = list(dict.fromkeys(map(room_of, SOURCES)))


@functools.cache
def counted(room):
    """The words of a room."""
    return words({path.relative_to(ROOT): path.read_text() for path in SOURCES if room_of(path) == room})


def twice(classes):
    """Class names that stand in several files, or several times in one."""
    count = collections.Counter(name for name, _ in classes)
    return {name for name, times in count.items() if times > 1}


@pytest.mark.parametrize("room", ROOMS)
def test_names_say_what_they_name(room):
    count, late = counted(room), LATE.get(room, (0, 0))
    assert len(count.vague) <= max(MOST_VAGUE * count.bindings, late[0]), count.vague
    assert [name.rpartition(": ")[2] for name in count.definitions] == PLAIN.get(room, []), count.definitions


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_open_with_a_verb_or_a_noun(room):
    count, late = counted(room), LATE.get(room, (0, 0))
    assert len(count.openers) <= max(MOST_OPENERS * count.docstrings, late[1]), count.openers


def test_the_package_keeps_the_limits_of_a_room():
    """With its rooms that have limits of their own."""
    rooms = [counted(room) for room in dict.fromkeys(room_of(p) for p in SOURCES if p.is_relative_to(ROOT / "tpfuse"))]
    assert sum(len(room.vague) for room in rooms) <= MOST_VAGUE * sum(room.bindings for room in rooms)
    assert sum(len(room.openers) for room in rooms) <= MOST_OPENERS * sum(room.docstrings for room in rooms)


def test_a_class_name_stands_once_in_the_library():
    classes = [each for room in ROOMS for each in counted(room).classes if each[1].startswith("tpfuse")]
    assert twice(classes) <= TWICE, sorted(each for each in classes if each[0] in twice(classes) - TWICE)


def test_every_late_room_exists():
    assert set(LATE) <= set(ROOMS)


def test_poor_words_are_seen():
    source = '''"""Whether it is."""
class Kept: ...
class Row: ...
def found(given, x, *, how=1):
    """What it does."""
    own, y = 1, 2
    for last in y: ...
def made_up(rows):
    """Returns the rows."""
'''
    count = words({"a.py": source})
    assert sorted(count.vague) == ["a.py:4: given", "a.py:4: how", "a.py:6: own", "a.py:7: last"]
    assert count.bindings == 7
    assert count.openers == ["a.py:1: Whether it is.", "a.py:4: What it does."] and count.docstrings == 3
    assert count.definitions == ["a.py:2: Kept", "a.py:4: found"]
    assert twice([*count.classes, ("Row", "b.py")]) == {"Row"}
