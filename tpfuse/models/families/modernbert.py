"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): a pre-norm encoder with rotary positions, no biases, and windows
in most layers."""

from ..files.source import Source
from .family import KEYS, SEQUENCE, TOKEN, USUAL, Family, Head
from .names import Modules, Sizes, flat, linear, norm, table


def modernbert_sources(config: Sizes) -> dict[str, Source]:
    """ModernBertForMaskedLM and ModernBertModel: q, k and v in one, and both maps of the gated MLP, of which the
    activation is the first's."""
    modules: Modules = {
        "embedding": table("embeddings.tok_embeddings"),
        "norm_in": norm("embeddings.norm"),
        "transform": linear("head.dense"),
        "transform_norm": norm("head.norm"),
        "head": table("decoder") | {"bias": Source.one("decoder.bias", "v -> v")},
    }
    last = config.num_layers - 1
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        modules |= {
            f"{ours}.attention.qkv": linear(f"{theirs}.attn.Wqkv", "(t h e) d -> h t e d", "(t h e) -> h t e"),
            f"{ours}.attention.out": linear(f"{theirs}.attn.Wo"),
            f"{ours}.norm_attention": norm(f"{theirs}.mlp_norm"),
            f"{ours}.mlp.fc1": linear(f"{theirs}.mlp.Wi", "(t f) d -> f t d", "(t f) -> f t"),
            f"{ours}.mlp.fc2": linear(f"{theirs}.mlp.Wo"),
            f"{ours}.norm_mlp": norm("final_norm" if i == last else f"layers.{i + 1}.attn_norm"),
        }
    return flat(modules)


MODERNBERT = Family(
    architecture="ModernBertForMaskedLM",
    output="MaskedLMOutput",
    base_prefix="model.",
    head_prefixes=("head.", "decoder."),
    sources=modernbert_sources,
    hf_keys=KEYS | dict(
        activation=("hidden_activation",), eps=("norm_eps",), embedding_dropout=("embedding_dropout",),
        pad_token_id=("pad_token_id",), qkv_bias=("attention_bias",), out_bias=("attention_bias",),
        mlp_bias=("mlp_bias",), norm_bias=("norm_bias",), head_bias=("classifier_bias",),
        head_activation=("classifier_activation",), pooling=("classifier_pooling",),
    ),
    hf_optional=dict(
        tie_embeddings=None, init_std=None, pad_token_id=50283, eps=1e-5, activation="gelu", head_activation="gelu",
        embedding_dropout=0.0, pooling="cls",
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias", "head_bias"), False),
    ),
    fixed=dict(post_norm=False, gated=True, type_vocab_size=0, dropout=0.0, attention_dropout=0.0)
    | dict(positions_skip_padding=False),
    not_built=dict(attention_dropout=0.0, mlp_dropout=0.0, decoder_bias=True, sparse_prediction=False),
    ignorable=(r"decoder\.weight",),
    classifiers={SEQUENCE: "classifier", TOKEN: "classifier"},
    heads=dict.fromkeys((SEQUENCE, TOKEN), Head(transform=True, dropout=0.0)),
    pooler=False, causal=False, rotary=True,
    rotary_keys=USUAL._replace(kinds=("default",)),
    scaled_residuals=True,
)  # fmt: skip
