"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT without token types and without a pooler."""

import torch

from ..files.source import Source
from .bert_like import PLAIN
from .family import KEYS, SEQUENCE, TOKEN, Family, HeadLayers
from .names import Modules, NamingConfig, flat, in_layers, linear, norm, qkv, table


def distilbert_sources(config: NamingConfig) -> dict[str, Source]:
    """DistilBertForMaskedLM and DistilBertModel."""
    bias = {"bias": Source.one("vocab_projector.bias", "v -> v")}
    modules: Modules = {
        "embedding": table("embeddings.word_embeddings"),
        "positions": table("embeddings.position_embeddings"),
        "input_norm": norm("embeddings.LayerNorm"),
        "transform": linear("vocab_transform"),
        "transform_norm": norm("vocab_layer_norm"),
        "head": table("vocab_projector") | bias,
    }
    return flat(modules | in_layers(config, "transformer.layer", lambda layer: {
        "attention.qkv": qkv(*(f"{layer}.attention.{name}_lin" for name in "qkv")),
        "attention.out": linear(f"{layer}.attention.out_lin"),
        "attention_norm": norm(f"{layer}.sa_layer_norm"),
        "mlp.fc1": linear(f"{layer}.ffn.lin1"),
        "mlp.fc2": linear(f"{layer}.ffn.lin2"),
        "mlp_norm": norm(f"{layer}.output_layer_norm"),
    }))  # fmt: skip


DISTILBERT = Family(
    architecture="DistilBertForMaskedLM",
    output="MaskedLMOutput",
    base_prefix="distilbert.",
    head_prefixes=("vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
    sources=distilbert_sources,
    hf_keys=KEYS | dict(
        hidden_size=("dim", "hidden_size"), num_layers=("n_layers", "num_hidden_layers"),
        num_heads=("n_heads", "num_attention_heads"), ffn_size=("hidden_dim",), activation=("activation",),
        dropout=("dropout",), attention_dropout=("attention_dropout",), embedding_dropout=("dropout",),
        pad_token_id=("pad_token_id",),
    ),
    fixed=PLAIN | dict(eps=1e-12, type_vocab_size=0),
    ignorable=(r"vocab_projector\.weight",),
    classifiers={SEQUENCE: "classifier", TOKEN: "classifier"},
    heads={
        SEQUENCE: HeadLayers("pre_classifier", torch.relu, dropout_key="seq_classif_dropout", dropout=0.2),
        TOKEN: HeadLayers(dropout_key=None),
    },
    pooler=False,
    causal=False,
)  # fmt: skip
