"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with eight MLPs in place of each, of which a token has two."""

from ..files.source import Source
from .family import ONE_WINDOW, RotaryKeys
from .llama_like import llama_like, llama_sources
from .names import NamingConfig, experts, flat


def _sources(config: NamingConfig) -> dict[str, Source]:
    """Llama's, but for the MLPs."""
    mlps = {}
    for i in range(config.num_layers):
        moe = f"layers.{i}.block_sparse_moe"
        each = lambda expert, moe=moe: f"{moe}.experts.{expert}"
        mlps[f"blocks.{i}.mlp"] = experts(f"{moe}.gate", each, config.num_experts or 0, ("w1", "w3", "w2"))
    return llama_sources(config) | flat(mlps)


MIXTRAL = llama_like(
    "MixtralForCausalLM",
    keys=dict(
        window=("sliding_window",), num_experts=("num_local_experts",), experts_per_token=("num_experts_per_tok",)
    ),
    sources=_sources,
    windows=ONE_WINDOW,
    rotary_keys=RotaryKeys(usual_theta=1e6),
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
)._replace(
    output="MoeCausalLMOutputWithPast",
    not_built=dict(router_jitter_noise=0.0, output_router_logits=False),
)
