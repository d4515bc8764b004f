"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Full tensors stand under Hugging Face's module names:

base_model.model.{module}.lora_A.weight  [r, K]        base_model.model.{module}.lora_B.weight  [N, r]
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..kernels.runtime.errors import check
from ..layers.lora import ColumnLoRA, adapted_layers, add_lora, base_of
from ..layers.module import Spec, local, named_specs
from ..parallel import TensorParallel
from ..together import raise_together, together
from .huggingface.disk import replace_files
from .huggingface.model import PretrainedModule
from .huggingface.source import Source
from .huggingface.write import full_tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_[AB]\.weight")
# PEFT's options, of which other values are errors; and those that must be empty.
_BUILT: dict[str, Any] = dict(peft_type="LORA", bias="none", use_dora=False, lora_bias=False, use_qalora=False)
_EMPTY = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
)


class _Entry(NamedTuple):
    """A parameter of an adapter, and the tensors of the file that it is made of."""

    p: nn.Parameter
    spec: Spec
    tp: TensorParallel
    source: Source


def save_adapter(model: nn.Module, path: str | Path) -> None:
    """Writes the adapters of ``model`` as a directory that PEFT loads, whole or not at all.

    Every rank calls it; one writes.
    """
    base = _base(model, "save_adapter")
    check(any(adapted_layers(base)), "save_adapter: the model has no adapters")
    tensors: dict[str, Tensor] = {}
    error: Exception | None = None
    for entry in _entries(base):
        full = full_tensor(entry.p, entry.spec, entry.tp)
        if base.writes:
            tensors |= {name: t.cpu() for name, t in entry.source.write(full)}
    if base.writes:
        config = json.dumps(_config(base), indent=2, sort_keys=True) + "\n"
        weights = lambda file: save_file(tensors, file, metadata={"format": "pt"})
        try:
            replace_files(Path(path), {CONFIG: lambda file: file.write_text(config), WEIGHTS: weights})
        except Exception as e:
            error = e
    raise_together(error, base.groups())


def load_adapter(model: nn.Module, path: str | Path, *, trainable: bool = False) -> nn.Module:
    """Adds the adapters of a directory that PEFT or :func:`save_adapter` wrote to ``model``, and freezes the rest.

    Returns the model.  Each rank reads its own slices only.  Adapters are frozen too unless ``trainable``.  ValueError,
    on every rank and before anything changes, for an option that is not built, a module that the model does not have,
    or a tensor that is missing or has another shape.
    """
    base, path = _base(model, "load_adapter"), Path(path)

    def examine() -> tuple[dict[str, Any], Any, list[str]]:
        config, handle = _read(path)
        if trainable and config.get("lora_dropout"):
            raise ValueError(
                f"load_adapter: lora_dropout={config['lora_dropout']} in {path / CONFIG} is not built, to train with"
            )
        modules = set()
        for name in handle.keys():  # noqa: SIM118
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise ValueError(
                    f"load_adapter: {path / WEIGHTS} holds {name}, which is not an adapter of a linear layer"
                )
            modules.add(match[1])
        return config, handle, sorted(modules)

    config, handle, modules = together(examine, base.groups())
    rank = config["r"]
    alpha = config["lora_alpha"] * (rank**0.5 if config.get("use_rslora") else 1)
    frozen = [p.requires_grad for p in model.parameters()]
    add_lora(model, rank=rank, alpha=alpha, targets=modules)
    entries = _entries(base)
    try:
        together(lambda: _check(path, handle, entries), base.groups())
    except ValueError:
        for _, layer, _ in adapted_layers(base):
            layer.lora = None
        for p, flag in zip(model.parameters(), frozen, strict=True):
            p.requires_grad_(flag)
        raise
    with torch.no_grad():
        for p, spec, tp, source in entries:
            local(p).copy_(source.read(handle.get_slice, spec, tp))
            p.requires_grad_(trainable)
    return model


def _base(model: nn.Module, caller: str) -> PretrainedModule:
    base = base_of(model)
    if not isinstance(base, PretrainedModule):
        raise ValueError(f"{caller}: {type(base).__name__} has no names of Hugging Face; a model of tpfuse.models does")
    return base


def _entries(base: PretrainedModule) -> list[_Entry]:
    """Returns every adapter's parameters."""
    specs = {name: (p, spec, tp) for (name, spec, tp), p in zip(named_specs(base), base.parameters(), strict=True)}
    named = lambda letter, modules: tuple(f"{_PREFIX}{m}.lora_{letter}.weight" for m in modules)
    sources, entries = base.sources(), []
    for path, _, lora in adapted_layers(base):
        pattern = "r d -> r 1 d" if isinstance(lora, ColumnLoRA) else "r d -> r d"
        entries.append(_Entry(*specs[f"{path}.lora.A"], Source.several(named("A", lora.adapted), pattern)))
        for leaf, parts in lora.parts.items():
            adapted = [(n, m) for n, m in parts if m in lora.adapted]
            if adapted:
                names, widths = named("B", [m for _, m in adapted]), tuple(n for n, _ in adapted)
                name = "B" if leaf == "weight" else f"B_{leaf}"
                source = Source.several(names, _pattern(sources[f"{path}.{leaf}"]), widths)
                entries.append(_Entry(*specs[f"{path}.lora.{name}"], source))
    return entries


def _pattern(source: Source) -> str:
    """Returns the pattern of B, from its weight's: "d (t h e) -> h t e d" -> "(t h e) r -> h t e r"."""
    *ours, width = source.ours
    theirs = [f"({' '.join(group)})" for group in source.theirs if group != [width]]
    return f"{' '.join(theirs)} r -> {' '.join(ours)} r"


# ---- the config ----


def _config(base: PretrainedModule) -> dict[str, Any]:
    lora = next(lora for *_, lora in adapted_layers(base))
    rank = len(lora.A)
    alpha = lora.scale * rank
    return _BUILT | dict(
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=0.0,
        target_modules=_targets(base),
        fan_in_fan_out=base.config.hf.transposed,
        init_lora_weights=True,
        inference_mode=True,
        modules_to_save=None,
        task_type="CAUSAL_LM" if hasattr(base, "generate") else None,
        base_model_name_or_path=None if base.source is None else str(base.source),
    )


def _targets(base: PretrainedModule) -> list[str]:
    """Returns the shortest endings that name the adapted modules and no other."""
    adapted = {module for *_, lora in adapted_layers(base) for module in lora.adapted}
    names = (base.hf_name(name) for source in base.sources().values() for name in source.names)
    others = {name.rpartition(".")[0] for name in names} - adapted
    targets = set()
    for module in adapted:
        parts = module.split(".")
        endings = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        targets.add(next(end for end in endings if not any(f".{other}".endswith(f".{end}") for other in others)))
    return sorted(targets)


def _read(path: Path) -> tuple[dict[str, Any], Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        handle = safe_open(path / WEIGHTS, framework="pt", device="cpu")
    except (ValueError, OSError, SafetensorError) as error:
        raise ValueError(f"load_adapter: {path} must hold {CONFIG} and {WEIGHTS}: {error}") from None
    for key, built in _BUILT.items():
        if config.get(key, built) not in (built, None):
            raise ValueError(f"load_adapter: {key}={config[key]!r} is not built; only {built!r} is")
    for key in _EMPTY:
        if config.get(key):
            raise ValueError(f"load_adapter: {key}={config[key]!r} is not built")
    for key in ("r", "lora_alpha"):
        if key not in config:
            raise ValueError(f"load_adapter: {path / CONFIG} has no {key}")
    return config, handle


def _check(path: Path, handle: Any, entries: list[_Entry]) -> None:
    stored = set(handle.keys())
    for _, spec, _, source in entries:
        for name, shape in zip(source.names, source.shapes(spec.shape), strict=True):
            got = tuple(handle.get_slice(name).get_shape()) if name in stored else "none"
            if got != source.their_shape(shape):
                raise ValueError(
                    f"load_adapter: {name} in {path / WEIGHTS} must be {source.their_shape(shape)}, got {got}"
                )
