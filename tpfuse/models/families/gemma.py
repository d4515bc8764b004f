"""Gemma 2 (2024, arXiv:2408.00118) and 3 (2025, arXiv:2503.19786), text alone: Llama with norms on both sides of
attention and of the MLP, windows in most layers, and an embedding times the root of its width.  Gemma 2 bounds scores
and logits by tanh; Gemma 3 has a norm on every query and key head, and other rotary positions where there is a window.
"""

from typing import Any

from ..files.source import Source
from .family import PATTERNED_LAYERS, SEQUENCE, Family
from .llama_like import ATTENTION_BIAS, around, layer, llama_like
from .names import NamingConfig, flat, norm


def gemma_sources(config: NamingConfig) -> dict[str, Source]:
    """Gemma2ForCausalLM: each norm stands around what it is of."""
    modules = around() | {"norm_in": norm("layers.0.input_layernorm")}
    final = config.num_layers - 1
    for i in range(config.num_layers):
        modules |= layer(config, i) | {
            f"blocks.{i}.branch_attention": norm(f"layers.{i}.post_attention_layernorm"),
            f"blocks.{i}.norm_attention": norm(f"layers.{i}.pre_feedforward_layernorm"),
            f"blocks.{i}.branch_mlp": norm(f"layers.{i}.post_feedforward_layernorm"),
            f"blocks.{i}.norm_mlp": norm("norm" if i == final else f"layers.{i + 1}.input_layernorm"),
        }
    return flat(modules)


def _gemma(architecture: str, *, keys: dict[str, tuple[str, ...]], optional: dict[str, Any], **fixed: Any) -> Family:
    shared = ATTENTION_BIAS | dict(
        activation=("hidden_activation",),
        window=("sliding_window",),
        attention_scalar=("query_pre_attn_scalar",),
        logit_softcap=("final_logit_softcapping",),
    )
    omitted: dict[str, Any] = dict(activation="gelu_pytorch_tanh", attention_scalar=256, window=4096)
    omitted |= dict(qkv_bias=False, out_bias=False, num_kv_heads=4, head_width=256, tie_embeddings=True)
    fixed |= dict(norm="gemma_rms", branch_norm=True, scaled_embedding=True, mlp_bias=False)
    family = llama_like(architecture, keys=shared | keys, optional=omitted | optional, sources=gemma_sources, **fixed)
    return family._replace(windows=PATTERNED_LAYERS, nullable=("window", "attention_softcap", "logit_softcap"))


GEMMA2 = _gemma(
    "Gemma2ForCausalLM",
    keys=dict(attention_softcap=("attn_logit_softcapping",)),
    optional=dict(attention_softcap=50.0, logit_softcap=30.0),
)._replace(full_every=2, not_built=dict(use_bidirectional_attention=False))
GEMMA3 = _gemma(
    "Gemma3ForCausalLM", keys={}, optional=dict(logit_softcap=None), qk_norm=True, qk_norm_kind="gemma_rms"
)._replace(
    stem="Gemma3Text",
    full_every=6,
    pattern_key="sliding_window_pattern",
    thetas=(1e6, 1e4),
    classifiers={SEQUENCE: "score"},
    not_built=dict(use_bidirectional_attention=False, attn_logit_softcapping=None),
)
