"""Opens files of a directory that anybody may have made, within limits.

Files are opened by plain names, and are regular files of that directory: a pipe or a device could wait forever or have
effects.  A link is followed where it ends in the directory itself, or in the hub's cache, whose
``snapshots/<revision>/`` holds links into the ``blobs/`` beside ``snapshots``.
"""

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import brief, quoted

MAX_JSON_BYTES = 8 << 20
MAX_JSON_DEPTH = 64
MAX_JSON_LISTS = 100_000  # and objects: two million empty ones take seconds to parse
MAX_HEADER_BYTES = 16 << 20  # of a safetensors file
MAX_DIGITS = 100
SAMPLES, BLOCK = 64, 4096  # blocks of a file's body that ranks compare, and their bytes
_WEIGHTS = re.compile(r"\w[\w.+=@ -]{0,200}\.safetensors", re.ASCII)


def is_weights_name(name: Any) -> bool:
    """Returns whether this is the plain name of a safetensors file: no part of a path, not hidden."""
    return isinstance(name, str) and _WEIGHTS.fullmatch(name) is not None


def own_file(folder: Path, name: str) -> Path:
    """Returns the path of a regular file of ``folder``.

    OSError where there is none; ValueError for what is no regular file, or a link that leaves the directory.
    """
    path = folder / name
    check(stat.S_ISREG(os.stat(path).st_mode), f"{path} must be a regular file")
    home, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    if home not in real.parents and real.parent not in blobs:
        raise ValueError(f"{path} is a link to {brief(real)}, outside its directory, which is not followed")
    return path


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object that a file of ``folder`` holds.

    OSError where it cannot be read; ValueError for any other contents, or more than the limits of this file.
    """
    path = own_file(folder, name)
    data = read_limited(path, MAX_JSON_BYTES, "JSON")
    lists = data.count(b"[") + data.count(b"{")
    check(lists <= MAX_JSON_LISTS, f"{path} must hold at most {MAX_JSON_LISTS} lists and objects, got {lists}")
    try:
        value = json.loads(data.decode("utf-8"), parse_int=_integer)
    except (ValueError, RecursionError) as error:  # a decoding error is a ValueError
        raise ValueError(f"{path} is not valid JSON: {brief(error)}") from None
    check(isinstance(value, dict), f"{path} must hold a JSON object, got {type(value).__name__}")
    check(_depth(value) <= MAX_JSON_DEPTH, f"{path} must be nested at most {MAX_JSON_DEPTH} deep")
    return value


def read_limited(path: Path, most: int, kind: str) -> bytes:
    """Returns the contents of a regular file of at most so many bytes; OSError where it cannot be read, ValueError for
    any other: a pipe may wait forever, and a device never end."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        check(stat.S_ISREG(os.fstat(file.fileno()).st_mode), f"{path} must be a regular file")
        data = file.read(most + 1)
    check(len(data) <= most, f"{path} must be at most {most} bytes of {kind}")
    return data


def _integer(digits: str) -> int:
    check(len(digits) <= MAX_DIGITS, f"integers must have at most {MAX_DIGITS} digits, got {quoted(digits)}")
    return int(digits)


def _depth(value: Any) -> int:
    """Returns how deep lists and objects are nested, without recursion; no more than one past the limit."""
    depth, level = 0, [value]
    while level and depth <= MAX_JSON_DEPTH:
        children = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [child for group in children for child in group]
        depth += bool(level)
    return depth


def sampled(folder: Path, name: str) -> tuple[int, str]:
    """Returns the size of a safetensors file, and a checksum of its header and of blocks spread over its body."""
    with open(own_file(folder, name), "rb") as file:
        size, digest = os.fstat(file.fileno()).st_size, hashlib.blake2b(digest_size=8)
        length = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(length, MAX_HEADER_BYTES)))
        start = file.tell()
        for place in sorted({start + i * max(0, size - start - BLOCK) // (SAMPLES - 1) for i in range(SAMPLES)}):
            file.seek(place)
            digest.update(file.read(BLOCK))
    return size, digest.hexdigest()


def open_tensors(folder: Path, name: str) -> Any:
    """Opens a safetensors file of ``folder``, of which the header alone is read.

    OSError where it cannot be read; ValueError for any other contents.
    """
    path = own_file(folder, name)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    check(length <= MAX_HEADER_BYTES, f"{path} must have at most {MAX_HEADER_BYTES} bytes of header, got {length}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(brief(error)) from None
    except MemoryError as error:  # it is mapped as a whole
        raise OSError(f"{path}: {brief(error)}") from None
