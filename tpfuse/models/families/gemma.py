"""Gemma 2 (2024, arXiv:2408.00118) and 3 (2025, arXiv:2503.19786), text alone: Llama with norms on both sides of
attention and of the MLP, windows in most layers, and an embedding times the root of its width.  Gemma 2 bounds scores
and logits by tanh; Gemma 3 has a norm on every query and key head, and other rotary positions where there is a window.
"""

from typing import Any

from ..files.source import Source
from .family import FULL, PATTERNED_LAYERS, SEQUENCE, SLIDING, USUAL, Family
from .llama_like import ATTENTION_BIAS, llama_like, llama_modules
from .names import NamingConfig, flat, norms_before


def gemma_sources(config: NamingConfig) -> dict[str, Source]:
    """Gemma2ForCausalLM: each norm stands around what it is of."""
    norms = dict(attention_branch_norm="post_attention_layernorm", attention_norm="pre_feedforward_layernorm")
    norms |= dict(mlp_branch_norm="post_feedforward_layernorm")
    return flat(llama_modules(config, norms) | norms_before(config, "layers", "input_layernorm", "norm"))


def _gemma(architecture: str, *, keys: dict[str, tuple[str, ...]], **fixed: Any) -> Family:
    shared = ATTENTION_BIAS | dict(
        activation=("hidden_activation",),
        window=("sliding_window",),
        attention_scalar=("query_pre_attn_scalar",),
        logit_softcap=("final_logit_softcapping",),
    )
    fixed |= dict(norm="gemma_rms", branch_norm=True, scaled_embedding=True, mlp_bias=False)
    return llama_like(architecture, keys=shared | keys, sources=gemma_sources, windows=PATTERNED_LAYERS, **fixed)


GEMMA2 = _gemma("Gemma2ForCausalLM", keys=dict(attention_softcap=("attn_logit_softcapping",)))._replace(
    full_every=2, not_built=dict(use_bidirectional_attention=False)
)
GEMMA3 = _gemma("Gemma3ForCausalLM", keys={}, qk_norm=True, qk_norm_kind="gemma_rms")._replace(
    stem="Gemma3Text",
    full_every=6,
    pattern_key="sliding_window_pattern",
    rotary_keys=USUAL._replace(
        thetas={FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)},
        scaled=(FULL,),
    ),
    classifiers={SEQUENCE: "score"},
    not_built=dict(use_bidirectional_attention=False, attn_logit_softcapping=None),
)
