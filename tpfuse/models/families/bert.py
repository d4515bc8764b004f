"""BERT (Devlin et al. 2018, arXiv:1810.04805)."""

from ...interop.huggingface.source import Source
from .family import SEQUENCE, TOKEN, Family
from .names import Modules, Sizes, flat, linear, norm, qkv, table


def bert_sources(config: Sizes) -> dict[str, Source]:
    """BertForMaskedLM and BertModel: q, k and v apart, norms after the GEMM pairs."""
    modules: Modules = {
        "embedding": table("embeddings.word_embeddings"),
        "positions": table("embeddings.position_embeddings"),
        "types": table("embeddings.token_type_embeddings"),
        "norm_in": norm("embeddings.LayerNorm"),
        "pooler": linear("pooler.dense"),
        "transform": linear("cls.predictions.transform.dense"),
        "transform_norm": norm("cls.predictions.transform.LayerNorm"),
        "head": {"bias": Source.one("cls.predictions.bias", "v -> v")},
    }
    if not config.tie_embeddings:  # transformers then adds decoder.bias, and keeps an idle cls.predictions.bias
        bias = Source.one("cls.predictions.decoder.bias", "v -> v", also="cls.predictions.bias")
        modules["head"] = table("cls.predictions.decoder") | {"bias": bias}
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
    return flat(modules)


BERT = Family(
    architecture="BertForMaskedLM",
    output="MaskedLMOutput",
    base_prefix="bert.",
    head_prefixes=("cls.",),
    sources=bert_sources,
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
    hf_optional=dict(tie_embeddings=None, init_std=None, pad_token_id=None),
    not_built=dict(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False),
    ignorable=(r"embeddings\.position_ids", r"cls\.seq_relationship\.(weight|bias)"),
    classifiers={SEQUENCE: "classifier", TOKEN: "classifier"},
    causal=False,
)
