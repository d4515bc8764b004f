"""Qwen 2 (Yang et al. 2024, arXiv:2407.10671) and Qwen 3 (2025, arXiv:2505.09388): Llama with windows in some layers;
Qwen 2 with biases of q, k and v, Qwen 3 with a norm on every query and key head."""

from .family import WINDOWED_LAYERS
from .llama_like import ATTENTION_BIAS, llama_like

QWEN2 = llama_like("Qwen2ForCausalLM", windows=WINDOWED_LAYERS, qkv_bias=True, out_bias=False, mlp_bias=False)
QWEN3 = llama_like(
    "Qwen3ForCausalLM",
    keys=ATTENTION_BIAS,
    windows=WINDOWED_LAYERS,
    mlp_bias=False,
    qk_norm=True,
)
