"""Runs the everyday suite with other versions of PyTorch, Triton, NumPy and Python than the pinned ones.

python -m tests.versions                           every environment, as make test-versions does
python -m tests.versions oldest -- tests/layers    one of them, and a part of the suite: pytest takes what follows --

An environment is a venv in .versions/NAME, which the pythonX.Y on PATH makes on first use.  PyTorch comes as pip finds
it, on Linux with its CUDA packages: about 5 GB an environment.  What ENVIRONMENTS omits is as in constraints.txt.
"""

import argparse
import pathlib
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


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
    kept = [line for line in lines if line.partition("==")[0] not in packages]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in packages.items())]) + "\n"


def build(name: str) -> pathlib.Path:
    """-> the environment's Python; an environment that is complete and of the same versions is left alone."""
    environment, home = ENVIRONMENTS[name], ROOT / ".versions" / name
    python, stamp, wanted = home / "bin/python", home / "installed.txt", constraints(ENVIRONMENTS[name].packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    home.mkdir(parents=True, exist_ok=True)
    (home / "constraints.txt").write_text(wanted)
    subprocess.run([f"python{environment.python}", "-m", "venv", home], check=True)
    install = [python, "-m", "pip", "install", "-q", "-c", home / "constraints.txt", "-e", f"{ROOT}[test,demo]"]
    subprocess.run(install, check=True)
    stamp.write_text(wanted)
    return python


def main() -> str | None:
    """-> what failed, None if nothing did."""
    before, after = sys.argv[1:], []
    if "--" in before:
        split = before.index("--")
        before, after = before[:split], before[split + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(ENVIRONMENTS)} (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s; 0: this one)")
    args = parser.parse_args(before)
    if unknown := sorted(set(args.names) - set(ENVIRONMENTS)):
        parser.error(f"no environment {', '.join(unknown)}; there are {', '.join(ENVIRONMENTS)}")
    failed = []
    for name in args.names or ENVIRONMENTS:
        python, versions = build(name), ENVIRONMENTS[name]
        print(f"{name}: Python {versions.python}, {', '.join(map(' '.join, versions.packages.items()))}", flush=True)
        suite = ["-m", "pytest", "-n", str(args.jobs), "--dist", "worksteal", "-m", "not slow and not gpu", *after]
        if subprocess.run([python, *suite], cwd=ROOT).returncode:
            failed.append(name)
    return f"failed: {', '.join(failed)}" if failed else None


if __name__ == "__main__":
    sys.exit(main())
