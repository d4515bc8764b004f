"""The README and the pages of docs/: their Python blocks run, their shell commands parse, their links lead somewhere.

The blocks of one page run in order, in one namespace and in a fresh directory that holds a small GPT-2 at path/to/gpt2.

Spans: README.md, CHANGELOG.md and docs/*.md.
"""

import importlib
import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.common import error, make_tp
from tpfuse.__main__ import parser
from tpfuse.layers.shards import named_specs

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
RANKS = {
    "README.md": 2,
    "docs/training.md": 2,
    "docs/data_parallel.md": 2,
    "docs/context.md": 2,
    "docs/experts.md": 2,
    "docs/coming_from.md": 2,
    "docs/faults.md": 2,
    "docs/bits.md": 2,
    "docs/pipeline.md": 2,
    "docs/plan.md": 0,
}  # pages for torchrun --nproc-per-node 2; 0: this process, which is in no process group; the others are for one rank


def name_of(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
FIRST = blocks(ROOT / "README.md", "python")[0]
TP = "tp = TensorParallel(sequence_parallel=True)  # one process\n"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


# ---- Python ----


def run_blocks(world, texts: list[str], page: str, folder: str) -> dict[str, Tensor]:
    """The tensors that the blocks leave behind."""
    before, names = os.getcwd(), {}
    os.chdir(folder)
    if world is not None and world.size > 1:
        os.environ["TORCHELASTIC_RUN_ID"] = "pool"  # a page for torchrun sees that it is under it
    try:
        for text in texts:
            exec(compile(text, page, "exec"), names)
    finally:
        os.chdir(before)
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
    return {name: value.detach() for name, value in names.items() if isinstance(value, Tensor)}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> pathlib.Path:
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64
    )  # the real vocabulary, of which the text is
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


LEFT = {  # files that a page's blocks write
    "README.md": ["path/to/out/model.safetensors"],
    "docs/models.md": ["path/to/out/model.safetensors"],
    "docs/training.md": ["checkpoints/latest"],
    "docs/fine_tuning.md": ["path/to/adapter/adapter_config.json", "path/to/merged/config.json"],
}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_blocks_run(page, ranks, gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path / "path/to/gpt2")
    name, texts = name_of(page), blocks(page, "python")
    size, folder = RANKS.get(name, 1), str(tmp_path)
    found = ranks(size, run_blocks, texts, name, folder)[0] if size else run_blocks(None, texts, name, folder)
    assert all((tmp_path / file).is_file() for file in LEFT.get(name, []))
    assert all(torch.isfinite(value).all() for key, value in found.items() if key in ("loss", "h", "x"))
    if name in ("README.md", "docs/models.md"):
        assert found["tokens"].shape == (1, 11)


class PageBlock(NamedTuple):
    """A Python block, the heading that it stands under, and the headings that its first line goes on from."""

    heading: str
    code: str
    before: list[str]


def page_blocks(text: str) -> list[PageBlock]:
    parts, heading = [], ""
    for title, code in re.findall(r"^#+ ([^\n]*)$|^```(?:python\n(.*?)|[a-z]*\n.*?)^```", text, re.S | re.M):
        heading = title or heading
        if code:
            first = code.splitlines()[0]
            before = re.findall(r'"([^"]+)"', first) if first.startswith("# goes on from ") else []
            parts.append(PageBlock(heading, code, before))
    return parts


def undefined(codes: list[str], folder: pathlib.Path) -> list[set[str]]:
    """The names of each that it does not define."""
    for i, code in enumerate(codes):
        (folder / f"{i}.py").write_text(code)
    rules = "--isolated", "--no-cache", "--select", "F821", "--output-format", "concise"
    done = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, str(folder)], capture_output=True, text=True)
    names = [set() for _ in codes]
    for number, name in re.findall(r"(\d+)\.py:.*Undefined name `(\w+)`", done.stdout):
        names[int(number)].add(name)
    return names


def wrong_blocks(texts: list[str], folder: pathlib.Path) -> list[str]:
    """Blocks that use names from above and do not say from where, or say so and need nothing, by their first lines."""
    blocks, wholes = [], []
    for text in texts:
        on_page = page_blocks(text)
        for i, block in enumerate(on_page):
            above, headings = [], set(block.before)
            for other in reversed(on_page[:i]):
                if other.heading in headings:
                    above.insert(0, other.code)
                    headings |= set(other.before)
            blocks.append(block)
            wholes.append("\n".join([*above, block.code]))
    alone = undefined([block.code for block in blocks], folder)
    together = undefined(wholes, folder)
    return [
        block.code.splitlines()[0]
        for block, names, rest in zip(blocks, alone, together, strict=True)
        if rest or bool(names) != bool(block.before)
    ]


def test_a_block_stands_alone_or_says_what_it_goes_on_from(tmp_path):
    assert wrong_blocks([page.read_text() for page in WITH_PYTHON], tmp_path) == []


def test_a_block_that_does_not_say_so_is_seen(tmp_path):
    page = """# A\n```python\nx = 1\n```\n# B\n```python\n{}y = x\n```\n"""
    assert wrong_blocks([page.format('# goes on from "A"\n')], tmp_path) == []
    assert wrong_blocks([page.format("")], tmp_path) == ["y = x"]
    assert len(wrong_blocks([page.format('# goes on from "B"\n')], tmp_path)) == 1


def test_readme_has_its_examples():
    assert len(blocks(ROOT / "README.md", "python")) == 4 and TP in FIRST
    assert {"README.md", *(f"docs/{stem}.md" for stem in STEMS)} == {name_of(page) for page in WITH_PYTHON}


STEMS = """bits coming_from context data_parallel experts faults fine_tuning kernels layers ledger models overlap
packing pipeline plan sparse training""".split()


@pytest.mark.slow
def test_the_blocks_of_the_readme_run_in_plain_python(gpt2, tmp_path):
    """As they are pasted one after another, in one process that torchrun did not start."""
    shutil.copytree(gpt2, tmp_path / "path/to/gpt2")
    text = "\n".join(blocks(ROOT / "README.md", "python"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = dict(capture_output=True, text=True, cwd=tmp_path, env=environment)
    done = subprocess.run([sys.executable, "-"], input=text, **run)
    assert done.returncode == 0, done.stderr


def first_example(world, text: str = FIRST) -> tuple[float, dict[str, Tensor], dict[str, tuple[slice, ...]]]:
    """-> the loss, this rank's gradients, and which slices of the whole they are."""
    names = {"given": make_tp(world)}
    exec(text.replace(TP, "tp = given\n"), names)
    module = torch.nn.ModuleDict({key: names[key] for key in ("embedding", "block", "head")})
    specs = {name: spec.local(tp) for name, _, spec, tp in named_specs(module)}
    return names["loss"].item(), {name: p.grad for name, p in module.named_parameters()}, specs


@pytest.mark.parametrize("size", [2, 4])
def test_the_first_example_does_not_depend_on_the_split(ranks, size):
    loss, whole, _ = ranks(1, first_example)[0]
    assert len(whole) == 15
    for ours, grads, specs in ranks(size, first_example):
        assert math.isclose(ours, loss, rel_tol=1e-5)
        errors = {name: error(grads[name], whole[name][specs[name]]) for name in whole}
        assert max(errors.values()) <= 1e-5, errors


def test_a_wrong_collective_in_the_first_example_is_seen(ranks):
    (_, whole, _), (_, twice, specs) = (
        ranks(1, first_example)[0],
        ranks(2, first_example, FIRST.replace("import collect", "import gather as collect"))[0],
    )
    assert error(twice["head.weight"], 2 * whole["head.weight"][specs["head.weight"]]) <= 1e-5


# ---- shell ----


COMMANDS = [
    (name_of(page), line)
    for page in PAGES
    for text in blocks(page, "sh")
    for line in map(str.strip, text.splitlines())
    if line and not line.startswith("#")
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
VARIABLES = set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.M))


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def with_options(script: pathlib.Path) -> str:
    """The text of a script and of the modules beside it that it imports, one of which may hold its options."""
    text = script.read_text()
    return text + "".join(
        (script.parent / f"{name}.py").read_text() for name in re.findall(r"^from (_\w+) ", text, re.M)
    )


@pytest.mark.parametrize("page, line", COMMANDS, ids=lambda text: text)
def test_commands_exist(page, line, monkeypatch):
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        assert {word.partition("=")[0] for word in words} <= TARGETS | VARIABLES
    elif program == "torchrun":
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        source = with_options(ROOT / words[script])
        assert all(f'"{flag}"' in source for flag in flags(words[script:]))
    elif program == "python":
        assert words[0] == "-m"
        module, argv = words[1], words[2:]
        if "--help" in argv:
            assert importlib.util.find_spec(module)
        elif module == "tpfuse":
            parser().parse_args(argv)
        elif hasattr(importlib.import_module(module), "arguments"):
            monkeypatch.setattr(sys, "argv", [module, *argv])
            importlib.import_module(module).arguments()
        else:
            source = pathlib.Path(importlib.util.find_spec(module).origin).read_text()
            assert all(f'"{flag}"' in source for flag in flags(argv))
    else:
        assert program == "pip" and words[0] == "install"


# ---- links ----


def anchors(page: pathlib.Path) -> set[str]:
    """As GitHub and Python-Markdown make them of plain headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def dangling(page: pathlib.Path, text: str) -> list[str]:
    """Links that lead nowhere in this tree; the pages name papers by their number, with no link to another site."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    assert dangling(page, page.read_text()) == []


@pytest.mark.parametrize("link", ["nowhere.md", "README.md#nothing", "#nothing", "https://example.org/paper"])
def test_a_dangling_link_is_seen(link):
    assert dangling(ROOT / "README.md", f"[words]({link})") == [link]
