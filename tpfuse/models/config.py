"""What a model is made of, in the field's own words, and how that is written in a Hugging Face config.json.

A key may stand under an older or a newer name; an option that is not built is an error that names it, never a default in silence.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
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
    activation: str = "gelu_tanh"  # "gelu" (erf), "gelu_tanh" or "relu"
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
        if self.hidden_size % self.num_heads:
            raise ValueError(f"{name}: hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}")
        if self.activation not in ACTIVATIONS.values():
            raise ValueError(f"{name}: activation must be one of {sorted(set(ACTIVATIONS.values()))}, got {self.activation!r}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """From the contents of a config.json.  ValueError for another model_type, a missing key or an option that is not built."""
        get = _Reader(cls, config)
        if get.optional("model_type") != cls.model_type:
            raise ValueError(f"{cls.__name__}: model_type must be {cls.model_type!r}, got {config.get('model_type')!r}")
        for key, built in cls.not_built.items():
            if config.get(key, built) not in (built, None):
                raise ValueError(f"{cls.__name__}: {key}={config[key]!r} is not built; only {built!r} is")
        values = {}
        for field in fields(cls):
            if field.name in cls.hf_keys:
                names = cls.hf_keys[field.name]
                values[field.name] = get.optional(*names) if field.name in cls.hf_optional else get(*names)
        if values["activation"] not in ACTIVATIONS:
            raise ValueError(f"{cls.__name__}: activation {values['activation']!r} is not built; one of {sorted(ACTIVATIONS)} is")
        values["activation"] = ACTIVATIONS[values["activation"]]
        return cls(**{k: v for k, v in values.items() if v is not None})

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json from which transformers builds the same model."""
        written = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
        values = asdict(self) | {"activation": written[self.activation]}
        return {"model_type": self.model_type} | {names[0]: values[field] for field, names in self.hf_keys.items()}


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """A GPT-2 configuration (Radford et al. 2019): pre-norm, learned positions, causal."""

    model_type = "gpt2"
    hf_keys = dict(
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
    )
    hf_optional = {"ffn_size", "tie_embeddings", "init_std"}
    not_built = dict(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False, add_cross_attention=False
    )


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

    def to_hf(self) -> dict[str, Any]:
        if self.embedding_dropout != self.dropout:
            raise ValueError(f"BertConfig: transformers has one dropout for both {self.dropout=} and {self.embedding_dropout=}")
        return super().to_hf()


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
