"""A directory, or tensors in memory -> a model's parameters, each rank its own slices."""

import contextlib
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ...kernels.runtime.rules import brief, listed, quoted
from ...layers.module import Spec, initialize, local
from ...layers.shards import named_specs
from ...parallel import TensorParallel
from ...ranks.agreement import any_rank, names
from ...ranks.messages import together
from ..config.model import ModelConfig
from .directory import is_weights_name, open_tensors, read_json, sampled
from .names import ModelFiles, tied_names
from .source import Source

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = tuple(_DTYPE_NAMES.values())  # integers and 8 bits mean a quantized file, whose scales are not read
_TENSORS_PER_LAYER = 6  # at least: q, k and v, the output, the MLP's two, two norms
_ROWS = 4096  # of two tables that are compared, at a time
_Entry = tuple[str, Spec, TensorParallel, Source]
T = TypeVar("T")


class NamedTensors:
    """Tensors in memory, by their names in the base model (prefixes and old spellings undone).

    ``caller`` and ``holder`` (what holds them) are the words of an error.  ``others``: whether tensors that belong to
    no module of a model may be among them.
    """

    others = False

    def __init__(self, caller: str, holder: str, tensors: Mapping[str, Tensor]):
        self.caller, self.holder, self._stored = caller, holder, tensors

    def raw_names(self) -> Iterable[str]:
        return self._stored

    def names(self, base_prefix: str) -> dict[str, str]:
        """Returns name in the base model -> stored name."""
        names: dict[str, str] = {}
        for raw in self.raw_names():
            name = re.sub(r"\.beta$", ".bias", re.sub(r"\.gamma$", ".weight", raw.removeprefix(base_prefix)))
            if name in names:
                raise ValueError(
                    f"{self.caller}: {self.holder} holds {brief(name)} twice, as {brief(names[name])} and {brief(raw)}"
                )
            names[name] = raw
        return names

    def check_layers(self, layers: int) -> None:
        """Raises ValueError where the tensors are too few for so many layers, before a module is made for each."""
        count = sum(1 for _ in self.raw_names())
        if _TENSORS_PER_LAYER * layers > count:
            raise ValueError(
                f"{self.caller}: {self.holder} holds {count} tensors, which are too few for num_layers={layers}"
            )

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


class ModelDirectory(NamedTensors):
    """A directory: its config, and its tensors, read lazily.

    ValueError or OSError for a directory that is not as it should be, whatever it holds (see directory.py).
    """

    others = True

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.caller, self.holder = "from_pretrained", str(path)
        if not (self.path / CONFIG).is_file():
            aside = next((file.parent for file in self.path.glob(f".saving-*/old/{CONFIG}")), None)
            cure = "it must be a local Hugging Face directory"
            if aside is not None:
                cure = f"a save ended while it moved files; earlier ones are in {aside}: save again or put them back"
            raise ValueError(f"from_pretrained: {self.path} has no config.json; {cure}")
        self.config = self._named(lambda: read_json(self.path, CONFIG))
        self._handles = {file: self._open(file) for file in self._weight_files()}
        self._file_of: dict[str, str] = {}
        for file, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118
                if (twin := self._file_of.setdefault(name, file)) != file:
                    raise ValueError(f"from_pretrained: {self.path} holds {brief(name)} twice, in {twin} and {file}")

    def read_config(self, make: Callable[[dict[str, Any]], T]) -> T:
        """Returns ``make(config)``; an error names the file, and that it has more layers than the tensors is one."""
        try:
            config = make(self.config)
        except ValueError as error:
            raise ValueError(f"from_pretrained: {self.path / CONFIG}: {error}") from None
        self.check_layers(config.num_layers)  # type: ignore[attr-defined]
        return config

    def _weight_files(self) -> list[str]:
        if (self.path / SINGLE).is_file():
            return [SINGLE]
        if (self.path / INDEX).is_file():
            files = self._named(lambda: read_json(self.path, INDEX)).get("weight_map")
            error = f"from_pretrained: {self.path / INDEX} is not a valid index: weight_map must map tensors to"
            if not isinstance(files, dict):
                raise ValueError(f"{error} files, got {quoted(files)}")
            for name, file in files.items():
                if not is_weights_name(file):
                    raise ValueError(
                        f"{error} plain names of .safetensors files beside it, got {quoted(file)} for {quoted(name)}"
                    )
            return sorted(set(files.values()))
        raise ValueError(
            f"from_pretrained: {self.path} has neither {SINGLE} nor {INDEX}; tpfuse reads safetensors only"
        )

    def _open(self, file: str) -> Any:
        try:
            return open_tensors(self.path, file)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"from_pretrained: {self.path / file} cannot be read (truncated or missing?): {error}"
            ) from None

    def _named(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except ValueError as error:
            raise ValueError(f"from_pretrained: {error}") from None

    def summary(self) -> str:
        """Returns what ranks compare of the files, which each may read from a disk of its own: their names, sizes and
        headers, and samples of what is in them."""
        sizes, checksums = zip(*(sampled(self.path, file) for file in self._handles), strict=True)
        files = names([*self._handles])
        return f"{files}, {sum(sizes)} bytes #{zlib.crc32(repr((sizes, checksums)).encode()):08x}"

    def dtype(self, wanted: torch.dtype | str | None) -> torch.dtype:
        """Returns the dtype for the parameters: ``wanted``, or its name; None: torch's default; "auto": the files' own.

        The files' own is what config.json says, else the first tensor's.
        """
        dtype: Any = wanted
        if wanted == "auto":
            dtype = self.config.get("dtype") or self.config.get("torch_dtype")
            if dtype is None and self._file_of:
                stored = self.tensor(next(iter(self._file_of))).get_dtype()
                dtype = next((d for d, name in _DTYPE_NAMES.items() if name == stored), None)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype) if isinstance(dtype, str) else dtype
        if not isinstance(dtype, torch.dtype) or dtype not in _DTYPE_NAMES:
            names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPE_NAMES)
            raise ValueError(f"from_pretrained: dtype must be 'auto' or one of {names}, got {quoted(dtype)}")
        return dtype

    def raw_names(self) -> Iterable[str]:
        return self._file_of

    def tensor(self, raw: str) -> Any:
        return self._handles[self._file_of[raw]].get_slice(raw)


def as_stored(files: ModelDirectory, config: ModelConfig, dtype: torch.dtype, tp: TensorParallel) -> ModelConfig:
    """Returns the config of the tensors in a directory: untied, with a warning, where they are a head and an embedding
    that differ in ``dtype``.  A collective; each rank compares its share of the rows."""
    apart = config.tie_embeddings and together(lambda: _apart(files, config, dtype, tp), (tp.call_group,))
    if not any_rank(tp.call_group, apart):
        return config
    warnings.warn(
        f"{files.caller}: {files.path / CONFIG} says that head and embedding are one tensor, and"
        f" {' and '.join(tied_names(config))} differ: they are not tied; tie_word_embeddings=false says the same",
        stacklevel=3,
    )
    return replace(config, tie_embeddings=False)


def _apart(files: ModelDirectory, config: ModelConfig, dtype: torch.dtype, tp: TensorParallel) -> bool:
    names = _names(files, config)
    stored = [files.tensor(names[name]) for name in tied_names(config) if name in names]
    if len(stored) < 2:
        return False
    one, other = stored
    rows, *columns = one.get_shape()
    if [rows, *columns] != list(other.get_shape()):
        return True
    share = -(-rows // tp.size)
    for start in range(tp.rank * share, min((tp.rank + 1) * share, rows), _ROWS):
        piece = slice(start, min(start + _ROWS, (tp.rank + 1) * share, rows))
        with reading(f"{files.caller}: {', '.join(tied_names(config))} in {files.holder}"):
            if not torch.equal(one[piece].to(dtype), other[piece].to(dtype)):
                return True
    return False


def load(
    model: ModelFiles,
    tensors: NamedTensors,
    dtype: torch.dtype,
    device: torch.device | str | None,
    *,
    seed: int = 0,
    fresh: tuple[str, ...] = (),
) -> None:
    """Gives a model on the meta device its parameters, after everything has been checked by names and shapes alone.

    ``fresh``: modules whose weights are drawn by ``seed`` where the tensors have none of theirs.
    """

    def put(name: str, value: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        value = value.to(dtype=dtype, device=device, copy=True)
        setattr(model.module.get_submodule(path), leaf, nn.Parameter(value.contiguous()))

    fresh = together(lambda: _lacking(model, tensors, fresh), model.groups.all()) if fresh else ()
    _read(model, tensors, put, fresh)
    for path in fresh:
        module = model.module.get_submodule(path).to(dtype)
        module.to_empty(device=torch.get_default_device() if device is None else device)
        initialize(module, seed, prefix=f"{path}.")


def _lacking(model: ModelFiles, tensors: NamedTensors, fresh: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the modules, of those that need not be there, of which a file has no tensor."""
    names, sources = tensors.names(model.base_prefix), model.sources()
    needed = [(name.rpartition(".")[0], sources[name].names) for name, *_ in named_specs(model.module)]
    present = {path for path, stored in needed if any(name in names for name in stored)}
    return tuple(dict.fromkeys(path for path, _ in needed if path in fresh and path not in present))


def restore(model: ModelFiles, tensors: NamedTensors) -> None:
    """Gives the parameters of a model new values in place, so that what holds them (an optimizer, DDP) holds them on.

    Each rank reads its own slices only, after everything has been checked by names and shapes alone.
    """
    parameters = dict(model.module.named_parameters())
    with torch.no_grad():
        _read(model, tensors, lambda name, value: local(parameters[name]).copy_(value))


def _read(
    model: ModelFiles, tensors: NamedTensors, put: Callable[[str, Tensor], Any], fresh: tuple[str, ...] = ()
) -> None:
    sources, groups = model.sources(), model.groups.all()
    read_here = lambda name: ".lora." not in name and name.rpartition(".")[0] not in fresh
    entries = [(name, spec, tp, sources[name]) for name, _, spec, tp in named_specs(model.module) if read_here(name)]
    names, entries = together(lambda: _check(model, tensors, entries), groups)

    def read() -> None:
        for name, spec, tp, source in entries:
            with reading(f"{tensors.caller}: {name} in {tensors.holder}"):
                value = source.read(lambda n: tensors.tensor(names[n]), spec, tp)
            put(name, value)

    together(read, groups)


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """Raises OSError where the bytes of a file cannot be had, which are read only now.

    A file's size is a claim too: a sparse one holds more zeros than there is memory for.
    """
    try:
        yield
    except (SafetensorError, RuntimeError, MemoryError) as error:
        raise OSError(f"{place} cannot be read: {brief(error)}") from error


def _names(tensors: NamedTensors, config: ModelConfig) -> dict[str, str]:
    """Returns name in the class -> stored name."""
    names = tensors.names(config.hf.base_prefix)
    for name, filed in config.hf.filed.items():
        if filed in names and name not in names:
            names[name] = names.pop(filed)
    return names


def _check(model: ModelFiles, tensors: NamedTensors, wanted: list[_Entry]) -> tuple[dict[str, str], list[_Entry]]:
    """Returns name in the base model -> stored name, and the entries by the sources that are there; ValueError where
    tensors are missing, extra or mis-shaped."""
    names = _names(tensors, model.config)
    entries = [(name, spec, tp, source.found_by(names)) for name, spec, tp, source in wanted]
    for *_, source in entries:
        if source.also is not None and source.also in names:
            names.setdefault(source.names[0], names[source.also])
    if model.config.tie_embeddings and (twins := tied_names(model.config))[1] in names:
        names.setdefault(twins[0], names[twins[1]])  # some files hold the one tensor by the head's name alone
    _check_names(model, tensors, names, [n for *_, source in entries for n in source.names])
    for name, spec, _, source in entries:
        for n, expected in zip(source.names, source.file_shapes(spec.shape), strict=True):
            stored = tensors.tensor(names[n])
            got = tuple(stored.get_shape())
            place = f"{tensors.caller}: {brief(names[n])} in {tensors.holder}"
            if got != expected:
                raise ValueError(f"{place} must be {expected} for {name} of this config, got {quoted(got)}")
            if stored.get_dtype() not in DTYPES:
                raise ValueError(f"{place} must be one of {DTYPES}, got {stored.get_dtype()}")
    return names, entries


def _check_names(model: ModelFiles, tensors: NamedTensors, names: dict[str, str], needed: list[str]) -> None:
    missing = [n for n in needed if n not in names]
    if missing:
        raise ValueError(f"{tensors.caller}: {tensors.holder} lacks {listed(missing)}")
    expected, name = model.ignorable(names).union(needed), type(model.module).__name__
    extra = [n for n in names if n not in expected]
    ours = {place for name in needed for place in _places(name)}
    wrong = [names[n] for n in extra if not tensors.others or _places(n) & ours]
    if wrong:
        raise ValueError(f"{tensors.caller}: {tensors.holder} holds {listed(wrong)}, which {name} has no place for")
    if extra:
        warnings.warn(
            f"{tensors.caller}: {tensors.holder} holds {listed([names[n] for n in extra])}, of no module of {name}:"
            " not read",
            stacklevel=2,
        )


def _places(name: str) -> set[str]:
    """Returns the module that a tensor belongs to by its name, and the layer, where it has a number."""
    return {place[0] for place in (re.match(r".*\.", name), re.match(r".*?\.\d+\.", name)) if place is not None}
