"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): a pre-norm encoder with rotary positions, no biases, and windows
in most layers."""

from ..files.source import Source
from .family import FULL, KEYS, PATTERNED_LAYERS, SEQUENCE, SLIDING, TOKEN, USUAL, Family, HeadLayers
from .names import Modules, NamingConfig, flat, in_layers, linear, norm, norms_before, table


def modernbert_sources(config: NamingConfig) -> dict[str, Source]:
    """ModernBertForMaskedLM and ModernBertModel: q, k and v in one, and both maps of the gated MLP, of which the
    activation is the first's."""
    modules: Modules = {
        "embedding": table("embeddings.tok_embeddings"),
        "transform": linear("head.dense"),
        "transform_norm": norm("head.norm"),
        "head": table("decoder") | {"bias": Source.one("decoder.bias", "v -> v")},
    }
    modules |= norms_before(config, "layers", "attn_norm", "final_norm") | {"input_norm": norm("embeddings.norm")}
    return flat(modules | in_layers(config, "layers", lambda layer: {
        "attention.qkv": linear(f"{layer}.attn.Wqkv", "(t h e) d -> h t e d", "(t h e) -> h t e"),
        "attention.out": linear(f"{layer}.attn.Wo"),
        "attention_norm": norm(f"{layer}.mlp_norm"),
        "mlp.fc1": linear(f"{layer}.mlp.Wi", "(t f) d -> f t d", "(t f) -> f t"),
        "mlp.fc2": linear(f"{layer}.mlp.Wo"),
    }))  # fmt: skip


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
    fixed=dict(post_norm=False, gated=True, type_vocab_size=0, dropout=0.0, attention_dropout=0.0)
    | dict(positions_skip_padding=False),
    not_built=dict(attention_dropout=0.0, mlp_dropout=0.0, decoder_bias=True, sparse_prediction=False),
    ignorable=(r"decoder\.weight",),
    classifiers={SEQUENCE: "classifier", TOKEN: "classifier"},
    heads=dict.fromkeys((SEQUENCE, TOKEN), HeadLayers(transform=True, dropout=0.0)),
    pooler=False, causal=False, rotary=True,
    windows=PATTERNED_LAYERS, full_every=3, full_first=True, pattern_key="global_attn_every_n_layers",
    rotary_keys=USUAL._replace(
        kinds=("default",),
        thetas={FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)},
        scaled=(FULL, SLIDING),
    ),
    scaled_residuals=True,
)  # fmt: skip
