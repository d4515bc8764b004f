"""What transformers takes for a key that a config.json leaves out, of every family of tpfuse.models.

    python -m bench.defaults        # writes tpfuse/models/families/defaults.json

It holds, by model_type, the keys of that config class with their defaults, and which of them may be null.
"""

import json
import pathlib
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tpfuse.models.families import FAMILIES, defaults

PATH = pathlib.Path(defaults.__file__).with_suffix(".json")
SHARED = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
DERIVED = {"layer_types", "rope_parameters", "head_dim", "num_key_value_heads"}  # a class fills them in from others


def of_class(model_type: str) -> dict[str, Any]:
    """Returns {"defaults": {key: value}, "nullable": [key, ...]} of a config class."""
    cls: Any = CONFIG_MAPPING[model_type]
    filled = cls().to_dict()
    keys = [key for key in filled if key not in SHARED and not key.startswith("_")]
    # what the class declares, before it fills in what follows from other keys
    values = {key: getattr(cls, key, None) if key in DERIVED else filled[key] for key in keys}
    return {"defaults": values, "nullable": [key for key in keys if _may_be(cls, {**filled, key: None})]}


def _may_be(cls: Any, keys: dict[str, Any]) -> bool:
    try:
        cls.from_dict(keys)
    except Exception:  # whatever a release raises for a value of another type
        return False
    return True


def main() -> None:
    table = {name: of_class(name) for name in sorted(FAMILIES)}
    PATH.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(entry)}' for name, entry in table.items()) + "\n}\n")


if __name__ == "__main__":
    main()
