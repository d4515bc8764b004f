"""A directory, or tensors in memory -> a model's parameters, each rank its own slices."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...layers.module import Spec, named_specs
from ...parallel import TensorParallel
from ...together import together
from .model import PretrainedModule
from .source import Source

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = tuple(_DTYPE_NAMES.values())  # integers and 8 bits mean a quantized file, whose scales are not read
_Entry = tuple[str, Spec, TensorParallel, Source]


class Tensors:
    """Tensors in memory, by their names in the base model (prefixes and old spellings undone).

    ``caller`` and ``holder`` (what holds them) are the words of an error.
    """

    def __init__(self, caller: str, holder: str, tensors: Mapping[str, Tensor]):
        self.caller, self.holder, self._stored = caller, holder, tensors

    def raw_names(self) -> Iterable[str]:
        """Returns the names as they are stored."""
        return self._stored

    def names(self, base_prefix: str) -> dict[str, str]:
        """Returns name in the base model -> stored name."""
        names: dict[str, str] = {}
        for raw in self.raw_names():
            name = re.sub(r"\.beta$", ".bias", re.sub(r"\.gamma$", ".weight", raw.removeprefix(base_prefix)))
            if name in names:
                raise ValueError(f"{self.caller}: {self.holder} holds {name} twice, as {names[name]} and {raw}")
            names[name] = raw
        return names

    def tensor(self, raw: str) -> Any:
        """Returns a tensor to read lazily: ``[...]`` and slices read, ``get_shape()`` and ``get_dtype()`` do not."""
        return _InMemory(self._stored[raw])


class _InMemory:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return _DTYPE_NAMES.get(self.tensor.dtype, str(self.tensor.dtype))


class Files(Tensors):
    """A directory: its config, and its tensors, read lazily."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.caller, self.holder = "from_pretrained", str(path)
        config = self.path / "config.json"
        if not config.is_file():
            raise ValueError(
                f"from_pretrained: {self.path} has no config.json; it must be a local Hugging Face directory"
            )
        self.config = _json_object(config)
        self._handles = {file: self._open(file) for file in self._weight_files()}
        self._file_of = {name: file for file, handle in self._handles.items() for name in handle.keys()}  # noqa: SIM118

    def _weight_files(self) -> list[str]:
        if (self.path / SINGLE).is_file():
            return [SINGLE]
        if (self.path / INDEX).is_file():
            files = _json_object(self.path / INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise ValueError(
                    f"from_pretrained: {self.path / INDEX} is not a valid index: weight_map must map tensors to files"
                )
            return sorted(set(files.values()))
        raise ValueError(
            f"from_pretrained: {self.path} has neither {SINGLE} nor {INDEX}; tpfuse reads safetensors only"
        )

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.path / file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"from_pretrained: {self.path / file} cannot be read (truncated or missing?): {error}"
            ) from None

    def raw_names(self) -> Iterable[str]:
        return self._file_of

    def tensor(self, raw: str) -> Any:
        return self._handles[self._file_of[raw]].get_slice(raw)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:  # a decoding error is a ValueError
        raise ValueError(f"from_pretrained: {path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"from_pretrained: {path} must hold a JSON object, got {type(value).__name__}")
    return value


def load(model: PretrainedModule, tensors: Tensors, dtype: torch.dtype, device: torch.device | str | None) -> None:
    """Gives a model on the meta device its parameters, after everything has been checked by names and shapes alone."""
    sources = model.sources()
    entries = [(name, spec, tp, sources[name]) for name, spec, tp in named_specs(model)]
    names = together(lambda: _check(model, tensors, entries), model.groups())
    for name, spec, tp, source in entries:
        value = source.read(lambda n: tensors.tensor(names[n]), spec, tp).to(dtype=dtype, device=device, copy=True)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(value.contiguous()))


def _check(model: PretrainedModule, tensors: Tensors, entries: list[_Entry]) -> dict[str, str]:
    """Returns name in the base model -> stored name; ValueError where tensors are missing, extra or mis-shaped."""
    names = tensors.names(model.base_prefix)
    for *_, source in entries:
        if source.also is not None and source.also in names:
            names.setdefault(source.names[0], names[source.also])
    _check_names(model, tensors, names, [n for *_, source in entries for n in source.names])
    for name, spec, _, source in entries:
        for n, shape in zip(source.names, source.shapes(spec.shape), strict=True):
            stored = tensors.tensor(names[n])
            got, expected = tuple(stored.get_shape()), source.their_shape(shape)
            stands = f"{tensors.caller}: {names[n]} in {tensors.holder}"
            if got != expected:
                raise ValueError(f"{stands} must be {expected} for {name} of this config, got {got}")
            if stored.get_dtype() not in DTYPES:
                raise ValueError(f"{stands} must be one of {DTYPES}, got {stored.get_dtype()}")
    return names


def _check_names(model: PretrainedModule, tensors: Tensors, names: dict[str, str], needed: list[str]) -> None:
    missing = [n for n in needed if n not in names]
    if missing:
        raise ValueError(f"{tensors.caller}: {tensors.holder} lacks {_some(missing)}")
    ignorable = model.ignorable()
    extra = [names[n] for n in names if n not in set(needed) and not any(re.fullmatch(p, n) for p in ignorable)]
    if extra:
        raise ValueError(
            f"{tensors.caller}: {tensors.holder} holds {_some(extra)}, which {type(model).__name__} has no place for"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
