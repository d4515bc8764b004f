"""Rules that hold for the tree as a whole: imports, argument lists, what the library promises never to do.

Spans: every source of tpfuse/, and where the files of tests/ stand.
"""

import ast
import functools
import importlib
import pathlib
import re
import subprocess
import sys

import networkx
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "tpfuse"
# The folders of tpfuse/ and the two files at its door: each may import itself and those before it.  What else stands at
# the door (the package's own __init__, public addresses) may import any, and nothing imports it.
ORDER = [
    "kernels",
    "ranks",
    "parallel",
    "collectives",
    "sequence_parallel",
    "layers",
    "pipeline",
    "models",
    "training",
    "interop",
    "tools",
]
DOOR = {"__init__", "__main__", "_version", "api", "bench", "ledger", "packing", "plan"}
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = sorted(
    path
    for pattern in ("*.*", "Makefile", ".ci/*", "tpfuse/**/*.py", "tests/**/*.py", "bench/**/*.py", "examples/**/*.py")
    for path in ROOT.glob(pattern)
    if path.suffix in {".py", ".md", ".toml", ".txt", ""} and path.is_file() and path.name != ".git"  # of a worktree
)


text = functools.cache(pathlib.Path.read_text)
tree = functools.cache(ast.parse)  # of a text


@functools.cache
def nodes(source):
    return list(ast.walk(tree(source)))


def name_of(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(source, module):
    """Dotted names a module imports, however the import is written; ``from a import b`` counts as a.b."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def rank(module):
    """The place in ORDER of a dotted name below tpfuse, by its longest prefix there; None where it has none."""
    parts = module.split(".")[1:]
    prefixes = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return next((ORDER.index(prefix) for prefix in prefixes if prefix in ORDER), None)


def upward_imports(source, module):
    """What a module of one of ORDER's parts imports from a part above its own."""
    here = rank(module)
    names = [name for name in imported(source, module) if name.split(".")[0] == "tpfuse"]
    return [name for name in names if (rank(name) or 0) > here]


@functools.cache
def attributes(source):
    """Every dotted expression (``tl.atomic_add``) with its line."""
    return [(ast.unparse(node), node.lineno) for node in nodes(source) if isinstance(node, ast.Attribute)]


UPWARD = ["from ..models import GPT", "from tpfuse import layers", "from .. import tools", "import tpfuse.models.gpt"]


@pytest.mark.parametrize("line", [*UPWARD, f"def f():\n    {UPWARD[0]}"])
def test_an_upward_import_is_seen(line):
    assert upward_imports(line, "tpfuse.kernels.selection")


@pytest.mark.parametrize(
    "line",
    ["from .module import local", "from ..kernels import linear", "from tpfuse.parallel import TensorParallel"],
)
def test_a_downward_import_is_not(line):
    assert not upward_imports(line, "tpfuse.layers.linear")


def test_imports_flow_down():
    modules = {module_of(path): text(path) for path in SOURCES if rank(module_of(path)) is not None}
    assert {module.split(".")[1] for module in modules} == set(ORDER)
    upward = {module: upward_imports(source, module) for module, source in modules.items()}
    assert {module: names for module, names in upward.items() if names} == {}


def test_the_order_is_the_door():
    """Every folder and file at the door has its place."""
    assert {path.stem for path in PACKAGE.iterdir() if path.suffix in {"", ".py"} and path.stem != "__pycache__"} == {
        *ORDER,
        *DOOR,
    }


def modules():
    """Dotted names of the library's modules and packages, and their paths."""
    return {module_of(path).removesuffix(".__init__"): path for path in SOURCES}


def imports():
    """{module: the modules of tpfuse that it imports}; of a package's name, the package where it is no module."""
    names = modules()
    return {
        module: {
            next(name for name in (target, target.rpartition(".")[0], "tpfuse") if name in names)
            for target in imported(text(path), module_of(path))
            if target.split(".")[0] == "tpfuse"
        }
        - {module}
        for module, path in names.items()
    }


def circles(edges):
    """Groups of nodes that reach each other."""
    graph = networkx.DiGraph([(a, b) for a, targets in edges.items() for b in targets])
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


def test_no_circle_of_files():
    files = {module: path for module, path in modules().items() if path.stem != "__init__"}
    edges = {module: targets & set(files) for module, targets in imports().items() if module in files}
    assert circles(edges) == []


def test_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


def test_no_name_of_a_package_hides_its_module():
    """``import tpfuse.a.b as m`` gives the module b, not a function of that name."""
    hidden = []
    for name in modules():
        module = importlib.import_module(name)
        parent, _, leaf = name.rpartition(".")
        if parent and getattr(sys.modules[parent], leaf) is not module:
            hidden.append(name)
    assert hidden == []


def test_one_file_imports_triton():
    """Elsewhere its names come from there, where they have a stand-in on systems without triton."""
    names = {name_of(path): [n.split(".")[0] for n in imported(text(path), module_of(path))] for path in SOURCES}
    assert [path for path in names if "triton" in names[path]] == ["tpfuse/kernels/runtime/triton.py"]


FORBIDDEN = {
    r"triton\.(autotune|heuristics)|\bautotune": "ranks that tune differently sum in different orders",
    r"atomic_(add|max|min|cas|xchg)": "float atomics differ from run to run; other sums need none",  # see COUNTING
    r"os\.environ|os\.getenv": "behaviour follows from arguments, not from the environment",
}


LIMITS = "tpfuse/kernels/runtime/processor.py:"  # what oneDNN and MKL read there: compared over ranks, never obeyed
COUNTING = "tpfuse/kernels/runtime/partials.py:"  # of programs that arrive, in integers: who adds, not in which order


@pytest.mark.parametrize("pattern, why", FORBIDDEN.items(), ids=["autotune", "atomics", "environment"])
def test_forbidden(pattern, why):
    uses = [
        f"{name_of(path)}:{line}: {name}"
        for path in SOURCES
        for name, line in attributes(text(path))
        if re.search(pattern, name)
    ]
    uses = [use for use in uses if not (use.startswith(LIMITS) and "os.environ" in use)]
    counting = [use for use in uses if use.startswith(COUNTING) and use.endswith(" tl.atomic_add")]
    assert uses == counting[:1], f"{why}: {uses}"


@pytest.mark.parametrize("line", ["@triton.autotune([])\ndef f(): ...", "tl.atomic_add(p, x)", "os.environ.get('X')"])
def test_what_is_forbidden_is_seen(line):
    assert any(re.search(pattern, name) for name, _ in attributes(line) for pattern in FORBIDDEN)


FRESH = """
import os, sys, tpfuse
assert "torch" not in sys.modules
import importlib, pkgutil, torch

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

if os.fork() == 0:
    assert "triton" not in sys.modules
    sys.meta_path.insert(0, NoTriton())
    for name in [name for name in sys.modules if name.partition(".")[0] == "tpfuse"]:
        del sys.modules[name]
    import tpfuse
    for module in pkgutil.walk_packages(tpfuse.__path__, "tpfuse."):
        importlib.import_module(module.name)
    assert "triton" not in sys.modules and not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
    sys.exit()
assert os.wait()[1] == 0, "without triton"
names = dir(tpfuse)
assert "parallelize" in names and tpfuse.layers.ColumnParallelLinear
assert tpfuse.__version__ and set(tpfuse.__all__) <= set(names) and not hasattr(tpfuse, "nothing")
from tpfuse import *
import tpfuse.layers, tpfuse.models, tpfuse.pipeline
tpfuse.parallelize
later = "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.pipelining"
print(*(name for name in later if name in sys.modules))
"""


def test_imports_need_no_triton_and_leave_to_first_use_what_costs_seconds():
    """Of every module; torch to the first public name, and what takes seconds and 100 MB a rank to where it is used."""
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("\n", "")


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
    lines = [
        (path, i, line)
        for path in TEXTS
        if path.suffix == ".py"
        for i, line in enumerate(path.read_text().splitlines(), 1)
    ]
    assert [f"{name_of(path)}:{i}" for path, i, line in lines if len(line) > 120] == []


# ---- argument lists ----

PARAMETERS, ARGUMENTS = 8, 4  # at most, by position
# called as a Triton kernel is, with pointers and sizes in order; and a Function's, which torch calls by position only
BY_POSITION = {"launch", "apply"}
FOREIGN = {"F", "aten", "contextlib", "dcp", "dist", "nn", "np", "torch"}  # whose names may be the same as ours


@functools.cache
def python_nodes(source):
    """Every definition, assignment and call of a module but those in functions that Triton compiles."""
    stack, found = [tree(source)], []
    while stack:
        node = stack.pop()
        if not any(ast.unparse(d).split("(")[0] == "triton.jit" for d in getattr(node, "decorator_list", [])):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.Call):
                found.append(node)
            stack.extend(ast.iter_child_nodes(node))
    return found


def defined_names(source):
    """Functions, classes, methods, and ops, which are assigned."""
    for node in python_nodes(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "op":
            yield from (ast.unparse(target) for target in node.targets)


def long_signatures(source):
    """Functions with more than PARAMETERS parameters that can be given by position; a method's first is not given, nor
    is the ctx of a Function."""
    for node in python_nodes(source):
        if isinstance(node, ast.FunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            count = len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))
            if count > PARAMETERS:
                yield f"line {node.lineno}: {node.name} has {count} positional parameters"


def long_calls(source, names):
    """Calls of the names with more than ARGUMENTS positional arguments; a record spelled out (``*record``) is one."""
    for node in python_nodes(source):
        if isinstance(node, ast.Call) and len(node.args) > ARGUMENTS:
            root, _, name = ast.unparse(node.func).rpartition(".")
            if name in names - BY_POSITION and root.split(".")[0] not in FOREIGN:
                yield f"line {node.lineno}: {name} is called with {len(node.args)} positional arguments"


@functools.cache
def our_names():
    return {name for path in SOURCES for name in defined_names(text(path))}


def test_argument_lists_are_short():
    ours = our_names()
    long = [f"{name_of(p)}: {use}" for p in SOURCES for use in (*long_signatures(text(p)), *long_calls(text(p), ours))]
    assert long == []


@pytest.mark.parametrize(
    "source, message",
    [
        ("def f(a, b, c, d, e, f, g, h, i): ...", "line 1: f has 9 positional parameters"),
        ("class A:\n    def m(self, a, b, c, d, e, f, g, /, h, i): ...", "line 2: m has 9 positional parameters"),
        ("f(1, 2, 3, 4, 5)", "line 1: f is called with 5 positional arguments"),
        ("x = [self.f(*a, 2, 3, 4, *b)]", "line 1: f is called with 5 positional arguments"),
        ("g = op(f_ref)\ng(1, 2, 3, 4, 5)", "line 2: g is called with 5 positional arguments"),
    ],
)
def test_a_long_argument_list_is_seen(source, message):
    assert [*long_signatures(source), *long_calls(source, {"f", *defined_names(source)})] == [message]


@pytest.mark.parametrize(
    "source",
    [
        "def f(a, b, c, d, e, f, g, h, *, i): ...",
        "@triton.jit\ndef f(a, b, c, d, e, f, g, h, i):\n    f(1, 2, 3, 4, 5)",
        "f(1, 2, 3, *record, e=5)",
        "torch.f(1, 2, 3, 4, 5)",
        "class G(Function):\n    def forward(ctx, a, b, c, d, e): ...\nG.apply(1, 2, 3, 4, 5)",
        "def launch(): ...\nlaunch(1, 2, 3, 4, 5)",
    ],
)
def test_a_short_argument_list_is_not(source):
    assert [*long_signatures(source), *long_calls(source, {"f", *defined_names(source)})] == []


# ---- arguments that belong together are records ----

# "path:function" -> why its arguments are a dict, or spelled out by name (``**options``), where mypy sees neither
LOOSE: dict[str, str] = dict.fromkeys(
    (
        f"tpfuse/pipeline/runtime.py:ChunkStage.{method}"
        for method in (
            "_prepare_forward_infra",
            "_prepare_backward_infra",
            "forward_one_chunk",
            "backward_one_chunk",
            "backward_weight_one_chunk",
        )
    ),
    "hands on the arguments of a method of torch, whose signature differs between versions",
)
RECORDS = ["kernels", "ranks", "sequence_parallel", "layers", "pipeline", "parallel", "collectives"]
# Of rooms that are not there yet, how many are left beside LOOSE; and of the whole library, at most
LATE = {"kernels": 10, "layers": 12}
ALL = 180


def loose_arguments(source):
    """Yields (function, line, "dict[str, Any]" or the call) of each.  A Triton kernel is called with its constants by
    name, by ``launch`` and by ``kernel[grid]``: these are not counted."""

    stack = [(tree(source), "")]
    while stack:
        node, function = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".removeprefix(".")
        elif isinstance(node, ast.Subscript) and ast.unparse(node) == "dict[str, Any]":
            yield function, node.lineno, "dict[str, Any]"
        elif isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords):
            if ast.unparse(node.func) not in ("launch", "kernel[grid]"):
                yield function, node.lineno, ast.unparse(node)
        stack += [(child, function) for child in reversed(list(ast.iter_child_nodes(node)))]


@functools.cache
def loose_by_room():
    """{room: [(path:function, path:line: text)]}"""
    rooms = {}
    for path in SOURCES:
        uses = rooms.setdefault(path.relative_to(PACKAGE).with_suffix("").parts[0], [])
        for function, line, use in loose_arguments(text(path)):
            uses.append((f"{name_of(path)}:{function}", f"{name_of(path)}:{line}: {use}"))
    return rooms


def loose(room):
    """Without what LOOSE allows."""
    return [use for function, use in loose_by_room().get(room, []) if function not in LOOSE]


@pytest.mark.parametrize("room", RECORDS)
def test_arguments_are_records(room):
    assert len(loose(room)) <= LATE.get(room, 0), loose(room)


def test_few_arguments_are_no_records():
    assert sum(len(loose(room)) for room in loose_by_room()) <= ALL


def test_every_exception_is_one():
    """LOOSE names functions that exist and need it."""
    assert set(LOOSE) <= {function for uses in loose_by_room().values() for function, _ in uses}


def test_loose_arguments_are_seen():
    source = (
        "class A:\n"
        "    def m(self, x: dict[str, Any], y: dict[str, int]):\n"
        "        f(x, **y)\n"
        "        launch(k, grid, **x)\n"
        "dict(**z)"
    )
    assert list(loose_arguments(source)) == [
        ("A.m", 2, "dict[str, Any]"),
        ("A.m", 3, "f(x, **y)"),
        ("", 5, "dict(**z)"),
    ]


# ---- tests stand where their sources stand ----

TESTS = sorted(path for path in ROOT.glob("tests/**/test_*.py"))
ELSEWHERE: set[str] = {
    "tests/kernels/attn/test_features.py",
    "tests/kernels/attn/test_launch.py",
    "tests/kernels/norm/test_dropout.py",
    "tests/kernels/norm/test_embed_finish.py",
    "tests/kernels/norm/test_fused_norm.py",
    "tests/kernels/norm/test_norm.py",
    "tests/kernels/norm/test_reduce_bias_dropout_add_norm.py",
    "tests/kernels/test_compile.py",
    "tests/kernels/test_driver.py",
    "tests/kernels/test_hostile.py",
    "tests/kernels/test_overflow.py",
}  # which do not yet


def sources_of(path):
    """What a test file of this name stands for: the module or folder at its place in tpfuse/, of a script, or of the
    tests' own tools."""
    place = path.relative_to(ROOT / "tests")
    place = place.with_name(place.stem.removeprefix("test_"))
    names = [place, place.with_name(f"_{place.name}"), place.with_name(f"__{place.name}__")]
    roots = [PACKAGE, ROOT, ROOT / "tests"]
    return [
        root / name for root in roots for name in names if (root / name).is_dir() or (root / f"{name}.py").is_file()
    ]


def spans(source):
    """Whether the docstring has a line that says what the tests cover and why they stand there."""
    return re.search(r"^Spans: \S", ast.get_docstring(ast.parse(source)) or "", re.MULTILINE) is not None


def test_tests_mirror_the_sources():
    astray = {name_of(path) for path in TESTS if not (sources_of(path) or spans(path.read_text()))}
    assert astray <= ELSEWHERE, sorted(astray - ELSEWHERE)


def test_a_test_without_a_source_is_seen():
    at = lambda name: sources_of(ROOT / "tests" / name)
    assert at("layers/test_block.py") == [PACKAGE / "layers/block"]
    assert at("bench/test_link.py") == [ROOT / "bench/_link"] and at("test_pool.py") == [ROOT / "tests/pool"]
    assert at("models/test_block.py") == at("test_nothing.py") == []
    assert spans('"""A title.\n\nSpans: all of it."""') and not spans('"""Spans:"""') and not spans("x = 1")
