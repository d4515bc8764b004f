"""A folder of checkpoints: which is the latest, how a new one appears whole or not at all, which are removed."""

import json
import os
import re
import secrets
import shutil
import warnings
from pathlib import Path

from ...models.files.disk import fsync, write_whole
from ...ranks.shared_memory import host
from .errors import errors_at
from .job import is_alive, is_here, read_job, this_job, write_job
from .meta import WITH_GRADIENT, has_contents, plain, read_text

LATEST, META = "latest", "meta.json"
SAVING = "saving.json"  # in a checkpoint that is being written: by whom
_NAME = re.compile(r"step-(\d{8,})(-\d+)?")
_STALE = 3600.0  # seconds without a write, after which nobody writes any more: twice what a rank waits for another


def read_latest(directory: Path) -> str | None:
    """Returns the name of the newest checkpoint; None where there is none.

    ValueError where the name is not that of a folder in ``directory``.
    """
    latest = directory / LATEST
    if not os.path.lexists(latest):
        return None
    name = read_text(latest).decode(errors="replace").removesuffix("\n")
    if not plain(name):
        raise ValueError(f"{latest} must name a checkpoint beside it, got {name[:60]!r}")
    with errors_at(latest):
        if (directory / name).resolve().parent != directory.resolve():
            raise OSError(f"names {name}, which leads out of the folder")
        if not (directory / name).is_dir():
            raise OSError(f"names {name}, which is not there")
    return name


def warn_of_newer(path: Path) -> None:
    """Warns where a whole checkpoint of a later step stands beside the one that ``latest`` names: somebody pointed it
    back, or its text was damaged into another checkpoint's name."""
    if not _NAME.fullmatch(path.name):
        return
    with errors_at(path.parent):
        folders = [f for f in path.parent.iterdir() if _NAME.fullmatch(f.name) and not _is_unfinished(f)]
    newest = max(folders, key=_step, default=path)
    if _step(newest) > _step(path):
        warnings.warn(
            f"load_checkpoint: {path.parent / LATEST} names {path.name}, and {newest.name} is there too: training goes"
            " on from the earlier one",
            stacklevel=4,
        )


def new_checkpoint(directory: Path, step: int) -> Path:
    """Makes a folder that was not there yet: an existing checkpoint is never written over."""
    attempt = 0
    while True:
        path = directory / (f"step-{step:08d}" + f"-{attempt}" * bool(attempt))
        with errors_at(path):
            try:
                path.mkdir()
            except FileExistsError:
                attempt += 1
                continue
        try:
            write_job(path / SAVING, this_job(secrets.token_hex(8)))
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return path


def check_shared(path: Path, saving: bytes) -> None:
    """OSError where this rank does not see the folder that rank 0 made, with the file that it wrote there."""
    if not has_contents(path / SAVING, saving):
        raise OSError(f"{path.parent} of {host()[0]} is not the folder that rank 0 writes to: all ranks must share one")


def publish(path: Path, meta: bytes) -> None:
    """Writes meta.json, then makes the checkpoint the latest; all of it is on disk when this returns."""
    with errors_at(path / META):
        write_whole(path / META, meta)
    with errors_at(path):
        fsync(path)
    with errors_at(path.parent / LATEST):
        write_whole(path.parent / LATEST, f"{path.name}\n".encode())
    with errors_at(path):
        (path / SAVING).unlink()
        fsync(path.parent)


def tidy(newest: Path, keep: set[str]) -> None:
    """Removes what the last two checkpoints superseded, and saves that never were finished.

    A copy under another name stays, and a later step's, which exists where somebody pointed ``latest`` back; so does
    what another job may still be writing.  The checkpoint is published: what cannot be removed now stays.
    """
    try:
        for folder in newest.parent.iterdir():
            if _NAME.fullmatch(folder.name) and folder.name not in keep:
                if _is_abandoned(folder) if _is_unfinished(folder) else _is_superseded(folder, newest):
                    shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass


def _is_unfinished(folder: Path) -> bool:
    return (folder / SAVING).exists() or not (folder / META).is_file()


def _is_abandoned(folder: Path) -> bool:
    """Returns whether nobody writes there any more: the process is gone, or, if it cannot be looked up, silent."""
    writer = read_job(folder / SAVING)
    if writer is not None and is_here(writer):
        return writer.pid == os.getpid() or not is_alive(writer)
    newest = (folder.parent / LATEST).stat().st_mtime  # by the clock that stamps the others
    return all(newest - file.stat().st_mtime > _STALE for file in (folder, *folder.iterdir()))


def _is_superseded(folder: Path, newest: Path) -> bool:
    if _step(folder) > _step(newest):
        return False
    try:
        meta = json.loads(read_text(folder / META))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(meta, dict) or meta.get("name") != folder.name:
        return False
    version = meta.get("version")
    return type(version) is int and version <= WITH_GRADIENT  # a later format may mean something else by its fields


def _step(folder: Path) -> int:
    name = _NAME.fullmatch(folder.name)
    assert name is not None
    return int(name[1])
