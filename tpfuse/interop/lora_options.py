"""The options of a LoraConfig, by PEFT's own list of them: those that are read, and those that say nothing of weights.

Any other option must have PEFT's default.  ``python -m bench.defaults`` writes these, and a test holds them to the
installed release: what it adds is refused until somebody has read it.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from ..kernels.runtime.rules import brief, quoted

DEFAULTS: Mapping[str, Any] = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
READ = {"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "target_parameters"}
READ |= {"modules_to_save"}
SILENT = {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
SILENT |= {"fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying"}
# How the tensors of a file came about: they hold the result.
PAST = {"exclude_modules", "layers_to_transform", "layers_pattern"}
PAST |= {"eva_config", "corda_config", "lora_ga_config", "loftq_config"}
PAST_INITS = False, "gaussian", "orthogonal", "eva", "lora_ga"  # PEFT changes the base weights by the others


def check_options(place: str, options: Mapping[str, Any], *, stored: bool) -> None:
    """Raises ValueError, which names it, for an option that is not built.

    ``stored``: the options lie beside the tensors of an adapter, which need not be drawn.
    """
    silent = READ | SILENT | (PAST if stored else set())
    for key, value in options.items():
        default = DEFAULTS.get(key)
        neutral = value is None or value == default or not (value or default)
        past = stored and key == "init_lora_weights" and value in PAST_INITS
        if key in silent or neutral or past:
            continue
        cure = f"; only {default!r} is" if default else "" if key in DEFAULTS else ", and no option that tpfuse knows"
        if stored and key == "init_lora_weights":
            cure = (
                ", for PEFT changes the base weights when it loads such an adapter; save it again with PEFT's"
                " save_pretrained(path_initial_model_for_weight_conversion=...)"
            )
        raise ValueError(f"{place}: {brief(key)}={quoted(value)} is not built{cure}")
