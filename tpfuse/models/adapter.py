"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, full tensors under Hugging Face's module names.

base_model.model.{module}.lora_A.weight  [r, K]        base_model.model.{module}.lora_B.weight  [N, r]
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..kernels._op import check
from ..layers._module import Spec, local, named_specs
from ..layers.lora import ColumnLoRA, adapted_layers, add_lora, base_of
from ..parallel import TensorParallel
from .huggingface import Source, full_tensor, raise_together, replace_files, together

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_[AB]\.weight")
_BUILT = dict(
    peft_type="LORA", bias="none", use_dora=False, lora_bias=False, use_qalora=False
)  # of PEFT's options; other values are errors
_EMPTY = "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices", "target_parameters"


def save_adapter(model: nn.Module, path: str | Path) -> None:
    """Writes the adapters of ``model`` as a directory that PEFT loads.  Every rank calls it; one writes, whole or not at all."""
    base, path = base_of(model), Path(path)
    entries, error = _entries(base, "save_adapter"), None
    writer, tensors = base.tp.rank == 0 and not base.dp_rank, {}
    for p, spec, tp, source in entries:
        full = full_tensor(p, spec, tp)
        if writer:
            tensors |= {name: t.cpu() for name, t in source.write(full)}
    if writer:
        try:
            files = {CONFIG: lambda file: file.write_text(json.dumps(_config(base), indent=2, sort_keys=True) + "\n")}
            files[WEIGHTS] = lambda file: save_file(tensors, file, metadata={"format": "pt"})
            replace_files(path, files)
        except Exception as e:
            error = e
    raise_together(error, base.groups())


def load_adapter(model: nn.Module, path: str | Path, *, trainable: bool = False) -> nn.Module:
    """Adds to ``model`` the adapters of a directory that PEFT (or :func:`save_adapter`) wrote, and freezes the rest; each rank reads its
    own slices only.  Adapters are frozen too unless ``trainable``.

    ValueError, on every rank and before anything changes, for an option that is not built, a module that the model does not have, or a
    tensor that is missing or does not fit.
    """
    base, path = base_of(model), Path(path)

    def look() -> tuple[dict[str, Any], Any, list[str]]:
        config, handle = _read(path)
        if trainable and config.get("lora_dropout"):
            raise ValueError(f"load_adapter: lora_dropout={config['lora_dropout']} in {path / CONFIG} is not built, to train with")
        names = list(handle.keys())
        odd = [name for name in names if not _TENSOR.fullmatch(name)]
        if odd:
            raise ValueError(f"load_adapter: {path / WEIGHTS} holds {odd[0]}, which is not an adapter of a linear layer")
        return config, handle, sorted({_TENSOR.fullmatch(name)[1] for name in names})

    config, handle, modules = together(look, base.groups())
    rank = config["r"]
    alpha = config["lora_alpha"] * (rank**0.5 if config.get("use_rslora") else 1)
    frozen = [p.requires_grad for p in model.parameters()]
    add_lora(model, rank=rank, alpha=alpha, targets=modules)
    entries = _entries(base, "load_adapter")
    try:
        together(lambda: _check(path, handle, entries), base.groups())
    except ValueError:
        for _, layer in adapted_layers(base):
            layer.lora = None
        for p, flag in zip(model.parameters(), frozen, strict=True):
            p.requires_grad_(flag)
        raise
    with torch.no_grad():
        for p, spec, tp, source in entries:
            local(p).copy_(source.read(handle.get_slice, spec, tp))
            p.requires_grad_(trainable)
    return model


def _entries(base: nn.Module, caller: str) -> list[tuple[nn.Parameter, Spec, TensorParallel, Source]]:
    """Every adapter's parameters, and the tensors of the file that each is made of."""
    check(hasattr(base, "sources"), f"{caller}: {type(base).__name__} has no names of Hugging Face; a model of tpfuse.models does")
    check(caller != "save_adapter" or any(adapted_layers(base)), f"{caller}: the model has no adapters")
    specs = {name: (p, spec, tp) for (name, spec, tp), p in zip(named_specs(base), base.parameters(), strict=True)}
    sources, found = base.sources(), []
    for path, layer in adapted_layers(base):
        lora, named = layer.lora, lambda letter, modules: tuple(f"{_PREFIX}{m}.lora_{letter}.weight" for m in modules)
        pattern = "r d -> r 1 d" if isinstance(lora, ColumnLoRA) else "r d -> r d"
        found.append((*specs[f"{path}.lora.A"], Source(named("A", lora.modules), pattern)))
        for leaf, parts in lora.parts.items():
            kept = [(n, m) for n, m in parts if m in lora.modules]
            if kept:
                names, widths = named("B", [m for _, m in kept]), tuple(n for n, _ in kept)
                name = "B" if leaf == "weight" else f"B_{leaf}"
                found.append((*specs[f"{path}.lora.{name}"], Source(names, _pattern(sources[f"{path}.{leaf}"]), widths)))
    return found


def _pattern(source: Source) -> str:
    """Of B, from its weight's: "d (t h e) -> h t e d" -> "(t h e) r -> h t e r"."""
    *ours, width = source.pattern.split("->")[1].split()
    theirs = [f"({' '.join(group)})" for group in source.theirs if group != [width]]
    return f"{' '.join(theirs)} r -> {' '.join(ours)} r"


# ---- the config ----


def _config(base: nn.Module) -> dict[str, Any]:
    lora = next(layer.lora for _, layer in adapted_layers(base))
    rank = len(lora.A)
    alpha = lora.scale * rank
    return _BUILT | dict(
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=0.0,
        target_modules=_targets(base),
        fan_in_fan_out=base.base_prefix == "transformer.",  # GPT-2's Conv1D holds its weight transposed
        init_lora_weights=True,
        inference_mode=True,
        modules_to_save=None,
        task_type="CAUSAL_LM" if hasattr(base, "generate") else None,
        base_model_name_or_path=None if base.source is None else str(base.source),
    )


def _targets(base: nn.Module) -> list[str]:
    """The shortest endings that name the adapted modules and no other."""
    adapted = {module for _, layer in adapted_layers(base) for module in layer.lora.modules}
    names = (base.hf_name(name) for source in base.sources().values() for name in source.names)
    others = {name.rpartition(".")[0] for name in names} - adapted
    found = set()
    for module in adapted:
        parts = module.split(".")
        endings = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        found.add(next(end for end in endings if not any(f".{other}".endswith(f".{end}") for other in others)))
    return sorted(found)


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


def _check(path: Path, handle: Any, entries: list[tuple[nn.Parameter, Spec, TensorParallel, Source]]) -> None:
    stored = set(handle.keys())
    for _, spec, _, source in entries:
        for name, shape in zip(source.names, source.shapes(spec.shape), strict=True):
            got = tuple(handle.get_slice(name).get_shape()) if name in stored else "none"
            if got != source.their_shape(shape):
                raise ValueError(f"load_adapter: {name} in {path / WEIGHTS} must be {source.their_shape(shape)}, got {got}")
