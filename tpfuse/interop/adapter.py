"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Full tensors stand under Hugging Face's module names:

base_model.model.{module}.lora_A.weight  [r, K]        base_model.model.{module}.lora_B.weight  [N, r]
base_model.model.{head}.weight           [L, D]        of a classification head, which is trained beside them

Those of experts: expert_adapter.py.
"""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import Rule, boolean, brief, check_rules, integer, number, optional, quoted
from ..layers.expert_lora import ExpertLoRA
from ..layers.lora import ColumnLoRA, adapted_layers, add_lora, trained_modules
from ..layers.lora_targets import base_of
from ..layers.module import Spec, local
from ..layers.projections import ProjectionNames
from ..layers.shards import named_specs
from ..models.files.directory import open_tensors, read_json
from ..models.files.disk import NewFiles, save_file, write_json
from ..models.files.read import DTYPES, reading
from ..models.files.source import Source, written
from ..models.files.write import full_tensor
from ..models.model import Model
from ..parallel import TensorParallel
from ..ranks.messages import gather, together
from . import expert_adapter
from .adaptable import Adaptables, ExpertParameter
from .lora_options import check_options
from .peft_targets import named_modules

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_[AB]\.weight")
_RULES: dict[str, Rule] = dict(
    r=integer(), lora_alpha=number(0, 1e9), lora_dropout=optional(number(0, 1, "[)")), use_rslora=optional(boolean)
)


_HEADS = {"classifier", "score"}  # what PEFT's classes for sequences and tokens call one
_TASKS = {"sequence": "SEQ_CLS", "token": "TOKEN_CLS"}


class _Entry(NamedTuple):
    """A parameter of an adapter, and the tensors of the file that it is made of."""

    p: nn.Parameter
    spec: Spec
    tp: TensorParallel
    source: Source


def save_adapter(model: nn.Module, path: str | Path) -> None:
    """Writes the adapters of ``model`` as a directory that PEFT loads, whole or not at all.

    Every rank calls it; one writes, and gets the adapters of other pipeline stages.  OSError, on every rank and before
    any tensor is gathered, if ``path`` cannot be written.
    """
    base, caller = _base(model, "save_adapter"), "save_adapter"
    adapted = _adapted(base, caller)
    stages = base.groups.pp(caller)
    leads = base.groups.writes and (stages is None or stages.rank() == 0)
    new = together(lambda: NewFiles(Path(path), caller) if leads else None, base.groups.all())
    tensors: dict[str, Tensor] = {}
    with nullcontext() if new is None else new:
        entries = *_entries(base), *_head_entries(base).values()
        for name, tensor in written((e.source, full_tensor(e.p, e.spec, e.tp)) for e in entries):
            if base.groups.writes:
                tensors[name] = tensor.cpu()
        for tensors_of_stage in gather(tensors, stages, to_first=True):
            tensors = tensors_of_stage | tensors

        def write() -> None:
            if new is not None:
                write_json(_config(base, adapted), new.folder / CONFIG)
                save_file(tensors, new.folder / WEIGHTS)
                new.publish()

        together(write, base.groups.all())


def load_adapter(model: nn.Module, path: str | Path, *, trainable: bool = False) -> nn.Module:
    """Adds the adapters of a directory that PEFT or :func:`save_adapter` wrote to ``model``, and freezes the rest.

    Returns the model.  Each rank reads its own slices only.  Adapters, and a classification head in the directory, are
    frozen too unless ``trainable``.  ValueError, on every rank and before anything changes, for an option that is not
    built, a value out of its range, a module that the model does not have, or a tensor that is missing or has another
    shape; OSError if the tensors cannot be read.
    """
    base, path = _base(model, "load_adapter"), Path(path)
    head, here = _head_entries(base), Adaptables.of(base)
    everywhere = here.over_stages(base, "load_adapter")

    def examine() -> tuple[Any, Any, list[str], dict[str, _Entry]]:
        config, handle, apart = read_adapter(path, trainable=trainable, experts=base.config.hf.has_experts)
        check_saved(f"load_adapter: {path / CONFIG}", config.get("modules_to_save"), base)
        saved = set(config.get("modules_to_save") or ()) & set(_saved(base))
        heads = {} if not saved and head.keys().isdisjoint(handle.keys()) else head
        for name, entry in heads.items():
            _check_tensor(path / WEIGHTS, handle, name, entry.spec.shape)
        names = set(handle.keys()) - heads.keys()
        parameters = expert_adapter.expert_targets(f"load_adapter: {path / CONFIG}", config, everywhere.experts)
        of_experts = {
            expert_adapter.stored_module(name, parameters): expert_adapter.stored_shapes(
                name, everywhere.experts[name], config["r"], apart
            )
            for name in parameters
        }
        required = of_experts.keys() | _named_layers(f"load_adapter: {path / CONFIG}", config, everywhere)
        _check(path / WEIGHTS, handle, names, _shapes(everywhere, config["r"]) | of_experts, required=required)
        modules = [m for m in here.layers if f"{_PREFIX}{m}.lora_A.weight" in names]
        for name in sorted(parameters & here.experts.keys()):
            modules += expert_adapter.expert_modules(name, here.experts[name], apart)
        return config, handle, modules, heads

    config, handle, modules, heads = together(examine, base.groups.all())
    rank = config["r"]
    alpha = config["lora_alpha"] * (rank**0.5 if config.get("use_rslora") else 1)
    flags = [p.requires_grad for p in model.parameters()]
    if modules:
        add_lora(model, rank=rank, alpha=alpha, targets=modules)
    else:  # other stages have them
        model.requires_grad_(False)

    def read() -> list[tuple[nn.Parameter, Tensor]]:
        values = []
        for p, spec, tp, source in (*_entries(base), *heads.values()):
            with reading(f"load_adapter: {', '.join(source.names)} in {path / WEIGHTS}"):
                values.append((p, source.read(handle.get_slice, spec, tp)))
        return values

    try:
        values = together(read, base.groups.all())
    except Exception:
        for _, layer, _ in adapted_layers(base):
            layer.lora = None
        for p, flag in zip(model.parameters(), flags, strict=True):
            p.requires_grad_(flag)
        raise
    with torch.no_grad():
        for p, value in values:
            local(p).copy_(value)
    for p in (*(entry.p for entry in _entries(base)), *(entry.p for entry in head.values())):
        p.requires_grad_(trainable)
    return model


def _base(model: nn.Module, caller: str) -> Model:
    base = base_of(model)
    if not isinstance(base, Model):
        raise ValueError(f"{caller}: {type(base).__name__} has no names of Hugging Face; a model of tpfuse.models does")
    return base


class _Adapted(NamedTuple):
    """What all stages of a model have, by Hugging Face's names: adapted modules, parameters of experts among them;
    those that are not; all parameters of ``experts``, and whether their gate and up are ``apart``."""

    modules: set[str]
    unadapted: set[str]
    rank: int
    alpha: float
    experts: dict[str, ExpertParameter]
    apart: bool


def _adapted(base: Model, caller: str) -> _Adapted:
    """Returns the adapted modules; ValueError if there are none, or stages have adapters of other ranks or scales."""
    loras = [lora for *_, lora in adapted_layers(base)]
    experts = Adaptables.of(base).over_stages(base, caller).experts
    names = (base.files.hf_name(name) for source in base.files.sources().values() for name in source.names)
    mine = {module for lora in loras for module in lora.adapted}, {name.rpartition(".")[0] for name in names}
    sizes = {(lora.rank, lora.scale * lora.rank) for lora in loras}
    apart = {lora.apart for lora in loras if isinstance(lora, ExpertLoRA) and "fc1" in lora.leaves}
    stages = base.groups.over_stages(caller, (*mine, sizes, apart))
    modules, holders, sizes, apart = (set().union(*column) for column in zip(*stages, strict=True))
    check(bool(modules), f"{caller}: the model has no adapters")
    check(len(sizes) == 1, f"{caller}: adapters must be of one rank and alpha, got {quoted(sorted(sizes))}")
    check(len(apart) < 2, f"{caller}: gate and up of experts must be adapted together in all layers, or apart in all")
    taken = {name.rpartition(".")[2] for parameter in experts.values() for name in parameter.projections}
    lost = sorted(name for name in modules - experts.keys() if name.rpartition(".")[2] in taken)
    check(
        not lost,
        f"{caller}: adapters of {', '.join(lost)} have no form in PEFT, which takes such names in a model with experts"
        " for the experts'",
    )
    ((rank, alpha),), unadapted = sizes, (holders | experts.keys()) - modules
    return _Adapted(modules, unadapted, rank, alpha, experts=experts, apart=True in apart)


def _entries(base: Model) -> list[_Entry]:
    """Returns every adapter's parameters."""
    specs = {name: (p, spec, tp) for name, p, spec, tp in named_specs(base)}
    named = lambda letter, modules: tuple(f"{_PREFIX}{m}.lora_{letter}.weight" for m in modules)
    names, entries = ProjectionNames.of(base), []
    for path, _, lora in adapted_layers(base):
        if isinstance(lora, ExpertLoRA):
            of_experts = expert_adapter.expert_sources(names, path, lora, _PREFIX).items()
            entries += [_Entry(*specs[f"{path}.lora.{leaf}"], source) for leaf, source in of_experts]
            continue
        pattern = "r d -> r 1 d" if isinstance(lora, ColumnLoRA) else "r d -> r d"
        entries.append(_Entry(*specs[f"{path}.lora.A"], Source.several(named("A", lora.adapted), pattern)))
        for leaf, parts in lora.parts.items():
            weight = names.sources[f"{path}.{leaf}"]
            adapted = [
                (n, m, place) for (n, m), (_, place) in zip(parts, weight.parts, strict=True) if m in lora.adapted
            ]
            if adapted:
                widths, modules, places = zip(*adapted, strict=True)
                name = "B" if leaf == "weight" else f"B_{leaf}"
                source = Source.several(named("B", modules), _pattern(weight), widths).within(*places)
                entries.append(_Entry(*specs[f"{path}.lora.{name}"], source))
    return entries


def _head_entries(base: Model) -> dict[str, _Entry]:
    """Returns the parameters of a classification head, by their names in a file."""
    sources, entries = base.files.sources(), {}
    for name, p, spec, tp in base.files.stored_parameters():
        source = sources.get(name)  # None: the family's files have no such parameter
        if source is not None and source.names[0].rpartition(".")[0] in trained_modules(base):
            full = _PREFIX + base.files.hf_name(source.names[0])
            entries[full] = _Entry(p, spec, tp, Source.one(full, source.pattern))
    return entries


def _pattern(source: Source) -> str:
    """Returns the pattern of B, from its weight's: "d (t h e) -> h t e d" -> "(t h e) r -> h t e r"."""
    *ours, width = source.letters
    groups = [f"({' '.join(group)})" for group in source.file_letters if group != [width]]
    return f"{' '.join(groups)} r -> {' '.join(ours)} r"


# ---- the config ----


def _config(base: Model, adapted: _Adapted) -> dict[str, Any]:
    alpha = int(adapted.alpha) if adapted.alpha == int(adapted.alpha) else adapted.alpha
    of_experts = expert_adapter.patterns(adapted.rank, alpha) if adapted.apart else {}
    return of_experts | dict(
        peft_type="LORA",
        bias="none",
        r=adapted.rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=_targets(adapted.modules - adapted.experts.keys(), adapted.unadapted),
        target_parameters=_targets(adapted.modules & adapted.experts.keys(), adapted.unadapted) or None,
        fan_in_fan_out=base.config.hf.transposed,
        init_lora_weights=True,
        inference_mode=True,
        modules_to_save=_saved(base) or None,
        task_type=_task(base),
        base_model_name_or_path=None if base.origin is None or base.origin.path is None else str(base.origin.path),
    )


def _task(base: Any) -> str | None:
    head: Any = next(iter(trained_modules(base).values()), None)
    if head is not None:
        return _TASKS[head.classifier.per]
    return "CAUSAL_LM" if hasattr(base, "generate") and base.stages.head else None


def check_saved(place: str, names: Any, base: Model) -> None:
    """Raises ValueError for a modules_to_save of PEFT that names more than a classification head the model has."""
    heads = _HEADS | set(_saved(base)) if trained_modules(base) else set()
    if names and not (isinstance(names, list | tuple | set) and all(isinstance(n, str) and n in heads for n in names)):
        raise ValueError(f"{place}: modules_to_save={quoted(names)} is not built")


def _saved(base: Model) -> list[str]:
    """Returns the modules_to_save of PEFT; for a head of several layers the module that holds them."""
    return list(dict.fromkeys(name.partition(".")[0] for name in trained_modules(base)))


def _targets(adapted: set[str], unadapted: set[str]) -> list[str]:
    """Returns the shortest endings that name what is adapted and no others."""
    targets = set()
    for module in adapted:
        parts = module.split(".")
        endings = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        alone = lambda end: not any(f".{name}".endswith(f".{end}") for name in unadapted)
        targets.add(next(filter(alone, endings)))
    return sorted(targets)


class StoredAdapter(NamedTuple):
    """The config and the open tensors of a directory, and whether gate and up of experts are adapted ``apart``."""

    config: Any
    tensors: Any
    apart: bool


def read_adapter(path: Path, *, trainable: bool, experts: bool = True) -> StoredAdapter:
    """Opens a directory; ValueError for an option that is not built.  ``experts``: whether the model may have some."""
    try:
        config, handle = read_json(path, CONFIG), open_tensors(path, WEIGHTS)
    except (ValueError, OSError) as error:
        raise ValueError(f"load_adapter: {path} must hold {CONFIG} and {WEIGHTS}: {error}") from None
    place = f"load_adapter: {path / CONFIG}"
    apart = experts and expert_adapter.take_patterns(config)
    check_options(place, config, stored=True)
    for key in ("r", "lora_alpha"):
        if key not in config:
            raise ValueError(f"{place} has no {key}")
    check_rules(place, config, _RULES)
    if trainable and config.get("lora_dropout"):
        raise ValueError(
            f"load_adapter: lora_dropout={config['lora_dropout']} in {path / CONFIG} is not built, to train with"
        )
    return StoredAdapter(config, handle, apart)


def _shapes(adaptables: Adaptables, rank: int) -> dict[str, dict[str, tuple[int, int]]]:
    return {name: {"A": (rank, inputs), "B": (outputs, rank)} for name, (outputs, inputs) in adaptables.layers.items()}


def _named_layers(place: str, config: Mapping[str, Any], adaptables: Adaptables) -> set[str]:
    # PEFT takes an ending that names a projection of experts for theirs alone
    of_experts = {name.rpartition(".")[2] for p in adaptables.experts.values() for name in p.projections}
    return named_modules(place, config, adaptables.layers, of_experts)


def _check(
    file: Path, handle: Any, stored: set[str], shapes: dict[str, dict[str, tuple[int, int]]], *, required: set[str]
) -> None:
    """Raises ValueError if the tensors ``stored`` are not the adapters, of these ``shapes``, of some modules and of all
    that are ``required``."""
    matches = {name: _TENSOR.fullmatch(name) for name in stored}
    for name in sorted(name for name, match in matches.items() if match is None):
        raise ValueError(f"load_adapter: {file} holds {brief(name)}, which is not an adapter of a linear layer")
    modules = {match[1] for match in matches.values() if match is not None}
    check(bool(modules), f"load_adapter: {file} holds no adapter")
    for module in sorted(modules | required):
        if module not in shapes:
            raise ValueError(f"load_adapter: {file} adapts {brief(module)}, and no layer is called {brief(module)}")
        for letter, expected in shapes[module].items():
            _check_tensor(file, handle, f"{_PREFIX}{module}.lora_{letter}.weight", expected)


def _check_tensor(file: Path, handle: Any, name: str, expected: tuple[int, ...]) -> None:
    tensor = handle.get_slice(name) if name in handle.keys() else None  # noqa: SIM118
    got = None if tensor is None else tuple(tensor.get_shape())
    if tensor is None or got != expected:
        raise ValueError(
            f"load_adapter: {name} in {file} must be {expected}, got {'none' if got is None else quoted(got)}"
        )
    if tensor.get_dtype() not in DTYPES:
        raise ValueError(f"load_adapter: {name} in {file} must be one of {DTYPES}, got {tensor.get_dtype()}")
