"""What a model is made of, in the field's own words, and how that is written in a Hugging Face config.json.

A key may stand under an older or a newer name; an option that is not built is an error that names it, never a silent
default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from ...kernels.gemm.activation import ACTIVATIONS
from ...kernels.runtime.rules import Rule, check_rules, one_of, shown
from ..families import CAUSAL, FAMILIES, NO_WINDOW, ONE_WINDOW, PATTERNED_LAYERS, WINDOWED_LAYERS, Family
from .fields import FULL, GPT_FIELDS, MAX_WEIGHT, MODEL_FIELDS, SLIDING
from .reader import HF_ACTIVATIONS as HF_ACTIVATIONS
from .reader import NAMED, Reader
from .rotary import check_rope, read_rope, stretched, switches_at, written_rope

# Fields that are written by rules of their own.
WRITTEN = {"family", "num_kv_heads", "head_width", "rope", "local_rope", "window", "layer_types"}
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
    parallel_residual: bool = field(default=False, init=False)
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
        return cls(family=name, **cls._values(Reader(cls.__name__, cls.rules, config), FAMILIES[name]))

    @classmethod
    def _values(cls, read: Reader, family: Family) -> dict[str, Any]:
        return read.fields(family)

    def to_hf(self) -> dict[str, Any]:
        """Returns the contents of a config.json from which transformers builds the same model.

        ValueError for a value that the family's config.json cannot hold.
        """
        family = self.hf
        defaults = {f.name: f.default for f in fields(self) if f.name not in WRITTEN | family.hf_keys.keys()}
        for key, value in (defaults | family.fixed).items():
            self._check_fixed(key, value)
        values: dict[str, Any] = {name: getattr(self, name) for name in family.hf_keys}
        for name in (name for name in NAMED if values.get(name) is not None):
            names, usual = ACTIVATIONS[values[name]].huggingface, family.hf_optional.get(name)
            values[name] = usual if usual in names else names[0]
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
    "linear" | "dynamic" | "llama3" | "yarn" | "longrope", "rope_theta": ..., ...}, of which a family may have some
    only; None: learned positions.  ``window``: keys a query sees, itself included, in the layers that ``layer_types``
    calls sliding (None: all); these have the rotary positions of ``local_rope``, where that is given.
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
    parallel_residual: bool = False  # attention and MLP read the same rows
    pre_norm: bool = True  # a norm before attention and before the MLP
    branch_norm: bool = False  # a norm behind each, before the residual is added
    qk_norm_kind: str = "rms"
    qk_norm_all: bool = False  # it is over all query heads together, and over all key heads
    attention_scalar: float | None = None  # scores are divided by its root; None: by that of a head's width
    attention_softcap: float | None = None  # bounds the scores
    logit_softcap: float | None = None  # bounds the logits
    scaled_embedding: bool = False  # the embedding's rows are multiplied by the root of hidden_size
    local_rope: Mapping[str, Any] | None = field(default=None, hash=False)
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
            sizes = dict(head_size=self.head_size, max_positions=self.max_positions)
            for rope in (self.rope, self.local_rope):
                if rope is not None:
                    check_rope("GPTConfig", rope, self.hf.rotary_keys, **sizes)
        if not (self.pre_norm or self.branch_norm):
            raise ValueError("GPTConfig: pre_norm=False needs branch_norm=True")
        if self.local_rope is not None:
            kinds = [(rope or {}).get("rope_type", "default") for rope in (self.rope, self.local_rope)]
            if self.rope is None or not {"dynamic", "longrope"}.isdisjoint(kinds):
                given = "rope=None" if self.rope is None else f"rope_type {shown(kinds[0])} and {shown(kinds[1])}"
                raise ValueError(
                    f"GPTConfig: local_rope needs rope, and longrope and dynamic ones are not built, got {given}"
                )

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
        """The arguments of :func:`tpfuse.kernels.rotary.table.rope_table` beside head width and length."""
        return dict(scaling=dict(self.rope or {}), max_position_embeddings=self.max_positions)

    @property
    def rotations(self) -> list[dict[str, Any]]:
        """The arguments of each table of rotary positions: of all layers, or of those without a window and those with
        one."""
        local = [] if self.local_rope is None else [self.rope_arguments | dict(scaling=dict(self.local_rope))]
        return [self.rope_arguments, *local]

    @property
    def attention_scale(self) -> float | None:
        """What scores are multiplied with; None: head_size ** -0.5."""
        return None if self.attention_scalar is None else self.attention_scalar**-0.5

    @property
    def stretched(self) -> bool:
        """Whether the tables of rotary positions depend on the length of a call."""
        return stretched(self.rope or {}, self.max_positions)

    @property
    def switches_at(self) -> int | None:
        """The length past which a call has other tables of rotary positions; None: all have the same."""
        return switches_at(self.rope or {}, self.max_positions)

    @property
    def windows(self) -> tuple[int | None, ...]:
        types = self.layer_types or (FULL if self.window is None else SLIDING,) * self.num_layers
        return tuple(self.window if kind == SLIDING else None for kind in types)

    @classmethod
    def _values(cls, read: Reader, family: Family) -> dict[str, Any]:
        values = super()._values(read, family)
        if family.thetas is not None:
            values |= read.ropes(family)
        elif family.rotary:
            values["rope"] = read_rope(read.name, read.config, family.rotary_keys)
        if family.windows == WINDOWED_LAYERS:
            values |= read.windows(values["num_layers"])
        elif family.windows == PATTERNED_LAYERS:
            values["layer_types"] = read.pattern(family, values["num_layers"])
        return values

    def to_hf(self) -> dict[str, Any]:
        family, config = self.hf, super().to_hf()
        if "parallel_residual" not in family.hf_keys:
            self._check_fixed("parallel_residual", False)
        if "num_kv_heads" not in family.hf_keys:
            self._check_fixed("kv_heads", self.num_heads)
            self._check_fixed("head_size", self.hidden_size // self.num_heads)
        if family.rotary:
            if self.rope is None:
                raise ValueError(
                    f"GPTConfig: a {self.family} model of transformers has rotary positions, got rope=None"
                )
            if "num_kv_heads" in family.hf_keys:
                config |= dict(num_key_value_heads=self.kv_heads, head_dim=self.head_size)
            config |= written_rope(self.rope, family.rotary_keys, self.max_positions)
            local = dict(self.local_rope or self.rope)
            if family.thetas is not None:
                config["rope_parameters"] = {FULL: dict(self.rope), SLIDING: local}
                config["rope_local_base_freq"] = local["rope_theta"]
            elif local != dict(self.rope):
                self._check_fixed("local_rope", None)
        if "attention_scalar" in family.hf_keys:
            scalar = self.head_size if self.attention_scalar is None else self.attention_scalar
            key = family.hf_keys["attention_scalar"][0]
            config[key] = int(scalar) if scalar == int(scalar) else scalar  # transformers takes integers
        if family.windows == PATTERNED_LAYERS:
            config["layer_types"] = [FULL if w is None else SLIDING for w in self.windows]
            config["sliding_window"] = self.window or self.max_positions  # transformers takes no null, used or not
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
