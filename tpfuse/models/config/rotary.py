"""Rotary positions of a config: what may be asked for, how a config.json holds it, and when a call's length matters."""

from collections.abc import Mapping
from typing import Any

from ...kernels.rotary.table import rope_table
from ...kernels.runtime.rules import check_rules, instance, quoted
from ..families.family import RotaryKeys

Rope = Mapping[str, Any]


def check_rope(name: str, rope: Rope, keys: RotaryKeys, *, head_size: int, max_positions: int) -> None:
    """Raises ValueError of ``name`` for a rotation that is not built in a family, or whose numbers are wrong."""
    kind, share = rope.get("rope_type", "default"), rope.get("partial_rotary_factor")
    if kind not in keys.kinds:
        raise ValueError(f"{name}: rope_type={quoted(kind)} is not built; one of {', '.join(keys.kinds)} is")
    if not keys.partial and share not in (None, 1):  # which transformers' classes of the family treat differently
        raise ValueError(f"{name}: partial_rotary_factor={quoted(share)} is not built; only 1 is")
    for length in (1, max_positions):  # names what is missing, wrong or not built
        rope_table(head_size, 1, scaling=dict(rope), max_position_embeddings=max_positions, seq_len=length)


def stretched(rope: Rope, max_positions: int) -> bool:
    """Returns whether the tables depend on the length of a call: dynamic ones do past the length that the model was
    trained for, which no file of transformers lets a call reach."""
    trained: int = rope.get("max_position_embeddings") or max_positions
    return rope.get("rope_type") == "dynamic" and trained < max_positions


def switches_at(rope: Rope, max_positions: int) -> int | None:
    """Returns the length past which a call has longrope's long factors in place of the short ones; None: none has."""
    trained: int = rope.get("original_max_position_embeddings") or max_positions
    return trained if rope.get("rope_type") == "longrope" and trained < max_positions else None


def read_rope(name: str, config: Mapping[str, Any], keys: RotaryKeys) -> dict[str, Any]:
    """Returns rope_parameters, or what older files have: rope_theta, and rope_scaling with "type"."""
    key = next((key for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None), "rope_parameters")
    parameters = config.get(key) or {}
    check_rules(name, {key: parameters}, {key: instance("an object", Mapping)})
    rope = dict(parameters)
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    kind = rope.setdefault("rope_type", "default")
    rope["rope_type"] = keys.aliases.get(kind, kind) if isinstance(kind, str) else kind
    for field in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        value = config.get(keys.names.get(field, field))
        value = keys.omitted.get(field) if value is None else value
        if value is not None and (field in keys.outer or rope.get(field) is None):
            rope[field] = value
    if "rope_theta" not in rope:
        raise ValueError(f"{name}: config.json has neither rope_parameters.rope_theta nor rope_theta")
    return rope


def written_rope(rope: Rope, keys: RotaryKeys, max_positions: int) -> dict[str, Any]:
    """Returns what config.json says of ``rope``, in the keys of new and of older releases."""
    config: dict[str, Any] = dict(rope_parameters=dict(rope), rope_theta=rope["rope_theta"])
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    for field, key in keys.names.items():
        config[key] = rope.get(field, 1.0)
    for field in keys.outer:
        config[field] = rope.get(field, max_positions)
    return config
