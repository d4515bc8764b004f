"""What a model is made of, in the field's own words, and how that is written in a Hugging Face config.json.

A key may stand under an older or a newer name; an option that is not built is an error that names it, never a silent
default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..kernels.linear.activation import ACTIVATIONS
from ..kernels.rope_table import rope_table
from ..kernels.runtime.rules import Rule, check_rules, instance, one_of, shown
from .families import CAUSAL, FAMILIES, NO_WINDOW, ONE_WINDOW, WINDOWED_LAYERS, Family
from .fields import FILE_KEYS, FULL, GPT_FIELDS, MAX_WEIGHT, MODEL_FIELDS, SLIDING

ROPE_TYPES = "default", "linear", "dynamic", "llama3", "yarn"
HF_ACTIVATIONS = {name: activation for activation, entry in ACTIVATIONS.items() for name in entry.huggingface}
_NAMED = "activation", "head_activation"  # fields that hold an activation's name
Config = TypeVar("Config", bound="ModelConfig")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What all models share.  ValueError for a value that breaks its field's rule (fields.py).

    ``family`` is an entry of ``FAMILIES``.  Fields that a class's constructor does not take are the same in all of its
    models.
    """

    family: str
    vocab_size: int
    max_positions: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int | None = None  # None: 4 hidden_size
    activation: str = "gelu_tanh"  # one of kernels.linear.activation.ACTIVATIONS
    eps: float = 1e-5
    dropout: float = 0.1  # after attention and after the MLP
    attention_dropout: float = 0.1  # on the attention probabilities
    embedding_dropout: float = 0.1
    init_std: float = 0.02
    tie_embeddings: bool = True
    norm: str = field(default="layer", init=False)
    gated: bool = field(default=False, init=False)
    qkv_bias: bool = field(default=True, init=False)
    out_bias: bool = field(default=True, init=False)
    mlp_bias: bool = field(default=True, init=False)
    qk_norm: bool = field(default=False, init=False)
    type_vocab_size: int = field(default=0, init=False)  # token types
    norm_bias: bool = field(default=True, init=False)  # of a LayerNorm
    post_norm: bool = field(default=False, init=False)
    families: ClassVar[tuple[str, ...]]
    rules: ClassVar[Mapping[str, Rule]] = MODEL_FIELDS

    def __post_init__(self) -> None:
        check_rules(self._name, vars(self), {"family": one_of(self.families), **self.rules})
        if self.ffn_size is None:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        if self.head_size * self.num_heads != self.hidden_size and getattr(self, "head_width", None) is None:
            raise ValueError(
                f"{self._name}: hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}"
            )
        rows = self.vocab_size, self.learned_positions, 3 * self.num_heads * self.head_size, 2 * self.ffn_width
        if max(rows) * self.hidden_size > MAX_WEIGHT:
            raise ValueError(
                f"{self._name}: a weight of {max(rows)} x {self.hidden_size} is more than {MAX_WEIGHT} elements"
            )

    @property
    def hf(self) -> Family:
        """The entry of FAMILIES."""
        return FAMILIES[self.family]

    @property
    def ffn_width(self) -> int:
        """The MLP's width."""
        return self.ffn_size or 4 * self.hidden_size

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads."""
        return self.num_heads

    @property
    def head_size(self) -> int:
        """The width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def learned_positions(self) -> int:
        """The rows of a learned table of positions; 0 where positions are rotary."""
        return self.max_positions

    @property
    def first_position(self) -> int:
        """The position of a sequence's first token."""
        return 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: all positions are seen."""
        return (None,) * self.num_layers

    @classmethod
    def from_hf(cls: type[Config], config: Mapping[str, Any]) -> Config:
        """Returns the config for the contents of a config.json.

        ValueError for a model_type that is not one of ``families``, a missing key or an option that is not built.
        """
        name = config.get("model_type")
        if name not in cls.families:
            choices = repr(*cls.families) if len(cls.families) == 1 else f"one of {', '.join(cls.families)}"
            raise ValueError(f"{cls.__name__}: model_type must be {choices}, got {shown(name)}")
        return cls(family=name, **cls._values(_Reader(cls, config), FAMILIES[name]))

    @classmethod
    def _values(cls, read: "_Reader", family: Family) -> dict[str, Any]:
        return read.fields(family)

    def to_hf(self) -> dict[str, Any]:
        """Returns the contents of a config.json from which transformers builds the same model.

        ValueError for a value that the family's config.json cannot hold.
        """
        family = self.hf
        for key, value in family.fixed.items():
            self._check_fixed(key, value)
        values: dict[str, Any] = {name: getattr(self, name) for name in family.hf_keys}
        values |= {n: ACTIVATIONS[values[n]].huggingface[0] for n in _NAMED if values.get(n) is not None}
        config: dict[str, Any] = {"model_type": self.family}
        for name, (key, *_) in family.hf_keys.items():
            if config.setdefault(key, values[name]) != values[name]:
                first = next(other for other, keys in family.hf_keys.items() if keys[0] == key)
                raise ValueError(
                    f"{self._name}: transformers has one {first} for both ({key}), got {first}={values[first]!r} and"
                    f" {name}={values[name]!r}"
                )
        return config

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_fixed(self, key: str, value: Any) -> None:
        if getattr(self, key) != value:
            raise ValueError(
                f"{self._name}: a {self.family} model of transformers has {key}={value!r}, got {getattr(self, key)!r}"
            )


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """A causal pre-norm decoder: GPT-2, or with ``rope`` one of the Llama family.

    GPT-2 (Radford et al. 2019) has learned positions and LayerNorm; Llama (Touvron et al. 2023, arXiv:2302.13971)
    rotary positions, RMSNorm and a gated MLP.  ``rope`` is transformers' rope_parameters: {"rope_type": "default" |
    "linear" | "dynamic" | "llama3" | "yarn", "rope_theta": ..., ...}; None: learned positions.  ``window``: keys a
    query sees, itself included, in the layers that ``layer_types`` calls sliding (None: all).
    """

    family: str = "gpt2"
    norm: str = "layer"  # any of kernels.norm.KINDS
    gated: bool = False  # act(gate) * up in the MLP
    num_kv_heads: int | None = None  # None: num_heads
    head_width: int | None = None  # None: hidden_size / num_heads
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False  # an RMSNorm over the width of every query and key head
    rope: Mapping[str, Any] | None = field(default=None, hash=False)
    window: int | None = None
    layer_types: tuple[str, ...] | None = None
    families: ClassVar[tuple[str, ...]] = CAUSAL
    rules: ClassVar[Mapping[str, Rule]] = GPT_FIELDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is not None:
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
            if len(self.layer_types) != self.num_layers or any(t not in (FULL, SLIDING) for t in self.layer_types):
                raise ValueError(
                    f"GPTConfig: layer_types must be {self.num_layers} of {FULL} and {SLIDING}, got"
                    f" {shown(self.layer_types)}"
                )
            if SLIDING in self.layer_types and self.window is None:
                raise ValueError(f"GPTConfig: layer_types has {SLIDING}, and window is None")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"GPTConfig: num_heads={self.num_heads} is not divisible by num_kv_heads={self.kv_heads}")
        if self.rope is not None:
            kind, share = self.rope.get("rope_type", "default"), self.rope.get("partial_rotary_factor")
            if kind not in ROPE_TYPES:
                raise ValueError(f"GPTConfig: rope_type={shown(kind)} is not built; one of {', '.join(ROPE_TYPES)} is")
            if share not in (None, 1):  # which transformers' classes of these families treat differently
                raise ValueError(f"GPTConfig: partial_rotary_factor={shown(share)} is not built; only 1 is")
            rope_table(self.head_size, 1, **self.rope_arguments)  # names what is missing, wrong or not built

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads if self.head_width is None else self.head_width

    @property
    def learned_positions(self) -> int:
        return self.max_positions if self.rope is None else 0

    @property
    def rope_arguments(self) -> dict[str, Any]:
        """The arguments of :func:`tpfuse.kernels.rope_table.rope_table` beside head width and length."""
        return dict(scaling=dict(self.rope or {}), max_position_embeddings=self.max_positions)

    @property
    def stretched(self) -> bool:
        """Whether the tables of rotary positions depend on the length of a call: dynamic ones do past the length that
        the model was trained for, which no file of transformers lets a call reach."""
        rope = self.rope or {}
        trained: int = rope.get("max_position_embeddings") or self.max_positions
        return rope.get("rope_type") == "dynamic" and trained < self.max_positions

    @property
    def windows(self) -> tuple[int | None, ...]:
        types = self.layer_types or (FULL if self.window is None else SLIDING,) * self.num_layers
        return tuple(self.window if kind == SLIDING else None for kind in types)

    @classmethod
    def _values(cls, read: "_Reader", family: Family) -> dict[str, Any]:
        values = super()._values(read, family)
        if family.rotary:
            values["rope"] = read.rope()
        if family.windows == WINDOWED_LAYERS:
            values |= read.windows(values["num_layers"])
        return values

    def to_hf(self) -> dict[str, Any]:
        family, config = self.hf, super().to_hf()
        if "num_kv_heads" not in family.hf_keys:
            self._check_fixed("kv_heads", self.num_heads)
            self._check_fixed("head_size", self.hidden_size // self.num_heads)
        if family.rotary:
            if self.rope is None:
                raise ValueError(
                    f"GPTConfig: a {self.family} model of transformers has rotary positions, got rope=None"
                )
            config |= dict(num_key_value_heads=self.kv_heads, head_dim=self.head_size)
            config |= dict(rope_parameters=dict(self.rope), rope_theta=self.rope["rope_theta"])
            if self.rope.get("rope_type", "default") != "default":
                config["rope_scaling"] = {k: v for k, v in self.rope.items() if k != "rope_theta"}
        if family.windows == WINDOWED_LAYERS:
            types = [FULL if w is None else SLIDING for w in self.windows]
            config |= dict(use_sliding_window=self.window is not None, sliding_window=self.window, layer_types=types)
            config["max_window_layers"] = types.index(SLIDING) if SLIDING in types else self.num_layers
        elif family.windows == NO_WINDOW and self.window is not None:
            raise ValueError(
                f"GPTConfig: a {self.family} model of transformers has no sliding window, got window={self.window}"
            )
        elif family.windows == ONE_WINDOW and self.window is not None and None in self.windows:
            raise ValueError(
                f"GPTConfig: a {self.family} model of transformers has one window for all layers, got layer_types"
            )
        return config


class _Reader:
    """Reads a config.json for a config class."""

    def __init__(self, made: type[ModelConfig], config: Mapping[str, Any]):
        self.name, self.rules, self.config = made.__name__, made.rules, config
        check_rules(self.name, config, FILE_KEYS)

    def fields(self, family: Family) -> dict[str, Any]:
        """Returns the fields that config.json holds and those that the family fixes."""
        for key, built in family.not_built.items():
            if self.config.get(key, built) not in (built, None):
                raise ValueError(f"{self.name}: {key}={shown(self.config[key])} is not built; only {built!r} is")
        values: dict[str, Any] = {}
        for name, keys in family.hf_keys.items():
            values[name] = self.optional(*keys) if name in family.hf_optional else self.required(*keys)
            if values[name] is None:
                values[name] = family.hf_optional[name]
        for name in (n for n in _NAMED if n in values):
            if not isinstance(values[name], str) or values[name] not in HF_ACTIVATIONS:
                raise ValueError(
                    f"{self.name}: {name} {shown(values[name])} is not built; one of {sorted(HF_ACTIVATIONS)} is"
                )
            values[name] = HF_ACTIVATIONS[values[name]]
        values = {name: value for name, value in values.items() if value is not None}
        check_rules(self.name, values, self.rules, {name: self.key_of(*keys) for name, keys in family.hf_keys.items()})
        return values | family.fixed

    def rope(self) -> dict[str, Any]:
        """Returns rope_parameters, or what older files have: rope_theta, and rope_scaling with "type"."""
        key = self.key_of("rope_parameters", "rope_scaling")
        given = self.config.get(key) or {}
        check_rules(self.name, {key: given}, {key: instance("an object", Mapping)})
        rope = dict(given)
        if "type" in rope:
            rope.setdefault("rope_type", rope.pop("type"))
        rope.setdefault("rope_type", "default")
        if "rope_theta" not in rope:
            if self.optional("rope_theta") is None:
                raise ValueError(f"{self.name}: config.json has neither rope_parameters.rope_theta nor rope_theta")
            rope["rope_theta"] = self.config["rope_theta"]
        for key in ("partial_rotary_factor", "original_max_position_embeddings"):
            if self.optional(key) is not None:
                rope.setdefault(key, self.config[key])
        return rope

    def windows(self, layers: int) -> dict[str, Any]:
        """Returns the window, and which layers have it."""
        if not self.config.get("use_sliding_window", False):
            return dict(window=None, layer_types=None)
        window, types = self.required("sliding_window"), self.optional("layer_types")
        if types is None:
            first = self.required("max_window_layers")
            types = [SLIDING if i >= first else FULL for i in range(layers)]
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
