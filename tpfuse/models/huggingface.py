"""Hugging Face directories in and out: config.json, safetensors (one file, or shards with an index), tokenizer files.

A file holds full tensors in Hugging Face's layout; a parameter here is a slice of a full tensor in ours.  A :class:`Source` says how
the one becomes the other, as an einops pattern that is read in both directions:

    GPT-2's c_attn.weight [D, 3 D]  "d (t h e) -> h t e d"  our qkv [G, 3, E, D], sharded on dim 0

A rank reads its own slices only: the sharded letter of the pattern says which ranges of the file's tensor those are.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..collectives import all_gather
from ..layers._module import Spec, named_specs
from ..layers.linear import Adaptable
from ..parallel import TensorParallel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 << 30
_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = tuple(_DTYPE_NAMES.values())  # integers and 8 bits mean a quantized file, whose scales are not read
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Source:
    """The tensors a parameter is made of: each is rearranged by ``pattern``, and several are concatenated on our dimension 1.

    ``widths``: how many indices of it each takes (default: one each).
    ``also``: a second name that a single tensor is written under, and is read by where the first is not there.
    """

    names: tuple[str, ...]
    pattern: str
    widths: tuple[int, ...]
    also: str | None

    def __init__(self, names: str | tuple[str, ...], pattern: str, widths: tuple[int, ...] | None = None, also: str | None = None):
        names = (names,) if isinstance(names, str) else names
        values = dict(names=names, pattern=pattern, widths=(1,) * len(names) if widths is None else widths, also=also)
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Our shape of each part, for the parameter's ``shape``."""
        return [shape] if len(self.names) == 1 else [(shape[0], width, *shape[2:]) for width in self.widths]

    @property
    def theirs(self) -> list[list[str]]:
        """The letters of each dimension in the file: "d (t h e)" -> [["d"], ["t", "h", "e"]]"""
        left = self.pattern.split("->")[0]
        return [token.strip("()").split() for token in re.findall(r"\([^)]*\)|\S+", left)]

    def sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The size of each letter for our ``shape``; "1" stands for itself."""
        letters = self.pattern.split("->")[1].split()
        return {letter: n for letter, n in zip(letters, shape, strict=True) if letter != "1"}

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = self.sizes(shape)
        return tuple(_product(sizes[letter] for letter in group) for group in self.theirs)

    def read(self, stored: Callable[[str], Any], spec: Spec, tp: TensorParallel) -> Tensor:
        """This rank's slice in our layout, from lazily read tensors."""
        here = spec.local(tp)
        letter = None if spec.dim is None else self.pattern.split("->")[1].split()[spec.dim]
        parts = []
        for name, shape in zip(self.names, self.shapes(spec.shape), strict=True):
            sizes = self.sizes(shape)
            x = _read_slice(stored(name), self.theirs, sizes, letter, here[spec.dim] if letter else None)
            local = sizes | ({letter: here[spec.dim].stop - here[spec.dim].start} if letter else {})
            parts.append(rearrange(x, self.pattern, **local))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def write(self, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our full tensor -> the file's tensors."""
        left, right = self.pattern.split("->")
        parts = [full] if len(self.names) == 1 else full.split(self.widths, 1)
        for name, part in zip(self.names, parts, strict=True):
            stored = rearrange(part, f"{right} -> {left}", **self.sizes(part.shape)).contiguous()
            yield name, stored
            if self.also is not None:
                yield self.also, stored.clone()


def _product(values) -> int:
    out = 1
    for v in values:
        out *= v
    return out


def _read_slice(stored, theirs: list[list[str]], sizes: dict[str, int], letter: str | None, here: slice | None) -> Tensor:
    """The ranges of a lazily read tensor in which ``letter`` lies in ``here``."""
    if letter is None:
        return stored[...]
    dim = next(i for i, group in enumerate(theirs) if letter in group)
    group = theirs[dim]
    at = group.index(letter)
    outer, inner = _product(sizes[n] for n in group[:at]), _product(sizes[n] for n in group[at + 1 :])
    before = (slice(None),) * dim
    ranges = [
        stored[(*before, slice((i * sizes[letter] + here.start) * inner, (i * sizes[letter] + here.stop) * inner))] for i in range(outer)
    ]
    return ranges[0] if outer == 1 else torch.cat(ranges, dim)


# ---- an error on one rank is an error on every rank, so that none waits for one that has left ----


def raise_together(error: Exception | None, groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Raises ``error`` where there is one; where another rank of the groups has one, the same message."""
    told = None if error is None else (isinstance(error, ValueError), f"{error}")
    for group in groups:
        if group is not None:
            every = [None] * group.size()
            dist.all_gather_object(every, told, group=group)
            told = next((e for e in every if e is not None), None)
    if error is not None:
        raise error
    if told is not None:
        raise (ValueError if told[0] else RuntimeError)(told[1])


def together(action: Callable[[], Any], groups: Iterable[dist.ProcessGroup | None]) -> Any:
    """``action()``, or a ValueError on every rank where it raises one on any."""
    result = error = None
    try:
        result = action()
    except ValueError as e:
        error = e
    raise_together(error, groups)
    return result


# ---- in ----


class Tensors:
    """Tensors by their names in the base model (prefixes and old spellings undone); these are in memory.  ``caller`` and ``where`` (what
    holds them) are an error's words."""

    def __init__(self, caller: str, where: str, tensors: Mapping[str, Tensor]):
        self.caller, self.where, self._stored = caller, where, tensors

    def raw_names(self) -> Iterable[str]:
        return self._stored

    def names(self, base_prefix: str) -> dict[str, str]:
        """name in the base model -> name here"""
        found: dict[str, str] = {}
        for raw in self.raw_names():
            name = re.sub(r"\.beta$", ".bias", re.sub(r"\.gamma$", ".weight", raw.removeprefix(base_prefix)))
            if name in found:
                raise ValueError(f"{self.caller}: {self.where} holds {name} twice, as {found[name]} and {raw}")
            found[name] = raw
        return found

    def tensor(self, raw: str):
        """Something to read lazily: ``[...]`` and slices read, ``get_shape()`` and ``get_dtype()`` do not."""
        return _InMemory(self._stored[raw])


class _InMemory:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()

    def __getitem__(self, index) -> Tensor:
        return self.tensor[index]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return _DTYPE_NAMES.get(self.tensor.dtype, str(self.tensor.dtype))


class Files(Tensors):
    """A directory: its config, and its tensors, read lazily."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.caller, self.where = "from_pretrained", str(path)
        config = self.path / "config.json"
        if not config.is_file():
            raise ValueError(f"from_pretrained: {self.path} has no config.json; it must be a local Hugging Face directory")
        self.config = _json_object(config)
        self._handles = {file: self._open(file) for file in self._weight_files()}
        self._where = {name: file for file, handle in self._handles.items() for name in handle.keys()}  # noqa: SIM118

    def _weight_files(self) -> list[str]:
        if (self.path / SINGLE).is_file():
            return [SINGLE]
        if (self.path / INDEX).is_file():
            where = _json_object(self.path / INDEX).get("weight_map")
            if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
                raise ValueError(f"from_pretrained: {self.path / INDEX} is not a valid index: weight_map must map tensors to files")
            return sorted(set(where.values()))
        raise ValueError(f"from_pretrained: {self.path} has neither {SINGLE} nor {INDEX}; tpfuse reads safetensors only")

    def _open(self, file: str):
        try:
            return safe_open(self.path / file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"from_pretrained: {self.path / file} cannot be read (truncated or missing?): {error}") from None

    def raw_names(self) -> Iterable[str]:
        return self._where

    def tensor(self, raw: str):
        return self._handles[self._where[raw]].get_slice(raw)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:  # a decoding error is a ValueError
        raise ValueError(f"from_pretrained: {path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"from_pretrained: {path} must hold a JSON object, got {type(value).__name__}")
    return value


def load(model: nn.Module, files: Tensors, dtype: torch.dtype, device: torch.device | str | None) -> None:
    """Gives a model on the meta device its parameters, after everything has been checked by names and shapes alone."""
    sources = model.sources()
    specs = [(name, spec, tp, sources[name]) for name, spec, tp in named_specs(model)]
    names = together(lambda: _check(model, files, specs), model.groups())
    for name, spec, tp, source in specs:
        value = source.read(lambda n: files.tensor(names[n]), spec, tp).to(dtype=dtype, device=device, copy=True)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(value.contiguous()))


def _check(model: nn.Module, files: Tensors, specs: list[tuple[str, Spec, TensorParallel, Source]]) -> dict[str, str]:
    """-> name in the base model -> name there, of what is all there and fits"""
    names = files.names(model.base_prefix)
    for *_, source in specs:
        if source.also in names:
            names.setdefault(source.names[0], names[source.also])
    _check_names(model, files, names, [n for *_, source in specs for n in source.names])
    for name, spec, _, source in specs:
        for n, shape in zip(source.names, source.shapes(spec.shape), strict=True):
            stored = files.tensor(names[n])
            got, want = tuple(stored.get_shape()), source.their_shape(shape)
            if got != want:
                raise ValueError(f"{files.caller}: {names[n]} in {files.where} must be {want} for {name} of this config, got {got}")
            if stored.get_dtype() not in DTYPES:
                raise ValueError(f"{files.caller}: {names[n]} in {files.where} must be one of {DTYPES}, got {stored.get_dtype()}")
    return names


def _check_names(model: nn.Module, files: Tensors, names: dict[str, str], wanted: list[str]) -> None:
    missing = [n for n in wanted if n not in names]
    if missing:
        raise ValueError(f"{files.caller}: {files.where} lacks {_some(missing)}")
    extra = [names[n] for n in names if n not in set(wanted) and not any(re.fullmatch(p, n) for p in model.ignorable())]
    if extra:
        raise ValueError(f"{files.caller}: {files.where} holds {_some(extra)}, which {type(model).__name__} has no place for")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# ---- out ----


def full_tensor(p: Tensor, spec: Spec, tp: TensorParallel) -> Tensor:
    """The whole of a parameter, on every rank; a collective where it is sharded."""
    if isinstance(p, DTensor):
        return p.detach().full_tensor()[:: spec.copies]  # copies > 1: a rank's slice is one index of dimension 0
    p = p.detach()
    if spec.dim is None or tp.size == 1:
        return p
    n = spec.shape[spec.dim]
    rows = p.movedim(spec.dim, 0)
    chunk = -(-n // (tp.size // spec.copies))
    padded = torch.cat([rows, rows.new_zeros(chunk - len(rows), *rows.shape[1:])])
    every = all_gather(padded, tp.size, tp.group_name)[:: spec.copies]
    return every.flatten(0, 1)[:n].movedim(0, spec.dim).contiguous()


def save(model: nn.Module, path: Path) -> None:
    """Every rank calls it; one writes.  Files appear whole or not at all, under their final names only when all are written.

    ValueError where adapters are not merged into the weights: they have a format of their own.
    """
    if any(m.lora is not None and not m.lora.merged for m in model.modules() if isinstance(m, Adaptable)):
        raise ValueError("save_pretrained: the model has adapters; use save_adapter for them, or merge_lora to have them in the weights")
    writer = model.tp.rank == 0 and not model.dp_rank
    config = (model.hf_source or {}) | model.config.to_hf() | model.hf_config()
    config |= dict.fromkeys(("dtype", "torch_dtype"), str(next(model.parameters()).dtype).removeprefix("torch."))  # new and old name
    error: Exception | None = None
    written: _Writer | None = None
    if writer:
        try:
            written = _Writer(path, _total_bytes(model))
        except Exception as e:
            error = e
    sources = model.sources()
    for name, p, spec, tp in _base_parameters(model):
        full = full_tensor(p, spec, tp)
        if writer and error is None:
            try:
                for hf_name, tensor in sources[name].write(full):
                    written.add(model.hf_name(hf_name), tensor.cpu())
            except Exception as e:
                error = e
    if writer and error is None:
        try:
            written.finish(config, model.source)
        except Exception as e:
            error = e
    if written is not None:
        written.clean()
    raise_together(error, model.groups())


def _total_bytes(model: nn.Module) -> int:
    return sum(_product(spec.shape) * p.element_size() for _, p, spec, _ in _base_parameters(model))


def _base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Spec, TensorParallel]]:
    """Without those of merged adapters."""
    for (name, spec, tp), p in zip(named_specs(model), model.parameters(), strict=True):
        if ".lora." not in name:
            yield name, p, spec, tp


class _Writer:
    """Collects tensors into shards in a temporary directory beside the target, and moves the files over when all are there."""

    def __init__(self, path: Path, total: int):
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.total = path, total
        self.folder = path / f".saving-{os.getpid()}"
        self.folder.mkdir(exist_ok=True)
        self.pending: dict[str, Tensor] = {}
        self.shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = sum(t.nbytes for t in self.pending.values())
        if self.pending and size + tensor.nbytes > MAX_SHARD_BYTES:
            self._flush()
        self.pending[name] = tensor

    def _flush(self) -> None:
        save_file(self.pending, self.folder / f"shard-{len(self.shards)}", metadata={"format": "pt"})
        self.shards.append(list(self.pending))
        self.pending = {}

    def finish(self, config: dict, source: Path | None) -> None:
        self._flush()
        count = len(self.shards)
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            os.replace(self.folder / f"shard-{i}", self.folder / name)
        if count > 1:
            where = {tensor: name for name, shard in zip(names, self.shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": self.total}, "weight_map": where}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        (self.folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in TOKENIZER_FILES:
            if source is not None and (source / name).is_file():
                shutil.copyfile(source / name, self.folder / name)
        new = _move(self.folder, self.path)
        for old in self.path.glob("model*.safetensors*"):  # shards of an earlier save would be loaded in place of these
            if old.name not in new and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", old.name):
                old.unlink()
        _fsync(self.path)

    def clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def replace_files(path: Path, files: Mapping[str, Callable[[Path], Any]]) -> None:
    """Writes each file by its function, in a directory beside; all are there before the first gets its name."""
    path.mkdir(parents=True, exist_ok=True)
    folder = path / f".saving-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        for name, write in files.items():
            write(folder / name)
        _move(folder, path)
        _fsync(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(folder: Path, path: Path) -> set[str]:
    new = {file.name for file in folder.iterdir()}
    for name in sorted(new):
        _fsync(folder / name)
        os.replace(folder / name, path / name)
    return new


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
