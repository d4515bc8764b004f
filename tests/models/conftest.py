"""What the models' tests reach, for the README's table (bench/support.py)."""

import json

import pytest


@pytest.fixture
def reached(record_property):
    """``reached(config, R, errors, sp=, packed=)`` notes the largest relative error of each feature that a comparison
    with transformers is of; ``errors`` by name: loss, logits, last_hidden_state, pooler_output, "d " + a parameter;
    or whole features by their own names."""

    def note(config, R: int, errors: dict[str, float], *, sp: bool | None = None, packed: bool = False) -> None:
        family = config.family
        cells: dict[str, float] = {}
        for name, error in errors.items():
            kind = "gradients" if name.startswith("d ") else OUTPUTS.get(name, name)
            cells[kind] = max(error, cells.get(kind, 0.0))
        if sp is not None:  # a comparison of everything, so of what the configuration has as well
            worst = max(errors.values())
            cells[f"{'tied' if config.tie_embeddings else 'untied'} head"] = worst
            cells[f"sequence parallelism {'on' if sp else 'off'}"] = worst
            if packed:
                cells["packed documents"] = worst
            kv_heads = getattr(config, "kv_heads", config.num_heads)
            if kv_heads < config.num_heads:
                cells[f"kv heads {'>' if kv_heads > R else '<' if kv_heads < R else '='} R"] = worst
            if getattr(config, "window", None) is not None and any(config.windows):
                cells["sliding window"] = worst
        for feature, error in cells.items():
            record_property("parity", json.dumps([family, feature, R, error]))

    return note


OUTPUTS = {"last_hidden_state": "logits", "pooler_output": "logits"}
