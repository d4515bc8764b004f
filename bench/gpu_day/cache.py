"""Compiled kernels on their way between machines: tar files of bounded size and number.

Triton writes absolute paths into its cache, which therefore lies in the same place on every machine.  An entry is a
folder two levels down (cache/triton/HASH, cache/inductor/XY), or a file that lies higher; each goes whole into one
file.
"""

import pathlib
import tarfile
import tempfile
import time
import zlib

ROOT = pathlib.Path(tempfile.gettempdir()) / "tpfuse-gpu-day" / "cache"
SIZE, FILES = 15_000_000, 3  # with results.json, log.txt and this repository less than the 64 MiB that travel back
MARGIN = 300_000  # bytes that the compressor may still hold when a file's size is asked
FOLDERS = "triton", "inductor"  # in order of worth


def entries(root: pathlib.Path) -> list[pathlib.Path]:
    """Triton's first, and of each the oldest: what every call compiles comes before the candidates of a tuning."""
    files = []
    for folder in (root / name for name in FOLDERS):
        paths = folder.iterdir() if folder.is_dir() else []
        files += sorted(paths, key=lambda path: (path.stat().st_mtime, path))
    return files


def size(path: pathlib.Path) -> int:
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return sum(1024 + p.stat().st_size for p in files)


def pack(root: pathlib.Path, target: pathlib.Path, until: float = float("inf"), limit: int = SIZE) -> list[str]:
    """Replaces the tar files in ``target``; returns a line for what did not fit, in size or before ``until``."""
    for old in target.glob("cache-*.tar.gz*"):
        old.unlink()
    waiting, left, number = entries(root), 0, 0
    while waiting and number < FILES:
        path = target / f"cache-{number}.tar.gz"
        number += 1
        with (
            open(path.with_suffix(".new"), "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz", compresslevel=3) as tar,
        ):
            while waiting and time.time() < until:
                need = size(waiting[0])
                if need + MARGIN > limit:
                    left += 1
                elif file.tell() + need + MARGIN > limit:
                    break
                else:
                    tar.add(waiting[0], waiting[0].relative_to(root))
                del waiting[0]
        path.with_suffix(".new").replace(path)
        if time.time() >= until:
            break
    left += len(waiting)
    return [f"{left} entries of the compile cache were left behind: no room or no time"] if left else []


def unpack(folder: pathlib.Path, root: pathlib.Path) -> list[str]:
    """Adds what the tar files hold; returns a line for each that could not be read, of which the start counts."""
    notes = []
    for path in sorted(folder.glob("cache-*.tar.gz")):
        member = None
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    tar.extract(member, root, filter="data")
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            notes.append(f"{path} is not whole and was read as far as it goes ({error})")
            if member is not None and member.isfile():
                (root / member.name).unlink(missing_ok=True)  # cut off in its middle
    return notes
