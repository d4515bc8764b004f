"""Parts of a module of transformers that are not those its config describes."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..kernels.runtime.errors import check

_STATE = "training", "gradient_checkpointing", "vocab_size"  # resize_token_embeddings tells the root alone of the last


def check_unchanged(module: Any) -> None:
    """Raises the ValueError of a module with a part, an attribute or a forward that its class does not make of its
    config: blocks that are made of the config would leave the change out.  What PEFT has wrapped counts as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        declared = type(module)(copy.deepcopy(module.config))
    for name, part, model in _pairs("", module, declared):
        difference = _difference(part, model)
        check(difference is None, f"parallelize: {name or type(module).__name__} {difference}")


def _pairs(name: str, part: Any, model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yields each part of a module that is there, as it was before PEFT, by name and beside the one of its model."""
    while type(part).__module__.startswith("peft."):
        part = part.base_layer if hasattr(part, "base_layer") else part.original_module
    yield name, part, model
    for child, of_model in model.named_children():
        if (of_part := part._modules.get(child)) is not None:
            yield from _pairs(f"{name}.{child}".lstrip("."), of_part, of_model)


def _difference(part: nn.Module, model: nn.Module) -> str | None:
    kind, declared = type(part), type(model)
    if kind is not declared:
        return f"must be a {declared.__name__}, as its config says, got a {kind.__module__}.{kind.__name__}"
    if "forward" in vars(part):
        return (
            "has a forward of its own beside its class's, as accelerate's hooks make one; remove it, as"
            " accelerate.hooks.remove_hook_from_module does"
        )
    more = sorted(set(part._modules) - set(model._modules))
    if more:
        return f"has parts that its config does not describe: {', '.join(more)}"
    values, expected = _values(part), _values(model)
    for key in sorted(values.keys() & expected.keys()):
        if values[key] != expected[key]:
            return (
                f"has {key} {values[key]!r}, and {expected[key]!r} by its config; change the config before the module"
                " is made"
            )
    return None


def _values(part: nn.Module) -> dict[str, float | str]:
    """Returns the public attributes that are numbers or strings."""
    return {
        key: value
        for key, value in vars(part).items()
        if not key.startswith("_") and key not in _STATE and isinstance(value, bool | int | float | str)
    }
