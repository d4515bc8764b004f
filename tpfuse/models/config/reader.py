"""Reads a Hugging Face config.json, of either generation of its keys, for a config class, as transformers does."""

from collections.abc import Mapping
from typing import Any

from ...kernels.gemm.activation import ACTIVATIONS
from ...kernels.runtime.rules import Rule, check_rules, quoted
from ..families import FULL, SLIDING, Family
from .fields import FILE_KEYS
from .rotary import RopeReader

HF_ACTIVATIONS = {name: activation for activation, entry in ACTIVATIONS.items() for name in entry.huggingface}
NAMED = "activation", "head_activation"  # fields that hold an activation's name
# Keys of any family whose other values are not built; the last two say how weights are quantized, or are to be.
_EVERYWHERE = dict.fromkeys(("per_layer_config", "quantization_config", "compression_config"))


class Reader:
    """Reads a config.json for a config class.

    A key that is missing counts as transformers' default of it; one that transformers lets be null is None then.
    ValueError for another null.
    """

    def __init__(self, name: str, rules: Mapping[str, Rule], config: Mapping[str, Any], family: Family):
        self.name, self.rules, self.family = name, rules, family
        null = [key for key, value in config.items() if value is None and self._needs_value(key)]
        if null:
            raise ValueError(f"{name}: config.json has {null[0]}=null, which transformers has no meaning for")
        self.config: dict[str, Any] = {**family.defaults, **config}
        for key, *aliases in family.hf_keys.values():
            self.config[key] = next((config[alias] for alias in aliases if alias in config), self.config.get(key))
        read = {**family.defaults, **dict.fromkeys((family.pattern_key or "",))}
        check_rules(self.name, {key: value for key, value in self.config.items() if key in read}, FILE_KEYS)

    def _needs_value(self, key: str) -> bool:
        family = self.family
        named = next((keys[0] for keys in family.hf_keys.values() if key in keys), key)
        return named in family.defaults and named not in family.nullable

    def fields(self) -> dict[str, Any]:
        """Returns the fields that config.json holds and those that the family fixes."""
        family = self.family
        for key, built in (family.not_built | _EVERYWHERE).items():
            if self.config.get(key, built) not in (built, None):
                raise ValueError(f"{self.name}: {key}={quoted(self.config[key])} is not built; only {built!r} is")
        causal = self.config.get("is_causal", True)  # null is false to transformers
        if family.causal and not causal:
            raise ValueError(f"{self.name}: is_causal={quoted(causal)} is not built; only True is")
        values: dict[str, Any] = {name: self.config.get(keys[0]) for name, keys in family.hf_keys.items()}
        for name in (name for name in NAMED if name in values):
            if not isinstance(values[name], str) or values[name] not in HF_ACTIVATIONS:
                raise ValueError(
                    f"{self.name}: {name} {quoted(values[name])} is not built; one of {sorted(HF_ACTIVATIONS)} is"
                )
            values[name] = HF_ACTIVATIONS[values[name]]
        if values.get("attention_dropout", 0.0) is None:  # the one probability that may be null
            values["attention_dropout"] = 0.0
        check_rules(self.name, values, self.rules, {name: keys[0] for name, keys in family.hf_keys.items()})
        if family.rotary and "head_width" not in family.hf_keys:
            self._check_head_dim()
        return values | family.fixed

    def _check_head_dim(self) -> None:
        """Raises ValueError for a head_dim that transformers' classes of the family take for the rotation alone."""
        width = self.config["hidden_size"] // self.config["num_attention_heads"]
        if self.config.get("head_dim") not in (None, width):
            raise ValueError(f"{self.name}: head_dim={quoted(self.config['head_dim'])} is not built; only {width} is")

    def ropes(self) -> RopeReader:
        return RopeReader(self.name, self.config, self.family.rotary_keys, self.config["max_position_embeddings"])

    def pattern(self, layers: int) -> tuple[str, ...]:
        """Returns which layers have a window: what layer_types says, or the family's pattern."""
        family = self.family
        period = self.config.get(family.pattern_key or "", family.full_every)
        first = 0 if family.full_first else 1
        return self._layer_types([SLIDING if (i + first) % period else FULL for i in range(layers)])

    def window(self) -> Any:
        """Returns the window, which may be turned off."""
        return self.config["sliding_window"] if self.config["use_sliding_window"] else None

    def mlp_layers(self, layers: int) -> tuple[int, ...]:
        """Returns the layers with an MLP where others have experts: those listed, and all but every so-many-th."""
        listed, step = set(self.config["mlp_only_layers"] or ()), self.config["decoder_sparse_step"]
        return tuple(i for i in range(layers) if i in listed or (i + 1) % step)

    def windows(self, layers: int) -> dict[str, Any]:
        """Returns the window, and which layers have it."""
        window, bound = self.window(), self.config["max_window_layers"]
        some = range(bound, layers) if window is not None else range(0)
        if self.family.windows_first:
            window = window or None  # transformers writes 0 for none
            some = range(0, bound, 2) if self.config["use_sliding_window"] else range(0)
        types = self._layer_types([SLIDING if i in some else FULL for i in range(layers)])
        return dict(window=window, layer_types=None if window is None and types == (FULL,) * layers else types)

    def _layer_types(self, usual: list[str]) -> tuple[str, ...]:
        types = self.config.get("layer_types")
        types = usual if types is None else types
        check_rules(self.name, dict(layer_types=types), dict(layer_types=self.rules["layer_types"]))
        return tuple(types)
