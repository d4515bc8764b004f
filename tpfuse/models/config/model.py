"""The part of a configuration that all models share, and its form in a Hugging Face config.json.

A key may stand under an older or a newer name; an option that is not built is an error that names it, never a silent
default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from ...kernels.gemm.activation import ACTIVATIONS, GATED
from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import Rule, check_rules, one_of, quoted
from ...layers.shapes import AttentionShape, MLPShape, MoEShape, NormShape, check_heads
from ..families import FAMILIES, FULL, SLIDING, Family
from .fields import MAX_WEIGHT, MODEL_FIELDS
from .reader import NAMED, Reader
from .rotary import TRAINED, check_rope

# Fields that are written by rules of their own.
WRITTEN = {"family", "num_kv_heads", "head_width", "rope", "local_rope", "window", "layer_types", "mlp_layers"}
Config = TypeVar("Config", bound="ModelConfig")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields that all models share.  ValueError for a value that breaks its field's rule (fields.py).

    ``family`` is an entry of ``FAMILIES``.  ``rope`` is transformers' rope_parameters; None: learned positions.
    ``window``: keys that a query sees, in the layers that ``layer_types`` calls sliding (None: all); these have the
    rotary positions of ``local_rope``, where that is given.  Fields that a class's constructor does not take are the
    same in all of its models.
    """

    family: str
    vocab_size: int
    max_positions: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int | None = None  # None: 4 hidden_size
    activation: str = "gelu_tanh"  # one of kernels.gemm.activation.ACTIVATIONS
    eps: float = 1e-5
    dropout: float = 0.1  # after attention and after the MLP
    attention_dropout: float = 0.1  # on the attention probabilities
    embedding_dropout: float = 0.1
    init_std: float = 0.02
    tie_embeddings: bool = True
    rope: Mapping[str, Any] | None = field(default=None, hash=False)
    local_rope: Mapping[str, Any] | None = field(default=None, hash=False)
    window: int | None = None
    layer_types: tuple[str, ...] | None = None
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
    causal: ClassVar[bool]
    families: ClassVar[tuple[str, ...]]
    rules: ClassVar[Mapping[str, Rule]] = MODEL_FIELDS

    def __post_init__(self) -> None:
        check_rules(self._name, vars(self), {"family": one_of(self.families), **self.rules})
        check(
            not self.gated or self.activation in GATED.values(),
            f"{self._name}: activation must be one of {', '.join(GATED.values())}, which gated MLPs have, got"
            f" {self.activation!r}",
        )
        if self.ffn_size is None:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        width = getattr(self, "head_width", None)
        check_heads(self._name, self.hidden_size, self.num_heads, self.kv_heads, head_width=width)
        rows = self.vocab_size, self.learned_positions, 3 * self.num_heads * self.head_size, 2 * self.ffn_width
        if max(rows) * self.hidden_size > MAX_WEIGHT:
            raise ValueError(
                f"{self._name}: a weight of {max(rows)} x {self.hidden_size} is more than {MAX_WEIGHT} elements"
            )
        if self.layer_types is not None:
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
            if len(self.layer_types) != self.num_layers or any(t not in (FULL, SLIDING) for t in self.layer_types):
                kinds = f"{self.num_layers} of {FULL} and {SLIDING}"
                raise ValueError(f"{self._name}: layer_types must be {kinds}, got {quoted(self.layer_types)}")
            if SLIDING in self.layer_types and self.window is None:
                raise ValueError(f"{self._name}: layer_types has {SLIDING}, and window is None")

    @property
    def hf(self) -> Family:
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
        return self.hidden_size // self.num_heads

    @property
    def learned_positions(self) -> int:
        """The rows of a learned table of positions; 0 where positions are rotary."""
        return self.max_positions if self.rope is None else 0

    @property
    def most_positions(self) -> int | None:
        """The positions that a call may have; None: any number, where they are rotary."""
        return self.max_positions if self.rope is None else None

    @property
    def position_bound(self) -> int:
        """The bound of position_ids: rotary ones are rows of a table, which has to fit in memory."""
        return self.most_positions or 1 << 24

    @property
    def wiring(self) -> str:
        """The order of a block's steps, an entry of WIRINGS."""
        return "post" if self.post_norm else "parallel" if self.parallel_residual else "pre"

    @property
    def norm_shape(self) -> NormShape:
        """The norms of blocks, and the final one."""
        return NormShape(self.norm, self.eps, self.norm_bias)

    def mlp_shape(self, layer: int) -> MLPShape | MoEShape:
        return MLPShape(self.hidden_size, self.ffn_width, self.activation, self.gated, bias=self.mlp_bias)

    def attention_shape(self, layer: int) -> AttentionShape:
        return AttentionShape(
            self.hidden_size, self.num_heads, self.kv_heads, self.head_size, causal=self.causal,
            window=self.windows[layer], qk_norm=self.qk_norm, eps=self.eps, dropout=self.attention_dropout,
            bias=self.qkv_bias, out_bias=self.out_bias,
        )  # fmt: skip

    @property
    def ropes(self) -> list[Mapping[str, Any]]:
        """The rotary positions of layers without a window and with one; one where they are the same, or none."""
        return [rope for rope in (self.rope, self.local_rope) if rope is not None]

    @property
    def stretches_past(self) -> int | None:
        """The length past which each length of a call has its own tables of rotary positions; None: none has."""
        rope = self.rope or {}
        trained = rope.get("max_position_embeddings") or self.max_positions
        return trained if rope.get("rope_type") == "dynamic" else None

    @property
    def switches_at(self) -> int | None:
        """The length past which all calls have other tables of rotary positions; None: none has."""
        rope = self.rope or {}
        return rope.get(TRAINED) or self.max_positions if rope.get("rope_type") == "longrope" else None

    @property
    def first_position(self) -> int:
        """The position of a sequence's first token."""
        return 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: all positions are seen."""
        types = self.layer_types or (FULL if self.window is None else SLIDING,) * self.num_layers
        return tuple(self.window if kind == SLIDING else None for kind in types)

    @classmethod
    def from_hf(cls: type[Config], config: Mapping[str, Any]) -> Config:
        """Returns the config for the contents of a config.json.

        A missing key counts as transformers' default of it.  ValueError for a model_type that is not one of
        ``families``, a null that transformers does not take, or an option that is not built.
        """
        name = config.get("model_type")
        if name not in cls.families:
            choices = repr(*cls.families) if len(cls.families) == 1 else f"one of {', '.join(cls.families)}"
            raise ValueError(f"{cls.__name__}: model_type must be {choices}, got {quoted(name)}")
        return cls(family=name, **cls._values(Reader(cls.__name__, cls.rules, config, FAMILIES[name])))

    @classmethod
    def _values(cls, read: Reader) -> dict[str, Any]:
        return read.fields()

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
            names, usual = ACTIVATIONS[values[name]].huggingface, family.defaults.get(family.hf_keys[name][0])
            values[name] = usual if usual in names else names[0]
        config: dict[str, Any] = {"model_type": self.family}
        for name, (key, *_) in family.hf_keys.items():
            if config.setdefault(key, values[name]) != values[name]:
                twin = next(name for name, keys in family.hf_keys.items() if keys[0] == key)
                raise ValueError(
                    f"{self._name}: transformers has one {twin} for both ({key}), got {twin}={values[twin]!r} and"
                    f" {name}={values[name]!r}"
                )
        return config

    def _check_ropes(self) -> None:
        for rope in self.ropes:
            keys, head_size, most = self.hf.rotary_keys, self.head_size, self.max_positions
            check_rope(self._name, rope, keys, head_size=head_size, max_positions=most)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_fixed(self, key: str, value: Any) -> None:
        if getattr(self, key) != value:
            raise ValueError(
                f"{self._name}: a {self.family} model of transformers has {key}={value!r}, got {getattr(self, key)!r}"
            )
