"""Phi-3 and Phi-4-mini (Abdin et al. 2024, arXiv:2404.14219): Llama with q, k and v in one tensor of a file and gate
and up in another, no biases, one sliding window, longrope, and rotary positions on a part of each head."""

from ..files.source import Source
from .family import ONE_WINDOW, RotaryKeys
from .llama_like import llama_like, llama_sources
from .names import NamingConfig, flat, in_layers, joined_qkv


def phi3_sources(config: NamingConfig) -> dict[str, Source]:
    """Phi3ForCausalLM: Llama's names, but for the two joined projections."""
    heads = config.num_heads // config.kv_heads
    return llama_sources(config) | flat(in_layers(config, "layers", lambda layer: {
        "attention.qkv": joined_qkv(f"{layer}.self_attn.qkv_proj", heads),
        "mlp.fc1": {"weight": Source.one(f"{layer}.mlp.gate_up_proj.weight", "(t f) d -> f t d")},
    }))  # fmt: skip


PHI3 = llama_like(
    "Phi3ForCausalLM",
    keys=dict(dropout=("resid_pdrop",), embedding_dropout=("embd_pdrop",), window=("sliding_window",)),
    sources=phi3_sources,
    windows=ONE_WINDOW,
    rotary_keys=RotaryKeys(
        kinds=("default", "longrope"),
        partial=True,
        aliases=dict(su="longrope", yarn="longrope"),
        usual_share=1.0,
        trained_outside=True,
    ),
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
)
