"""What BERT shares with its relatives: names of parameters, keys of config.json."""

from typing import Any

from ..files.source import Source
from .family import KEYS
from .names import Modules, Sizes, linear, norm, qkv, table


def head(config: Sizes, name: str) -> Modules:
    """The head over the vocabulary."""
    if config.tie_embeddings:
        return {"head": {"bias": Source.one(f"{name}.bias", "v -> v")}}
    # transformers then adds decoder.bias, and keeps an idle bias
    bias = Source.one(f"{name}.decoder.bias", "v -> v", also=f"{name}.bias")
    return {"head": table(f"{name}.decoder") | {"bias": bias}}


def body(config: Sizes) -> Modules:
    """What lies below the head."""
    modules: Modules = {
        "embedding": table("embeddings.word_embeddings"),
        "positions": table("embeddings.position_embeddings"),
        "types": table("embeddings.token_type_embeddings"),
        "norm_in": norm("embeddings.LayerNorm"),
        "pooler": linear("pooler.dense"),
    }
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"encoder.layer.{i}"
        attention = f"{theirs}.attention.self"
        modules |= {
            f"{ours}.attention.qkv": qkv(f"{attention}.query", f"{attention}.key", f"{attention}.value"),
            f"{ours}.attention.out": linear(f"{theirs}.attention.output.dense"),
            f"{ours}.norm_attention": norm(f"{theirs}.attention.output.LayerNorm"),
            f"{ours}.mlp.fc1": linear(f"{theirs}.intermediate.dense"),
            f"{ours}.mlp.fc2": linear(f"{theirs}.output.dense"),
            f"{ours}.norm_mlp": norm(f"{theirs}.output.LayerNorm"),
        }
    return modules


# What no config of these families can say otherwise.
PLAIN: dict[str, Any] = dict(
    post_norm=True, gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, head_bias=True,
    pooling="cls", rope=None, local_rope=None, window=None, layer_types=None, positions_skip_padding=False,
    head_activation=None,
)  # fmt: skip
SHARED: dict[str, Any] = dict(
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
OMITTED: dict[str, Any] = dict(tie_embeddings=None, init_std=None, pad_token_id=None)
