"""The wheel holds the package as the tree has it: every module and every table, and nothing else.

Spans: pyproject.toml.
"""

import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(path for path in (ROOT / "tpfuse").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('.')"


def test_a_wheel_is_built_of_the_package(tmp_path):
    pytest.importorskip("setuptools.build_meta")
    for path in [*FILES, ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        scripts = next(name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
        assert wheel.read(scripts).decode().split() == ["[console_scripts]", "tpfuse", "=", "tpfuse.__main__:main"]
    assert names == {str(path.relative_to(ROOT)) for path in FILES}
    assert {"tpfuse/tools/bench/command.py", "tpfuse/tools/bench/ops/layer_norm.py"} <= names
