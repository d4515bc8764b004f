"""Qwen 2 (Yang et al. 2024, arXiv:2407.10671) and Qwen 3 (2025, arXiv:2505.09388): Llama with windows in some layers;
Qwen 2 with biases of q, k and v, Qwen 3 with a norm on every query and key head.  Qwen2-MoE and Qwen3-MoE have experts
in place of some MLPs or all: Qwen2-MoE beside them one that every token has, and windows in every second of its first
layers; Qwen3-MoE one window if any."""

from .family import SWITCHED_WINDOW, WINDOWED_LAYERS
from .llama_like import ATTENTION_BIAS, EXPERTS, expert_sources, llama_like, shared_expert_sources, with_experts

QWEN2 = llama_like("Qwen2ForCausalLM", windows=WINDOWED_LAYERS, qkv_bias=True, out_bias=False, mlp_bias=False)
QWEN3 = llama_like("Qwen3ForCausalLM", keys=ATTENTION_BIAS, windows=WINDOWED_LAYERS, mlp_bias=False, qk_norm=True)
QWEN2_MOE = with_experts(
    llama_like(
        "Qwen2MoeForCausalLM",
        keys=EXPERTS
        | dict(
            num_experts=("num_experts",),
            expert_size=("moe_intermediate_size",),
            shared_size=("shared_expert_intermediate_size",),
            qkv_bias=("qkv_bias",),
        ),
        sources=shared_expert_sources,
        windows=WINDOWED_LAYERS,
        out_bias=False,
        mlp_bias=False,
        shared_gate=True,
    )
)._replace(windows_first=True)
QWEN3_MOE = with_experts(
    llama_like(
        "Qwen3MoeForCausalLM",
        keys=ATTENTION_BIAS | EXPERTS | dict(expert_size=("moe_intermediate_size",)),
        sources=expert_sources,
        windows=SWITCHED_WINDOW,
        mlp_bias=False,
        qk_norm=True,
    )
)
