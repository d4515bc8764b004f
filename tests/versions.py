"""Runs the everyday suite with other versions of PyTorch, Triton, NumPy and Python than the pinned ones.

An environment is a venv in .versions/NAME, which the pythonX.Y on PATH makes on first use.  PyTorch comes as pip finds
it, on Linux with its CUDA packages: about 5 GB an environment.  What ENVIRONMENTS omits is as in constraints.txt.
"""

import pathlib
import subprocess
import sys
from typing import NamedTuple

from tests import suites
from tests.suites import ROOT


class Environment(NamedTuple):
    python: str
    packages: dict[str, str]


ENVIRONMENTS = {
    # The least that pyproject.toml admits.  Triton 3.6's interpreter needs numpy < 2.4, torch 2.11 setuptools < 82.
    "oldest": Environment("3.11", dict(torch="2.11.0", triton="3.6.0", numpy="2.3.5", setuptools="81.0.0")),
    # The newest that pip brings.
    "newest": Environment("3.12", dict(torch="2.15.0", triton="3.9.0", numpy="2.5.5")),
}


def constraints(packages: dict[str, str]) -> str:
    """constraints.txt with the versions of ``packages`` in place of its own."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    others = [line for line in lines if line.partition("==")[0] not in packages]
    return "\n".join([*others, *(f"{name}=={version}" for name, version in packages.items())]) + "\n"


def build(name: str) -> pathlib.Path:
    """-> the environment's Python; an environment that is complete and of the same versions is left alone."""
    environment, home = ENVIRONMENTS[name], ROOT / ".versions" / name
    python, stamp, pins = home / "bin/python", home / "installed.txt", constraints(ENVIRONMENTS[name].packages)
    if stamp.exists() and stamp.read_text() == pins:
        return python
    home.mkdir(parents=True, exist_ok=True)
    (home / "constraints.txt").write_text(pins)
    subprocess.run([f"python{environment.python}", "-m", "venv", home], check=True)
    install = [python, "-m", "pip", "install", "-q", "-c", home / "constraints.txt", "-e", f"{ROOT}[test,demo]"]
    subprocess.run(install, check=True)
    stamp.write_text(pins)
    return python


def setting(name: str) -> suites.Setting:
    python, packages = ENVIRONMENTS[name]
    about = f"Python {python}, {', '.join(map(' '.join, packages.items()))}"
    return suites.Setting(build(name), about=about)


if __name__ == "__main__":
    sys.exit(suites.command("tests.versions", __doc__, ENVIRONMENTS, setting))
