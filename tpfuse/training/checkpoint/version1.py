"""Checkpoints of version 1: torch.distributed.checkpoint's own files, whose index is a pickle."""

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import errors_at
from .meta import plain, read_text
from .pieces import Index, Stored

_INDEX = ".metadata"


def warn(path: Path) -> None:
    warnings.warn(
        f"load_checkpoint: {path} is of version 1, whose index is a pickle, which can run any code: load it only if"
        " you trust who wrote it; the next save writes version 2, which holds none",
        stacklevel=3,
    )


def read_index(path: Path) -> tuple[dict[str, tuple[torch.dtype, Index]], dict[str, list[Stored]]]:
    """Returns dtype and shape of every tensor, and where its pieces are."""
    raw = read_text(path / _INDEX)
    with errors_at(path / _INDEX):
        metadata: Any = pickle.loads(raw)
        stock, pieces = {}, {}
        for name, tensor in metadata.state_dict_metadata.items():
            if hasattr(tensor, "size"):
                stock[name] = tensor.properties.dtype, tuple(tensor.size)
                pieces[name] = [_stored(path, metadata.storage_data, name, chunk) for chunk in tensor.chunks]
        return stock, pieces


def _stored(path: Path, places: Mapping[Any, Any], name: str, chunk: Any) -> Stored:
    offset, size = tuple(chunk.offsets), tuple(chunk.sizes)
    place = next(p for index, p in places.items() if index.fqn == name and tuple(index.offset or ()) == offset)
    if not plain(place.relative_path):
        raise ValueError(f"{name} lies in {place.relative_path!r}")

    def read(index: tuple[slice, ...]) -> Tensor:
        with errors_at(path / place.relative_path), open(path / place.relative_path, "rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
            x: Tensor = torch.load(data, map_location="cpu", weights_only=True)
            if tuple(x.shape) != size:
                raise ValueError(f"{name} is of shape {tuple(x.shape)} and should be {size}")
            return x[index]

    return Stored(offset, size, read)
