"""Files that appear whole or not at all: written in a directory beside, moved under their names when all are there."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def new_folder(path: Path) -> Path:
    """Makes ``path`` and in it a directory for unfinished files; returns the latter."""
    path.mkdir(parents=True, exist_ok=True)
    folder = path / f".saving-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return folder


def move(folder: Path, path: Path) -> set[str]:
    """Moves every file of ``folder`` to ``path``, over those of the same names; returns the names."""
    new = {file.name for file in folder.iterdir()}
    for name in sorted(new):
        fsync(folder / name)
        os.replace(folder / name, path / name)
    return new


def replace_files(path: Path, files: Mapping[str, Callable[[Path], Any]]) -> None:
    """Writes each file by its function, in a directory beside; all are there before the first gets its name."""
    folder = new_folder(path)
    try:
        for name, write in files.items():
            write(folder / name)
        move(folder, path)
        fsync(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fsync(path: Path) -> None:
    """Waits until a file, or a directory's list of files, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
