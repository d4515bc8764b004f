"""Installed versions, against those that tpfuse has been tested with."""

import importlib.metadata
import platform
from typing import NamedTuple

from ..._version import __version__
from .report import FAULT, NOTE, Finding


class Range(NamedTuple):
    """``least`` is what pyproject.toml asks for, "" where it asks for nothing.  The suite has passed with ``oldest``
    and ``newest``."""

    least: str
    oldest: str
    newest: str


TESTED = {
    "Python": Range("3.10", "3.11", "3.12"),
    "torch": Range("2.11", "2.11.0", "2.15.0"),
    "triton": Range("3.6", "3.6.0", "3.9.0"),
    "numpy": Range("", "2.3.5", "2.5.5"),
    "einops": Range("", "0.8.2", "0.8.2"),
    "safetensors": Range("", "0.8.0", "0.8.0"),
}
OPTIONAL = ("triton",)  # CPU tensors do not need it


def installed(name: str) -> str | None:
    """Returns the installed version of a package, or of Python; None where it is missing."""
    try:
        return platform.python_version() if name == "Python" else importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13), which is what ranges are compared by: a patch release counts as tested."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def findings() -> list[Finding]:
    """Returns a line for each package; one that is missing or older than the least is a fault."""
    packages = [judged(name, installed(name), tested) for name, tested in TESTED.items()]
    return [Finding("tpfuse", __version__), *packages]


def judged(name: str, version: str | None, tested: Range) -> Finding:
    least, oldest, newest = tested
    if version is None:
        status = NOTE if name in OPTIONAL else FAULT
        return Finding(name, "not installed", status, f"Install {name}{least and ' ' + least + ' or later'}.")
    span = f"{oldest} to {newest}" if oldest != newest else newest
    if least and release(version) < release(least):
        return Finding(name, version, FAULT, f"Install {name} {least} or later, tpfuse needs it; tested: {span}.")
    if release(version) < release(oldest):
        return Finding(name, version, NOTE, f"Nobody has tested {name} this old; tested: {span}.")
    if release(version) > release(newest):
        return Finding(name, version, NOTE, f"Nobody has tested {name} this new; tested: {span}.")
    return Finding(name, f"{version} (tested: {span})")
