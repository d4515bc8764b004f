"""The common part of BERT and its relatives: names of parameters, keys of config.json."""

from functools import partial
from typing import Any

from ..files.source import Source
from .family import KEYS, Family
from .names import Modules, NamingConfig, in_layers, linear, norm, qkv, table


def head(config: NamingConfig, name: str) -> Modules:
    """The head over the vocabulary."""
    if config.tie_embeddings:
        return {"head": {"bias": Source.one(f"{name}.bias", "v -> v")}}
    # transformers then adds decoder.bias, and keeps an idle bias
    bias = Source.one(f"{name}.decoder.bias", "v -> v", also=f"{name}.bias")
    return {"head": table(f"{name}.decoder") | {"bias": bias}}


def body(config: NamingConfig) -> Modules:
    """The parameters below the head."""
    modules: Modules = {
        "embedding": table("embeddings.word_embeddings"),
        "positions": table("embeddings.position_embeddings"),
        "types": table("embeddings.token_type_embeddings"),
        "input_norm": norm("embeddings.LayerNorm"),
        "pooler": linear("pooler.dense"),
    }
    return modules | in_layers(config, "encoder.layer", lambda layer: {
        "attention.qkv": qkv(*(f"{layer}.attention.self.{name}" for name in ("query", "key", "value"))),
        "attention.out": linear(f"{layer}.attention.output.dense"),
        "attention_norm": norm(f"{layer}.attention.output.LayerNorm"),
        "mlp.fc1": linear(f"{layer}.intermediate.dense"),
        "mlp.fc2": linear(f"{layer}.output.dense"),
        "mlp_norm": norm(f"{layer}.output.LayerNorm"),
    })  # fmt: skip


# What no config of these families can say otherwise.
PLAIN: dict[str, Any] = dict(
    post_norm=True, gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, head_bias=True,
    pooling="cls", rope=None, local_rope=None, window=None, layer_types=None, positions_skip_padding=False,
    head_activation=None,
)  # fmt: skip
bert_like = partial(
    Family,
    output="MaskedLMOutput",
    hf_keys=KEYS
    | dict(
        eps=("layer_norm_eps",),
        dropout=("hidden_dropout_prob",),
        attention_dropout=("attention_probs_dropout_prob",),
        embedding_dropout=("hidden_dropout_prob",),
        type_vocab_size=("type_vocab_size",),
        pad_token_id=("pad_token_id",),
    ),
    not_built=dict(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False),
    causal=False,
)
