"""Shards: safetensors files, written and summed in one pass.

The format is torch.distributed.checkpoint's own for safetensors (``HuggingFaceStorageReader`` reads it): a tensor is a
part of a whole, whose place is in the file's metadata.  The files are written here because torch's writer holds every
tensor of a rank and the file's bytes in memory at once, knows no checksum, and raises errors that are no Exceptions.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ...models.files.disk import new_file
from .errors import errors_at
from .pieces import Index, Piece

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BUFFER = 1 << 22
_PLACES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch.distributed.checkpoint's keys


class FileEntry(NamedTuple):
    """A file's size in bytes and its checksum, as meta.json has them."""

    size: int
    sha256: str


class TensorEntry(NamedTuple):
    dtype: torch.dtype
    offset: Index
    size: Index


def write_shard(path: Path, pieces: Mapping[str, Piece]) -> FileEntry:
    """Writes a new file, on disk when this returns.  One tensor at a time is brought to the CPU."""
    digest, size = hashlib.sha256(), 0
    with errors_at(path), new_file(path) as file:
        for data in _bytes(pieces):
            file.write(data)
            digest.update(data)
            size += len(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def _bytes(pieces: Mapping[str, Piece]) -> Iterator[Any]:
    """Yields the file's bytes, as buffers."""
    # wide elements first, so that each tensor is aligned
    order = sorted(pieces, key=lambda name: (-pieces[name].local.element_size(), name))
    places = {name: {_OFFSETS: pieces[name].offset} for name in order}
    header: dict[str, Any] = {"__metadata__": {_PLACES: json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}}
    end = 0
    for name in order:
        x = pieces[name].local
        start, end = end, end + x.numel() * x.element_size()
        header[name] = dict(dtype=NAMES[x.dtype], shape=list(x.shape), data_offsets=[start, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        flat = pieces[name].local.to("cpu").contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy()


def check_size(path: Path, shard: FileEntry) -> None:
    """OSError where a file is missing or of another size."""
    with errors_at(path):
        status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path}: not a file")
    if status.st_size != shard.size:
        raise OSError(f"{path}: has {status.st_size} bytes, {shard.size} were written")


def verify(path: Path, shard: FileEntry) -> None:
    """OSError where a file is not what was written, bit for bit."""
    check_size(path, shard)
    with errors_at(path), open(path, "rb") as file:
        checksum = sha256(file)
    if checksum != shard.sha256:
        raise OSError(f"{path}: its checksum is not that of what was written; the file is damaged")


def sha256(file: BinaryIO) -> str:
    """Returns the checksum of what is left of a file."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER))
    while n := file.readinto(buffer):  # type: ignore[attr-defined]  # BinaryIO has no readinto, open's files do
        digest.update(buffer[:n])
    return digest.hexdigest()


def parts(path: Path) -> dict[str, TensorEntry]:
    """Returns what is in a file, by name."""
    with errors_at(path), safe_open(path, framework="pt") as file:
        places = json.loads((file.metadata() or {})[_PLACES])
        entries = {}
        for name in file.keys():
            tensor = file.get_slice(name)
            offset, size = places[name][_OFFSETS], tensor.get_shape()
            if len(offset) != len(size) or any(type(n) is not int or n < 0 for n in offset):
                raise ValueError(f"{name} lies at {offset}")
            entries[name] = TensorEntry(DTYPES[tensor.get_dtype()], tuple(offset), tuple(size))
        return entries


class ShardReader:
    """Reads tensors from the files of a folder, each opened once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._open: dict[str, Any] = {}

    def reader(self, file: str, name: str) -> Callable[[tuple[slice, ...]], Tensor]:
        """Returns a function that reads parts of a tensor."""

        def read(index: tuple[slice, ...]) -> Tensor:
            with errors_at(self._folder / file):
                if file not in self._open:
                    self._open[file] = safe_open(self._folder / file, framework="pt")
                opened = self._open[file]
                return opened.get_slice(name)[index] if index else opened.get_tensor(name)

        return read
