"""Files that appear whole or not at all: written beside, moved under their names when all is there.

Several files are written in a directory, which is a new one by a random name: nothing that was there before is used or
followed, be it what a killed save left or somebody's link.  A link under a final name is replaced.
"""

import contextlib
import filecmp
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

_CONFIGS = "config.json", "adapter_config.json"  # without which nothing reads a directory


class NewFiles:
    """A directory for unfinished files of ``path``, which is made where it is missing.

    As a context it yields that directory, and removes it at the end; after an error also what was made of ``path``.
    OSError, which names ``caller``, where nothing can be written there.
    """

    def __init__(self, path: Path, caller: str):
        self.path, self.caller = path, caller
        self._made = [p for p in (path, *path.parents) if not os.path.lexists(p)]
        try:
            if path.exists() and not path.is_dir():
                raise FileExistsError("it exists and is not a directory")
            path.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=".saving-", dir=path))
            self._is_half_done = False
        except (OSError, ValueError) as error:
            self._remove_made()
            raise OSError(f"{caller}: {path} cannot be written: {error}") from error

    def __enter__(self) -> Path:
        return self.folder

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if not self._is_half_done:  # else it has files that were there before, which could not go back
            shutil.rmtree(self.folder, ignore_errors=True)
        if error is not None:
            self._remove_made()

    def _remove_made(self) -> None:
        for path in self._made:
            with contextlib.suppress(OSError):  # others have come to use it
                path.rmdir()

    def publish(self, superseded: Iterable[Path] = ()) -> None:
        """Moves every file to its place, over one of the same name, and removes what is ``superseded``.

        Of several files that change the config goes first and comes last, so that a directory with files of two saves
        has none, and no reader.  OSError, and every file stays as it was, where one cannot be moved.
        """
        names = sorted((file.name for file in self.folder.iterdir()), key=lambda name: (name not in _CONFIGS, name))
        for name in names:
            place = self.path / name
            if place.is_dir() and not place.is_symlink():
                raise OSError(f"{self.caller}: {place} cannot be written: it is a directory")
            fsync(self.folder / name)
        earlier = [name for name in names if os.path.lexists(self.path / name)]
        earlier += [file.name for file in superseded if file.name not in names]
        if sum(not self._is_unchanged(name) for name in {*names, *earlier}) > 1:
            self._exchange(names, earlier)
        else:
            for name in names:
                os.replace(self.folder / name, self.path / name)
        fsync(self.path)

    def _is_unchanged(self, name: str) -> bool:
        """Returns whether a small file has the contents of the one in its place."""
        new, place = self.folder / name, self.path / name
        if new.suffix == ".safetensors" or not new.exists() or not place.is_file() or place.is_symlink():
            return False
        return filecmp.cmp(new, place, shallow=False)

    def _exchange(self, names: Sequence[str], earlier: Sequence[str]) -> None:
        """Sets the files ``earlier`` aside and moves those of ``names`` to their places; after an error all of them go
        back."""
        old, self._is_half_done = self.folder / "old", True
        try:
            old.mkdir()
            for name in earlier:
                os.replace(self.path / name, old / name)
            for name in reversed(names):
                os.replace(self.folder / name, self.path / name)
        except BaseException:
            for name in names:
                if not os.path.lexists(self.folder / name):
                    (self.path / name).unlink(missing_ok=True)
            for name in reversed(earlier):
                if os.path.lexists(old / name):
                    os.replace(old / name, self.path / name)
            self._is_half_done = False
            raise
        self._is_half_done = False


def save_file(tensors: dict[str, Tensor], file: Path) -> None:
    """Writes tensors as safetensors, with the permissions of any other new file; OSError where that fails."""
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        safetensors.save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
    file.chmod(mode)


def write_json(value: dict[str, Any], file: Path) -> None:
    """Writes a config; OSError, which names the file, where that fails: a full disk's does not."""
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    try:
        file.write_text(text)
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error.strerror or error}") from error


def new_file(path: Path) -> BinaryIO:
    """Opens a file that is not there yet for writing; OSError where something is, were it a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return open(os.open(path, flags, 0o666), "wb")


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Writes one file whole or not at all, by way of a new file beside it.

    ``durable``: it is on disk before it has its name.  The name itself is once the directory's :func:`fsync` is done.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # of a killed save, or a link, whose target stays
    try:
        with new_file(new) as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def fsync(path: Path) -> None:
    """Waits until a file, or a directory's list of files, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
