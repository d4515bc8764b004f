"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with one sliding window."""

from .family import ONE_WINDOW
from .llama_like import llama_like

MISTRAL = llama_like(
    "MistralForCausalLM",
    keys=dict(window=("sliding_window",)),
    windows=ONE_WINDOW,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
)
