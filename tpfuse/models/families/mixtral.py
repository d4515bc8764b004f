"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with eight MLPs in place of each, of which a token has two."""

import functools

from .family import ONE_WINDOW, RotaryKeys
from .llama_like import expert_sources, llama_like, with_experts

MIXTRAL = with_experts(
    llama_like(
        "MixtralForCausalLM",
        keys=dict(
            window=("sliding_window",), num_experts=("num_local_experts",), experts_per_token=("num_experts_per_tok",)
        ),
        sources=functools.partial(expert_sources, module="block_sparse_moe", names=("w1", "w3", "w2")),
        windows=ONE_WINDOW,
        rotary_keys=RotaryKeys(usual_theta=1e6),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    ),
    router_jitter_noise=0.0,
)
