"""What other libraries take for an option that is left out, as the tables of tpfuse that hold it.

    python -m bench.defaults        # writes them all

tpfuse/models/families/defaults.json   by model_type, the keys of transformers' config class with their defaults, and
                                       which of them may be null
tpfuse/interop/lora_options.json       the options of PEFT's LoraConfig
tpfuse/models/generation/options.json  the attributes of transformers' GenerationConfig
"""

import json
import pathlib
from typing import Any

from peft import LoraConfig
from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tpfuse.interop import lora_options
from tpfuse.models.families import FAMILIES, defaults
from tpfuse.models.generation import options

SHARED = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
# Keys that a class fills in from others.
DERIVED = {"layer_types", "rope_parameters", "head_dim", "num_key_value_heads", "sliding_window"}


def of_class(model_type: str) -> dict[str, Any]:
    """Returns {"defaults": {key: value}, "nullable": [key, ...]} of a config class."""
    cls: Any = CONFIG_MAPPING[model_type]
    filled = declared(cls, cls().to_dict())
    keys = [key for key in filled if key not in SHARED and not key.startswith("_")]
    # what the class declares, before it fills in what follows from other keys
    values = {key: getattr(cls, key, None) if key in DERIVED else filled[key] for key in keys}
    return {"defaults": values, "nullable": [key for key in keys if _may_be(cls, {**filled, key: None})]}


def declared(cls: Any, keys: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json by the names that a class declares, of which it may store some by others."""
    names = {stored: name for name, stored in cls.attribute_map.items() if name in cls.__annotations__}
    return {names.get(key, key): value for key, value in keys.items()}


def _may_be(cls: Any, keys: dict[str, Any]) -> bool:
    try:
        cls.from_dict(keys)
    except Exception:  # whatever a release raises for a value of another type
        return False
    return True


def of_lora() -> dict[str, Any]:
    """Returns {option: default} of a LoraConfig."""
    options = LoraConfig().to_dict()
    return options | dict(peft_type=options["peft_type"].value, peft_version=None)


def of_generation() -> dict[str, Any]:
    """Returns {attribute: what transformers takes where nobody says anything} of a GenerationConfig."""
    config = GenerationConfig()
    return dict.fromkeys(config.to_dict()) | config._get_default_generation_params()


def main() -> None:
    families = {name: of_class(name) for name in sorted(FAMILIES)}
    tables = (defaults, families), (lora_options, of_lora()), (options, of_generation())
    for module, table in tables:
        rows = ",\n".join(f'"{name}": {json.dumps(entry)}' for name, entry in table.items())
        pathlib.Path(module.__file__).with_suffix(".json").write_text("{\n" + rows + "\n}\n")


if __name__ == "__main__":
    main()
