"""Rules that hold for the tree as a whole: imports flow down, triton is optional, what the library promises never to do."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "tpfuse"
# A part may import itself and those before it. What is not listed (the package's own __init__, say) may import any.
ORDER = [
    "kernels",
    "parallel",
    "collectives",
    "sequence_parallel",
    "layers",
    "models",
    "packing",
    "parallelize",
    "dtensor",
    "optim",
    "checkpoint",
    "ledger",
]
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = sorted(
    path
    for pattern in ("*.*", "Makefile", ".ci/*", "tpfuse/**/*.py", "tests/**/*.py", "bench/**/*.py", "examples/**/*.py")
    for path in ROOT.glob(pattern)
    if path.suffix in {".py", ".md", ".toml", ".txt", ""} and path.is_file()
)


def name_of(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(source, module):
    """Dotted names a module imports, however the import is written; ``from a import b`` counts as a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def upward_imports(source, module):
    """What a module of one of ORDER's parts imports from a part above its own."""
    here = ORDER.index(module.split(".")[1])
    parts = [(name, name.split(".")) for name in imported(source, module)]
    return [name for name, part in parts if part[0] == "tpfuse" and len(part) > 1 and part[1] in ORDER[here + 1 :]]


def attributes(source):
    """Every dotted expression (``tl.atomic_add``) with its line."""
    return [(ast.unparse(node), node.lineno) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]


UPWARD = ["from ..models import GPT", "from tpfuse import layers", "from .. import ledger", "import tpfuse.models.gpt"]


@pytest.mark.parametrize("line", [*UPWARD, f"def f():\n    {UPWARD[0]}"])
def test_an_upward_import_is_seen(line):
    assert upward_imports(line, "tpfuse.kernels.linear")


@pytest.mark.parametrize("line", ["from ._op import op", "from ..kernels import linear", "from tpfuse.parallel import TensorParallel"])
def test_a_downward_import_is_not(line):
    assert not upward_imports(line, "tpfuse.layers.linear")


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_flow_down(path):
    module = module_of(path)
    if module.split(".")[1] in ORDER:
        assert upward_imports(path.read_text(), module) == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_one_file_imports_triton(path):
    """Elsewhere its names come from there, where they have a stand-in on systems without triton."""
    if name_of(path) != "tpfuse/kernels/_triton.py":
        assert [name for name in imported(path.read_text(), module_of(path)) if name.split(".")[0] == "triton"] == []


FORBIDDEN = {
    r"triton\.(autotune|heuristics)|\bautotune": "ranks that tune differently sum in different orders",
    r"atomic_(add|max|min|cas|xchg)": "float atomics differ from run to run; other sums need none",
    r"os\.environ|os\.getenv": "behaviour follows from arguments, not from the environment",
}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
@pytest.mark.parametrize("pattern, why", FORBIDDEN.items(), ids=["autotune", "atomics", "environment"])
def test_forbidden(path, pattern, why):
    found = [f"{name_of(path)}:{line}: {name}" for name, line in attributes(path.read_text()) if re.search(pattern, name)]
    assert not found, f"{why}: {found}"


@pytest.mark.parametrize("line", ["@triton.autotune([])\ndef f(): ...", "tl.atomic_add(p, x)", "os.environ.get('X')"])
def test_what_is_forbidden_is_seen(line):
    assert any(re.search(pattern, name) for name, _ in attributes(line) for pattern in FORBIDDEN)


WITHOUT_TRITON = """
import importlib, pkgutil, sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
try:
    import triton
    sys.exit("triton was not blocked")
except ModuleNotFoundError:
    pass

import tpfuse
for module in pkgutil.walk_packages(tpfuse.__path__, "tpfuse."):
    importlib.import_module(module.name)
import torch
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
"""


def test_every_module_imports_where_triton_does_not_exist():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


UNTIDY = {
    "a merge conflict": r"^(<{7}|>{7}) ",
    "a path of somebody's machine": r"(?<![\w.])/(root|home|Users|work)/\w",
    "trailing blanks": r"[ \t]+$",
}


@pytest.mark.parametrize("what, pattern", UNTIDY.items())
def test_no_file_holds(what, pattern):
    lines = [(path, i, line) for path in TEXTS for i, line in enumerate(path.read_text().splitlines(), 1)]
    assert len(TEXTS) > len(SOURCES)
    assert [f"{name_of(path)}:{i}" for path, i, line in lines if re.search(pattern, line)] == [], what


def test_no_line_is_too_long():
    lines = [(path, i, line) for path in TEXTS if path.suffix == ".py" for i, line in enumerate(path.read_text().splitlines(), 1)]
    assert [f"{name_of(path)}:{i}" for path, i, line in lines if len(line) > 140] == []
