"""What a model is made of, in the field's own words, and how that is written in a Hugging Face config.json.

A key may stand under an older or a newer name; an option that is not built is an error that names it, never a default in silence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..kernels.rope import rope_table

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What GPT and BERT share.  Sizes are plain integers, probabilities floats in [0, 1)."""

    vocab_size: int
    max_positions: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int | None = None  # None: 4 hidden_size
    activation: str = "gelu_tanh"  # "gelu" (erf), "gelu_tanh", "relu" or "silu"
    eps: float = 1e-5
    dropout: float = 0.1  # after attention and after the MLP
    attention_dropout: float = 0.1  # on the attention probabilities
    embedding_dropout: float = 0.1
    init_std: float = 0.02
    tie_embeddings: bool = True

    def __post_init__(self):
        if self.ffn_size is None:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        name = type(self).__name__
        for key in ("vocab_size", "max_positions", "hidden_size", "num_layers", "num_heads", "ffn_size"):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {key} must be a positive integer, got {value!r}")
        for key in ("dropout", "attention_dropout", "embedding_dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{name}: {key} must lie in [0, 1), got {getattr(self, key)!r}")
        if getattr(self, "head_width", None) is None and self.hidden_size % self.num_heads:
            raise ValueError(f"{name}: hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}")
        if self.activation not in ACTIVATIONS.values():
            raise ValueError(f"{name}: activation must be one of {sorted(set(ACTIVATIONS.values()))}, got {self.activation!r}")


class Family(NamedTuple):
    """What a model_type fixes, and how its config.json names the rest."""

    architecture: str  # the class of transformers with a language-model head
    hf_keys: dict[str, tuple[str, ...]]
    fixed: dict[str, Any]  # fields that the family decides
    hf_optional: frozenset[str] = frozenset()  # absent: the field's own default, which is transformers' too
    not_built: dict[str, Any] = {}


_GPT2 = Family(
    architecture="GPT2LMHeadModel",
    hf_keys=dict(
        vocab_size=("vocab_size",),
        max_positions=("n_positions", "max_position_embeddings", "n_ctx"),
        hidden_size=("n_embd", "hidden_size"),
        num_layers=("n_layer", "num_hidden_layers"),
        num_heads=("n_head", "num_attention_heads"),
        ffn_size=("n_inner", "intermediate_size"),
        activation=("activation_function", "hidden_act"),
        eps=("layer_norm_epsilon", "layer_norm_eps"),
        dropout=("resid_pdrop",),
        attention_dropout=("attn_pdrop",),
        embedding_dropout=("embd_pdrop",),
        init_std=("initializer_range",),
        tie_embeddings=("tie_word_embeddings",),
    ),
    fixed=dict(norm="layer", gated=False),
    hf_optional=frozenset({"ffn_size", "tie_embeddings", "init_std"}),
    not_built=dict(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False, add_cross_attention=False
    ),
)


def _llama_like(architecture: str, keys: dict[str, tuple[str, ...]], optional: set[str], **fixed: Any) -> Family:
    shared = dict(
        vocab_size=("vocab_size",),
        max_positions=("max_position_embeddings",),
        hidden_size=("hidden_size",),
        num_layers=("num_hidden_layers",),
        num_heads=("num_attention_heads",),
        num_kv_heads=("num_key_value_heads",),
        head_width=("head_dim",),
        ffn_size=("intermediate_size",),
        activation=("hidden_act",),
        eps=("rms_norm_eps",),
        attention_dropout=("attention_dropout",),
        init_std=("initializer_range",),
        tie_embeddings=("tie_word_embeddings",),
    )
    plain = dict(norm="rms", gated=True, dropout=0.0, embedding_dropout=0.0)
    known = {"num_kv_heads", "head_width", "tie_embeddings", "init_std", "attention_dropout"}
    return Family(architecture, shared | keys, plain | fixed, frozenset(known | optional))


_BIASES = dict(qkv_bias=("attention_bias",), out_bias=("attention_bias",))
_NO_BIAS = dict(qkv_bias=False, out_bias=False, mlp_bias=False)
FAMILIES = {
    "gpt2": _GPT2,
    "llama": _llama_like("LlamaForCausalLM", _BIASES | dict(mlp_bias=("mlp_bias",)), {"qkv_bias", "out_bias", "mlp_bias"}),
    "mistral": _llama_like("MistralForCausalLM", dict(window=("sliding_window",)), {"window"}, **_NO_BIAS),
    "qwen2": _llama_like("Qwen2ForCausalLM", {}, set(), **_NO_BIAS | dict(qkv_bias=True)),
    "qwen3": _llama_like("Qwen3ForCausalLM", _BIASES, {"qkv_bias", "out_bias"}, mlp_bias=False, qk_norm=True),
}
ROPE_TYPES = "default", "linear", "dynamic", "llama3", "yarn"
FULL, SLIDING = "full_attention", "sliding_attention"  # as transformers' layer_types has them


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """A causal pre-norm decoder: GPT-2 (Radford et al. 2019: learned positions, LayerNorm) or, with ``rope``, one of the Llama family
    (Touvron et al. 2023, arXiv:2302.13971: rotary positions, RMSNorm, gated MLP).

    ``rope`` is transformers' rope_parameters: {"rope_type": "default" | "linear" | "dynamic" | "llama3" | "yarn", "rope_theta": ..., ...};
    None: learned positions.  ``window``: keys a query sees, itself included, in the layers that ``layer_types`` calls sliding (None: all).
    """

    family: str = "gpt2"
    norm: str = "layer"  # or "rms"
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

    def __post_init__(self):
        check_in = lambda key, values: _check_in("GPTConfig", key, getattr(self, key), values)  # noqa: E731
        check_in("family", tuple(FAMILIES))
        check_in("norm", ("layer", "rms"))
        for key in ("num_kv_heads", "head_width", "window"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"GPTConfig: {key} must be a positive integer or None, got {value!r}")
        if self.layer_types is not None:
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
            if len(self.layer_types) != self.num_layers or not set(self.layer_types) <= {FULL, SLIDING}:
                raise ValueError(f"GPTConfig: layer_types must be {self.num_layers} of {FULL} and {SLIDING}, got {self.layer_types}")
            if SLIDING in self.layer_types and self.window is None:
                raise ValueError(f"GPTConfig: layer_types has {SLIDING}, and window is None")
        super().__post_init__()
        if self.num_heads % self.kv_heads:
            raise ValueError(f"GPTConfig: num_heads={self.num_heads} is not divisible by num_kv_heads={self.kv_heads}")
        if self.rope is not None:
            kind, share = self.rope.get("rope_type", "default"), self.rope.get("partial_rotary_factor")
            if kind not in ROPE_TYPES:
                raise ValueError(f"GPTConfig: rope_type={kind!r} is not built; one of {', '.join(ROPE_TYPES)} is")
            if share not in (None, 1):  # which transformers' classes of these families do not take account of alike
                raise ValueError(f"GPTConfig: partial_rotary_factor={share} is not built; only 1 is")
            rope_table(self.head_size, 1, **self.rope_arguments)  # names what is missing or not built

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads if self.head_width is None else self.head_width

    @property
    def rope_arguments(self) -> dict[str, Any]:
        """Of :func:`rope_table`."""
        return dict(scaling=dict(self.rope), max_position_embeddings=self.max_positions)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        types = self.layer_types or (FULL if self.window is None else SLIDING,) * self.num_layers
        return tuple(self.window if kind == SLIDING else None for kind in types)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "GPTConfig":
        """From the contents of a config.json of any of ``FAMILIES``.  ValueError for another model_type, a missing key or an option that
        is not built."""
        name = config.get("model_type")
        if name not in FAMILIES:
            raise ValueError(f"GPTConfig: model_type must be one of {', '.join(FAMILIES)}, got {name!r}")
        family = FAMILIES[name]
        values = _read(cls, config, family.hf_keys, family.hf_optional, family.not_built) | family.fixed
        if name != "gpt2":
            values["rope"] = _rope_parameters(config)
        if name in ("qwen2", "qwen3"):
            values |= _qwen_windows(cls, config, values["num_layers"])
        if name == "qwen3":  # transformers' own default, not hidden_size / num_heads
            values.setdefault("head_width", 128)
        if name != "gpt2":
            values = dict(attention_dropout=0.0, tie_embeddings=False, qkv_bias=False, out_bias=False, mlp_bias=False) | values
        return cls(family=name, **values)

    def to_hf(self) -> dict[str, Any]:
        family = FAMILIES[self.family]
        fixed = family.fixed
        if self.family == "gpt2":
            fixed = fixed | dict(
                kv_heads=self.num_heads, head_size=self.hidden_size // self.num_heads, rope=None, window=None, qk_norm=False
            )
            fixed |= dict(qkv_bias=True, out_bias=True, mlp_bias=True)
        for key, value in fixed.items():
            if getattr(self, key) != value:
                raise ValueError(f"GPTConfig: a {self.family} model of transformers has {key}={value!r}, got {getattr(self, key)!r}")
        config = _written(self, family.hf_keys) | {"model_type": self.family}
        if self.family == "gpt2":
            return config
        if self.rope is None:
            raise ValueError(f"GPTConfig: a {self.family} model of transformers has rotary positions, got rope=None")
        if "attention_bias" in config and self.qkv_bias != self.out_bias:
            raise ValueError(f"GPTConfig: transformers has one attention_bias for both {self.qkv_bias=} and {self.out_bias=}")
        config |= dict(num_key_value_heads=self.kv_heads, head_dim=self.head_size)
        config |= dict(rope_parameters=dict(self.rope), rope_theta=self.rope["rope_theta"])
        if self.rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {k: v for k, v in self.rope.items() if k != "rope_theta"}
        if self.family in ("qwen2", "qwen3"):
            types = [FULL if w is None else SLIDING for w in self.windows]
            config |= dict(use_sliding_window=self.window is not None, sliding_window=self.window, layer_types=types)
            config["max_window_layers"] = types.index(SLIDING) if SLIDING in types else self.num_layers
        elif self.family == "llama" and self.window is not None:
            raise ValueError(f"GPTConfig: a llama model of transformers has no sliding window, got window={self.window}")
        elif None in self.windows and self.window is not None:
            raise ValueError("GPTConfig: a mistral model of transformers has one window for all layers, got layer_types")
        return config


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' rope_parameters, or what older files have in its place: rope_theta, and rope_scaling with "type"."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    rope.setdefault("rope_type", "default")
    if "rope_theta" not in rope:
        if config.get("rope_theta") is None:
            raise ValueError("GPTConfig: config.json has neither rope_parameters.rope_theta nor rope_theta")
        rope["rope_theta"] = config["rope_theta"]
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if config.get(key) is not None:
            rope.setdefault(key, config[key])
    return rope


def _qwen_windows(cls: type, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    if not config.get("use_sliding_window", False):
        return dict(window=None, layer_types=None)
    get = _Reader(cls, config)
    window, types = get("sliding_window"), config.get("layer_types")
    if types is None:
        first = get("max_window_layers")
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    return dict(window=window, layer_types=tuple(types))


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """A BERT configuration (Devlin et al. 2018, arXiv:1810.04805): post-norm, learned positions and token types, bidirectional."""

    activation: str = "gelu"
    eps: float = 1e-12
    type_vocab_size: int = 2
    pad_token_id: int | None = 0

    model_type = "bert"
    hf_keys = dict(
        vocab_size=("vocab_size",),
        max_positions=("max_position_embeddings",),
        hidden_size=("hidden_size",),
        num_layers=("num_hidden_layers",),
        num_heads=("num_attention_heads",),
        ffn_size=("intermediate_size",),
        activation=("hidden_act",),
        eps=("layer_norm_eps",),
        dropout=("hidden_dropout_prob",),
        attention_dropout=("attention_probs_dropout_prob",),
        embedding_dropout=("hidden_dropout_prob",),
        init_std=("initializer_range",),
        tie_embeddings=("tie_word_embeddings",),
        type_vocab_size=("type_vocab_size",),
        pad_token_id=("pad_token_id",),
    )
    hf_optional = {"tie_embeddings", "init_std", "pad_token_id"}
    not_built = dict(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "BertConfig":
        """From the contents of a config.json.  ValueError for another model_type, a missing key or an option that is not built."""
        if config.get("model_type") != cls.model_type:
            raise ValueError(f"BertConfig: model_type must be {cls.model_type!r}, got {config.get('model_type')!r}")
        return cls(**_read(cls, config, cls.hf_keys, cls.hf_optional, cls.not_built))

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json from which transformers builds the same model."""
        if self.embedding_dropout != self.dropout:
            raise ValueError(f"BertConfig: transformers has one dropout for both {self.dropout=} and {self.embedding_dropout=}")
        return _written(self, self.hf_keys) | {"model_type": self.model_type}


def _check_in(name: str, key: str, value: Any, values: Iterable[Any]) -> None:
    if value not in values:
        raise ValueError(f"{name}: {key} must be one of {', '.join(map(str, values))}, got {value!r}")


def _read(cls: type, config: Mapping[str, Any], keys: dict, optional: Iterable[str], not_built: dict[str, Any]) -> dict[str, Any]:
    """The fields that a config.json holds."""
    for key, built in not_built.items():
        if config.get(key, built) not in (built, None):
            raise ValueError(f"{cls.__name__}: {key}={config[key]!r} is not built; only {built!r} is")
    get = _Reader(cls, config)
    values = {field: get.optional(*names) if field in optional else get(*names) for field, names in keys.items()}
    if values["activation"] not in ACTIVATIONS:
        raise ValueError(f"{cls.__name__}: activation {values['activation']!r} is not built; one of {sorted(ACTIVATIONS)} is")
    values["activation"] = ACTIVATIONS[values["activation"]]
    return {k: v for k, v in values.items() if v is not None}


def _written(config: ModelConfig, keys: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """The fields under the names that config.json has for them."""
    hf_activation = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
    values = {field: getattr(config, field) for field in keys} | {"activation": hf_activation[config.activation]}
    return {names[0]: values[field] for field, names in keys.items()}


class _Reader:
    def __init__(self, cls: type, config: Mapping[str, Any]):
        self.name, self.config = cls.__name__, config

    def optional(self, *names: str) -> Any:
        return next((self.config[n] for n in names if self.config.get(n) is not None), None)

    def __call__(self, *names: str) -> Any:
        value = self.optional(*names)
        if value is None:
            raise ValueError(f"{self.name}: config.json has no {' or '.join(names)}")
        return value
