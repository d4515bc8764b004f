"""The site builds without a warning and without the network, and its API reference has every public name.

Spans: mkdocs.yml, docs/api.md and the docstrings of public names.
"""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MODULES = "", ".kernels", ".collectives", ".sequence_parallel", ".layers", ".models", ".packing", ".ledger"


def public(name: str) -> set[str]:
    """``tpfuse.a.b`` of everything that a module exports; collectives has a table in place of an __all__."""
    module = importlib.import_module(name)
    if name == "tpfuse.collectives":
        names = re.findall(r"^    (\w+)(?:\(\w+\))? +[RPS] -> [RSV] ", module.__doc__, re.M)
    else:
        names = [key for key in module.__all__ if key != "__version__"]
    return {f"{name}.{key}" for key in names}


@pytest.mark.slow
def test_the_site_is_built_and_complete(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    offline = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=offline)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    anchors = {
        a for page in (tmp_path / "site").rglob("*.html") for a in re.findall(r'id="(tpfuse[^"]*)"', page.read_text())
    }
    wanted = set().union(*(public(f"tpfuse{module}") for module in MODULES))
    assert len(wanted) > 60 and wanted - anchors == set()
    fetched = {
        link
        for page in (tmp_path / "site").rglob("*.html")
        for link in re.findall(r'(?:src|href)="(https?:[^"]+)"', page.read_text())
    }
    assert {link for link in fetched if "squidfunk.github.io" not in link} == set()
