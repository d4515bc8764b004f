"""The conditions under which a resumed run computes the same function, and the same bits, as the one before."""

import dataclasses
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._version import __version__
from ...kernels.runtime.processor import order_of_sums
from ...layers.lora import adapted_layers
from ...layers.shards import named_specs
from ...parallel import TensorParallel
from ...pipeline.trees import micro_batches_of
from .stages import stage_in

# Fields of a config that do not enter the function: what training adds, where it starts, what files are called.
_FREE = "dropout", "attention_dropout", "embedding_dropout", "init_std", "family"

Adapters = dict[str, dict[str, float | bool]]  # by layer: what decides an adapter's function beside its weights
_OF_A_SIZE = "sequence_parallel", "overlap", "one_machine"  # of the tensor-parallel ranks


def conditions(model: nn.Module) -> dict[str, Any]:
    """Returns what the last bits of a step depend on beside the state, as JSON has it."""
    ranks = (tp for *_, tp in named_specs(model) if tp.replicas == 1)  # bits do not depend on where experts are
    tp = max(ranks, key=lambda tp: tp.size, default=TensorParallel())
    world = dist.get_world_size() if dist.is_initialized() else 1
    stage = stage_in(model)
    stages = 1 if stage is None else stage.ranks
    split = tp.size > 1
    # by leaves the bits are the same at every split over tensor-parallel ranks; of a tree of micro-batches, at every
    # number of replicas and stages
    layout = (
        {"bitwise": tp.bitwise, "batch_invariant": tp.batch_invariant}
        if tp.bitwise is not None
        else {
            "bitwise": None,
            "tensor-parallel size": tp.size,
            "context-parallel size": tp.cp_size,
            "context-parallel kind": None if tp.cp is None else tp.cp_kind,
            "sequence_parallel": split and tp.sequence_parallel,
            "overlap": tp.overlap if split else None,
            "one_machine": split and tp.one_machine,
        }
    )
    count = micro_batches_of(model)
    sums = {
        "data-parallel size": world // tp.call_size // stages,
        "pipeline-parallel size": stages,
        "pipeline schedule": None if stage is None else stage.schedule,
    }
    return (
        layout
        | (sums if count is None else {})
        | order_of_sums()
        | {
            "bitwise_micro_batches": count,
            "torch": str(torch.__version__),
            "tpfuse": __version__,
            "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})),
        }
    )


def warn_of_differences(path: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Warns once of all differences: the run is the same, its last bits need not be.

    Of another tensor-parallel size the settings that follow from it are left out.
    """
    differing = {key: value for key, value in current.items() if key in saved and saved[key] != value}
    if "tensor-parallel size" in differing:
        differing = {key: value for key, value in differing.items() if key not in _OF_A_SIZE}
    if differing:
        changes = "; ".join(f"{key} {str(saved[key])[:60]}, now {value}" for key, value in differing.items())
        warnings.warn(
            f"load_checkpoint: training goes on, not bit for bit: {path} was written with {changes}", stacklevel=3
        )


def adapters_of(model: nn.Module) -> Adapters:
    """Returns by layer what decides the function of an adapter beside its weights, which are stored with the others."""
    return {path: {"scale": lora.scale, "merged": lora.merged} for path, _, lora in adapted_layers(model)}


def merged_adapters(adapters_of: Sequence[Adapters]) -> Adapters:
    """Returns the adapters of all ranks.  ValueError where ranks that hold the same layer have another one there."""
    joined: Adapters = {}
    for rank, adapters in enumerate(adapters_of):
        for layer, adapter in adapters.items():
            if joined.setdefault(layer, adapter) != adapter:
                raise ValueError(
                    f"adapters must be the same on every rank, got {layer} with {joined[layer]} and, on rank {rank},"
                    f" with {adapter}"
                )
    return joined


def check_adapters(path: Path, saved: Mapping[str, Mapping[str, object]], model: nn.Module) -> None:
    """ValueError where an adapter has another scale than the one that was saved, or one of both is merged."""
    for layer, current in adapters_of(model).items():
        for key, value in saved.get(layer, {}).items():
            if current.get(key, value) != value:
                raise ValueError(
                    f"the adapter of {layer} has {key}={current[key]!r}, {path} was written with {str(value)[:60]!r}"
                )


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """Returns the model's config as JSON has it; None where the model has none that is a dataclass."""
    config = getattr(model, "config", None)
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return None
    return _as_json({field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def _defaults_of(model: nn.Module) -> dict[str, Any]:
    config: Any = model.config
    fields = dataclasses.fields(config)
    return _as_json({field.name: field.default for field in fields if field.default is not dataclasses.MISSING})


def _as_json(fields: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(fields, default=_json))


def _json(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, Iterable) else repr(value)


def check_config(path: Path, saved: Mapping[str, Any] | None, model: nn.Module) -> None:
    """ValueError where the model computes another function than the one that was saved.

    A field that the checkpoint does not know is younger, and had what is its default now.
    """
    current = config_of(model)
    if saved is None or current is None:
        return
    saved = _defaults_of(model) | dict(saved)
    for key, value in current.items():
        if key in saved and key not in _FREE and saved[key] != value:
            raise ValueError(
                f"the model's config has {key}={value!r}, {path} was written with {str(saved[key])[:60]!r}"
            )
