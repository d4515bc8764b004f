"""Llama (Touvron et al. 2023, arXiv:2302.13971)."""

from .llama_like import ATTENTION_BIAS, llama_like

LLAMA = llama_like("LlamaForCausalLM", keys=ATTENTION_BIAS | dict(mlp_bias=("mlp_bias",)))
