"""A LoraConfig of PEFT -> the arguments of add_lora, or an error that names what is not built."""

import re
from importlib import import_module
from typing import Any

from ..kernels.runtime.errors import check
from ..kernels.runtime.rules import shown
from ..layers.lora import TARGETS
from ..models.model import Model
from .adapter import BUILT, EMPTY, check_saved, hf_layers

_NONE = "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_config", "loftq_config", "eva_config"


def lora_arguments(config: Any, base: Model, model_type: str) -> dict[str, Any]:
    """Returns rank, alpha, dropout and targets.

    A is drawn with the variance of PEFT's, the same bits at every split, so not PEFT's bits.  ValueError for an option
    that is not built.
    """
    values: dict[str, Any] = config.to_dict()
    stands = f"add_adapter: {type(config).__name__}"
    values["peft_type"] = getattr(values.get("peft_type"), "value", values.get("peft_type"))
    for key, built in (BUILT | dict(init_lora_weights=True)).items():
        if values.get(key, built) not in (built, None):
            raise ValueError(f"{stands}: {key}={shown(values[key])} is not built; only {built!r} is")
    for key in (*EMPTY, *_NONE):
        if values.get(key):
            raise ValueError(f"{stands}: {key}={shown(values[key])} is not built")
    check_saved(stands, values.get("modules_to_save"), base)
    rank, alpha = values["r"], values["lora_alpha"]
    targets = _targets(values.get("target_modules"), base, model_type)
    scale = rank**0.5 if values.get("use_rslora") else 1
    return dict(rank=rank, alpha=alpha * scale, dropout=values.get("lora_dropout", 0.0), targets=targets)


def _targets(asked: Any, base: Model, model_type: str) -> list[str]:
    """Returns what PEFT's target_modules mean: endings, a regular expression, "all-linear", or the family's own."""
    if asked is None:
        known = import_module("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        check(model_type in known, f"add_adapter: give target_modules; PEFT has none for {model_type}")
        asked = known[model_type]
    if asked == "all-linear":
        return list(TARGETS)
    if not isinstance(asked, str):
        return sorted(asked)
    found = [name for name in hf_layers(base) if re.fullmatch(asked, name)]
    check(bool(found), f"add_adapter: no linear layer is called {asked}")
    return found
