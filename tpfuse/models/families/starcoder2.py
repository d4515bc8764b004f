"""StarCoder2 (Lozhkov et al. 2024, arXiv:2402.19173): Llama's attention under LayerNorm and an MLP without a gate, with
biases everywhere or nowhere, one sliding window, and dropout after the embedding, attention and the MLP."""

from ..files.source import Source
from .family import ONE_WINDOW
from .llama_like import llama_like, llama_sources
from .names import NamingConfig, flat, in_layers, linear


def starcoder2_sources(config: NamingConfig) -> dict[str, Source]:
    """Starcoder2ForCausalLM: Llama's names, but for the MLP's."""
    mlp = lambda layer: {"mlp.fc1": linear(f"{layer}.mlp.c_fc"), "mlp.fc2": linear(f"{layer}.mlp.c_proj")}
    return llama_sources(config) | flat(in_layers(config, "layers", mlp))


STARCODER2 = llama_like(
    "Starcoder2ForCausalLM",
    keys=dict(
        eps=("norm_epsilon",),
        qkv_bias=("use_bias",),
        out_bias=("use_bias",),
        mlp_bias=("use_bias",),
        dropout=("residual_dropout",),
        embedding_dropout=("embedding_dropout",),
        window=("sliding_window",),
    ),
    sources=starcoder2_sources,
    windows=ONE_WINDOW,
    norm="layer",
    gated=False,
)
