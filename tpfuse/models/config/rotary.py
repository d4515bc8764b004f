"""Rotary positions of a config: what may be asked for, how a config.json holds it, and when a call's length matters."""

from collections.abc import Mapping
from typing import Any

from ...kernels.rotary.table import rope_table
from ...kernels.runtime.rules import check_rules, instance, quoted
from ..families.family import FULL, SLIDING, RotaryKeys

Rope = Mapping[str, Any]
Object = dict[str, Any]  # of a config.json
THETA, SHARE, TRAINED = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
_OF_A_LENGTH = "llama3", "yarn", "longrope"  # the types that know the length that the model was trained for first


def check_rope(name: str, rope: Rope, keys: RotaryKeys, *, head_size: int, max_positions: int) -> None:
    """Raises ValueError of ``name`` for a rotation that is not built in a family, or whose numbers are wrong."""
    kind, share = rope.get("rope_type", "default"), rope.get(SHARE)
    if kind not in keys.kinds:
        raise ValueError(f"{name}: rope_type={quoted(kind)} is not built; one of {', '.join(keys.kinds)} is")
    if not keys.partial and share not in (None, 1):  # which transformers' classes of the family treat differently
        raise ValueError(f"{name}: partial_rotary_factor={quoted(share)} is not built; only 1 is")
    for length in (1, max_positions):  # names what is missing, wrong or not built
        rope_table(head_size, 1, scaling=dict(rope), max_position_embeddings=max_positions, seq_len=length)


class RopeReader:
    """Reads the rotary positions of a config.json in transformers' order.

    That is rope_scaling, the key of older files, where it is not empty, before rope_parameters; in it, what stands
    there, before the older keys beside it, before the usual values.
    """

    def __init__(self, name: str, config: Mapping[str, Any], keys: RotaryKeys, trained: int):
        self.name, self.config, self.keys = name, config, keys
        self.trained = trained  # what a missing original_max_position_embeddings counts as

    def one(self) -> Object:
        """Returns the rotary positions of all layers."""
        key = "rope_scaling" if self.config.get("rope_scaling") else "rope_parameters"
        return self._completed(self._object(key), (self.keys.theta, self.keys.usual_theta))

    def by_kind(self) -> tuple[Object, Object]:
        """Returns those of layers without a window, and with one."""
        parameters, scaling = self._object("rope_parameters"), self._object("rope_scaling")
        if set(parameters) - {FULL, SLIDING}:
            kinds = quoted(set(parameters))
            raise ValueError(f"{self.name}: rope_parameters must have {FULL} and {SLIDING}, got {kinds}")
        ropes = []
        for kind in (FULL, SLIDING):
            rope = parameters.get(kind) or {"rope_type": "default"}
            check_rules(self.name, {f"rope_parameters.{kind}": rope}, {f"rope_parameters.{kind}": _OBJECT})
            rope = {**rope, **(scaling if kind in self.keys.scaled else {})}
            ropes.append(self._completed(rope, self.keys.thetas[kind]))
        return ropes[0], ropes[1]

    def _object(self, key: str) -> Object:
        value = self.config.get(key)
        value = {} if value is None else value
        check_rules(self.name, {key: value}, {key: _OBJECT})
        return dict(value)

    def _completed(self, rope: Object, theta: tuple[str, float]) -> Object:
        keys = self.keys
        rope.setdefault(THETA, self.config.get(*theta))
        share = self.config.get(keys.share, keys.usual_share)
        if share is not None or keys.usual_share is not None:
            rope.setdefault(SHARE, share)
        kind = rope.setdefault("rope_type", rope.get("type", "default"))
        rope.pop("type", None)
        rope["rope_type"] = keys.aliases.get(kind, kind) if isinstance(kind, str) else kind
        if rope["rope_type"] in _OF_A_LENGTH:
            if keys.trained_outside:
                rope[TRAINED] = self.config[TRAINED]
            rope.setdefault(TRAINED, self.trained)
        for name, key in (THETA, theta[0]), (SHARE, keys.share):
            if rope.get(name, 1) is None:
                raise ValueError(f"{self.name}: {key} must be a number, got null")
        return rope


_OBJECT = instance("an object", Mapping)


def written_rope(rope: Rope, keys: RotaryKeys, max_positions: int) -> Object:
    """Returns what config.json says of ``rope``, in the keys of new and of older releases."""
    scaling = {k: v for k, v in rope.items() if k != THETA} if rope.get("rope_type", "default") != "default" else None
    config: Object = dict(rope_parameters=dict(rope), rope_theta=rope[THETA], rope_scaling=scaling)
    config[keys.theta] = rope[THETA]
    if keys.partial:
        config[keys.share] = rope.get(SHARE, 1.0)
    if keys.trained_outside:
        config[TRAINED] = rope.get(TRAINED, max_positions)
    return config
