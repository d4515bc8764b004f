"""meta.json: everything but the tensors, under a checksum of its own, read with a suspicious eye."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import errors_at
from .shards import DTYPES, FileEntry

VERSION = 2  # of the formats: Philox, parameter layouts, names, files
WITH_GRADIENT = 3  # the same, with a gradient that is not yet applied
WITH_MORE = NEWEST = 4  # the same, with buffers or numbers of Python's, and maybe such a gradient
Meta = dict[str, Any]
Check = Callable[[Any], bool]

_SEAL = re.compile(rb'{"sha256": "([0-9a-f]{64})",\n')
_LARGEST = 1 << 30  # bytes
NATURAL = "an integer from 0 to 2**63 - 1"


def sealed(meta: Meta) -> bytes:
    """Returns the file's bytes: JSON whose first line holds the checksum of all that follows."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in meta.items())
    body = (",\n".join(lines) + "}\n").encode()
    return f'{{"sha256": "{hashlib.sha256(body).hexdigest()}",\n'.encode() + body


def opened(path: Path, raw: bytes) -> Meta:
    """Returns the contents of meta.json.  ValueError if it is damaged, of another version or not what a save writes."""
    try:
        meta = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if not isinstance(meta, dict) or type(meta.get("version")) is not int:
        raise ValueError(f"{path} is damaged: it must be an object with a version")
    if meta["version"] not in (1, VERSION, WITH_GRADIENT, WITH_MORE):
        raise ValueError(f"{path} has format version {meta['version']}, this tpfuse reads {NEWEST}")
    if meta["version"] != 1:
        seal = _SEAL.match(raw)
        if seal is None or seal[1].decode() != hashlib.sha256(raw[seal.end() :]).hexdigest():
            raise ValueError(f"{path} is damaged: its checksum is not that of what was written")
    for key, (is_valid, rule) in (_FIELDS if meta["version"] != 1 else _FIELDS_1).items():
        if key not in (meta | _WITHOUT) or not is_valid((_WITHOUT | meta)[key]):
            raise ValueError(f"{path} is damaged: {key} must be {rule}, got {_short(meta.get(key))}")
    return meta


def files_of(meta: Meta) -> dict[str, FileEntry]:
    """Returns the shards by file name."""
    return {name: FileEntry(*shard) for name, shard in meta["files"].items()}


def read_text(path: Path) -> bytes:
    """Returns the contents of a regular file.  OSError where it is missing or of another kind: a pipe would not end."""
    with errors_at(path):
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
                raise OSError("not a file, or not one that a save wrote")
            return file.read()


def has_contents(path: Path, contents: bytes) -> bool:
    """Returns whether a file is here and has these contents."""
    try:
        return read_text(path) == contents
    except OSError:
        return False


def check_json(name: str, value: Any) -> None:
    """ValueError where a value would not come back from JSON; a tuple comes back as a list."""
    try:
        json.dumps(value)
        wrong = next(map(_short, _foreign(value)), None)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON values: {error}") from None
    if wrong is not None:
        raise ValueError(f"{name} must be JSON values, got the key {wrong}, which is not a string")


def _foreign(value: Any) -> Any:
    """Yields the keys that JSON would turn into strings."""
    if isinstance(value, dict):
        yield from (key for key in value if not isinstance(key, str))
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _foreign(item)


def plain(name: Any) -> bool:
    """Returns whether a string names a file of the same folder and nothing else."""
    return (
        isinstance(name, str) and name not in ("", ".", "..") and name.isprintable() and not re.search(r"[/\\]", name)
    )


def _short(value: Any) -> str:
    return repr(value)[:60]


def is_natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _int64(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(is_valid: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


def _dict_of(is_valid: Check) -> Check:
    return lambda value: _object(value) and all(map(is_valid, value.values()))


def _pair(left: Check, right: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) == 2 and left(value[0]) and right(value[1])


_file = _pair(is_natural, lambda v: _text(v) and re.fullmatch("[0-9a-f]{64}", v) is not None)
_tensor = _pair(lambda v: _text(v) and v in DTYPES, _list_of(is_natural))


def _group(value: Any) -> bool:
    return _object(value) and _list_of(_text)(value.get("params"))


def _hook(value: Any) -> bool:
    return value is None or (
        _object(value)
        and is_natural(value.get("replicas"))
        and is_natural(value.get("step"))
        and _list_of(_list_of(_text))(value.get("units"))
    )


def _pending(value: Any) -> bool:
    loss = value.get("loss") if isinstance(value, dict) else None
    return value is None or type(loss) is float or loss in ("nan", "inf", "-inf")


Rule = tuple[Check, str]
_FIELDS_1: dict[str, Rule] = {
    "step": (is_natural, NATURAL),
    "seed": (_int64, "an integer of 64 bits"),
    "model_step": (_int64, "an integer of 64 bits"),
    "param_groups": (_list_of(_group), "a list of groups with params"),
    "extra": (lambda v: True, "any value"),
}
_WITHOUT: Meta = {"hook": None, "pending": None, "adapters": {}}  # fields that need not be there
_FIELDS: dict[str, Rule] = _FIELDS_1 | {
    "optimizer": (_text, "a string"),
    "config": (lambda v: v is None or _object(v), "an object or null"),
    "adapters": (_dict_of(_object), "objects by layer, or not there"),
    "conditions": (_object, "an object"),
    "tensors": (_dict_of(_tensor), "dtypes and shapes by name"),
    "hook": (_hook, "replicas, a step and units of names, or not there"),
    "pending": (_pending, "a loss, or not there"),
    "files": (lambda v: _dict_of(_file)(v) and all(map(plain, v)), "sizes and checksums by file name"),
}
