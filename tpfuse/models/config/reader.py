"""Reads a Hugging Face config.json, of either generation of its keys, for a config class."""

from collections.abc import Mapping
from typing import Any

from ...kernels.gemm.activation import ACTIVATIONS
from ...kernels.runtime.rules import Rule, check_rules, instance, quoted
from ..families import Family
from .fields import FILE_KEYS, FULL, SLIDING
from .rotary import read_rope

HF_ACTIVATIONS = {name: activation for activation, entry in ACTIVATIONS.items() for name in entry.huggingface}
NAMED = "activation", "head_activation"  # fields that hold an activation's name


class Reader:
    """Reads a config.json for a config class."""

    def __init__(self, name: str, rules: Mapping[str, Rule], config: Mapping[str, Any]):
        self.name, self.rules, self.config = name, rules, config
        check_rules(self.name, config, FILE_KEYS)

    def fields(self, family: Family) -> dict[str, Any]:
        """Returns the fields that config.json holds and those that the family fixes."""
        for key, built in family.not_built.items():
            if self.config.get(key, built) not in (built, None):
                raise ValueError(f"{self.name}: {key}={quoted(self.config[key])} is not built; only {built!r} is")
        values: dict[str, Any] = {}
        for name, keys in family.hf_keys.items():
            values[name] = self.optional(*keys) if name in family.hf_optional else self.required(*keys)
            null = name in family.nullable and any(key in self.config for key in keys)
            if values[name] is None and not null:
                values[name] = family.hf_optional[name]
        for name in (name for name in NAMED if name in values):
            if not isinstance(values[name], str) or values[name] not in HF_ACTIVATIONS:
                raise ValueError(
                    f"{self.name}: {name} {quoted(values[name])} is not built; one of {sorted(HF_ACTIVATIONS)} is"
                )
            values[name] = HF_ACTIVATIONS[values[name]]
        values = {name: value for name, value in values.items() if value is not None}
        check_rules(self.name, values, self.rules, {name: self.key_of(*keys) for name, keys in family.hf_keys.items()})
        return values | family.fixed

    def ropes(self, family: Family) -> dict[str, Any]:
        """Returns rope and local_rope: rope_parameters by the kind of layers, or what older files have, rope_theta,
        rope_scaling and rope_local_base_freq; the family's thetas where none of them says it."""
        assert family.thetas is not None  # the caller has looked
        by_kind, scaling = self.config.get("rope_parameters") or {}, self.config.get("rope_scaling") or {}
        check_rules(self.name, {"rope_parameters": by_kind}, {"rope_parameters": instance("an object", Mapping)})
        if set(by_kind) - {FULL, SLIDING}:
            raise ValueError(f"{self.name}: rope_parameters must have {FULL} and {SLIDING}, got {quoted(set(by_kind))}")
        ropes = {}
        for name, kind, key, theta in (
            ("rope", FULL, "rope_theta", family.thetas[0]),
            ("local_rope", SLIDING, "rope_local_base_freq", family.thetas[1]),
        ):
            parts = {"rope_parameters": by_kind.get(kind) or {}, "rope_scaling": scaling if kind == FULL else {}}
            check_rules(self.name, parts, dict.fromkeys(parts, instance("an object", Mapping)))
            theta = theta if self.optional(key) is None else self.config[key]
            config = dict(rope_parameters={**parts["rope_parameters"], **parts["rope_scaling"]}, rope_theta=theta)
            ropes[name] = read_rope(self.name, {**self.config, **config}, family.rotary_keys)
        return ropes

    def pattern(self, family: Family, layers: int) -> tuple[str, ...]:
        """Returns which layers have a window: what layer_types says, or the family's pattern."""
        types = self.optional("layer_types")
        if types is None:
            period = None if family.pattern_key is None else self.optional(family.pattern_key)
            period = family.full_every if period is None else period
            types = [SLIDING if i % period else FULL for i in range(1, layers + 1)]
        return tuple(types)

    def windows(self, layers: int) -> dict[str, Any]:
        """Returns the window, and which layers have it."""
        if not self.config.get("use_sliding_window", False):
            return dict(window=None, layer_types=None)
        window, types = self.required("sliding_window"), self.optional("layer_types")
        if types is None:
            full = self.required("max_window_layers")
            types = [SLIDING if i >= full else FULL for i in range(layers)]
        return dict(window=window, layer_types=tuple(types))

    def optional(self, *keys: str) -> Any:
        """Returns the value of the first key that has one; None where none has."""
        return self.config.get(self.key_of(*keys))

    def key_of(self, *keys: str) -> str:
        """Returns the first key that has a value; the first of all where none has."""
        return next((key for key in keys if self.config.get(key) is not None), keys[0])

    def required(self, *keys: str) -> Any:
        """Returns the value of the first key that has one; ValueError where none has."""
        value = self.optional(*keys)
        if value is None:
            raise ValueError(f"{self.name}: config.json has no {' or '.join(keys)}")
        return value
