"""BERT (Devlin et al. 2018, arXiv:1810.04805), and what its relatives share with it."""

from typing import Any

from ...interop.huggingface.source import Source
from .family import SEQUENCE, TOKEN, Family
from .names import Modules, Sizes, flat, linear, norm, qkv, table


def bert_sources(config: Sizes) -> dict[str, Source]:
    """BertForMaskedLM and BertModel: q, k and v apart, norms after the GEMM pairs."""
    modules = (
        body(config)
        | head(config, "cls.predictions")
        | {
            "transform": linear("cls.predictions.transform.dense"),
            "transform_norm": norm("cls.predictions.transform.LayerNorm"),
        }
    )
    return flat(modules)


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
    hf_keys=dict(
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
    ),
    not_built=dict(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False),
    causal=False,
)
OMITTED: dict[str, Any] = dict(tie_embeddings=None, init_std=None, pad_token_id=None)
BERT = Family(
    architecture="BertForMaskedLM",
    base_prefix="bert.",
    head_prefixes=("cls.",),
    sources=bert_sources,
    hf_optional=OMITTED,
    fixed=PLAIN,
    ignorable=(
        r"embeddings\.position_ids", r"cls\.seq_relationship\.(weight|bias)",
        r"cls\.predictions\.bias", r"cls\.predictions\.decoder\.(weight|bias)",
    ),
    classifiers={SEQUENCE: "classifier", TOKEN: "classifier"},
    **SHARED,
)  # fmt: skip
