"""Translates a LoraConfig of PEFT into the arguments of add_lora."""

import re
from importlib import import_module
from typing import Any, NamedTuple

from ..kernels.runtime.errors import check
from ..layers.lora import TARGETS
from ..models.model import Model
from .adapter import check_saved, hf_layers
from .lora_options import check_options


class LoRAArguments(NamedTuple):
    """The arguments of :func:`tpfuse.add_lora`."""

    rank: int
    alpha: float
    dropout: float
    targets: list[str]


def lora_arguments(config: Any, base: Model, model_type: str) -> LoRAArguments:
    """Returns the arguments of add_lora; ValueError, which names it, for an option that is not built.

    A is drawn with the variance of PEFT's, the same bits at every split, so not PEFT's bits.
    """
    values = config.to_dict()
    caller = f"add_adapter: {type(config).__name__}"
    values["peft_type"] = getattr(values.get("peft_type"), "value", values.get("peft_type"))
    check_options(caller, values, stored=False)
    check_saved(caller, values.get("modules_to_save"), base)
    rank, alpha = values["r"], values["lora_alpha"]
    targets = _targets(values.get("target_modules"), base, model_type)
    scale = rank**0.5 if values.get("use_rslora") else 1
    return LoRAArguments(rank, alpha * scale, values.get("lora_dropout", 0.0), targets)


def _targets(targets: Any, base: Model, model_type: str) -> list[str]:
    """Returns the layers of PEFT's target_modules: endings, a regular expression, "all-linear", or None for the
    family's default."""
    if targets is None:
        defaults = import_module("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        check(model_type in defaults, f"add_adapter: give target_modules; PEFT has none for {model_type}")
        targets = defaults[model_type]
    if targets == "all-linear":
        return list(TARGETS)
    if not isinstance(targets, str):
        return sorted(targets)
    names = [name for name in hf_layers(base) if re.fullmatch(targets, name)]
    check(bool(names), f"add_adapter: no linear layer is called {targets}")
    return names
