"""GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373): attention and MLP
side by side, LayerNorm, and rotary positions on a part of each head."""

from ..files.source import Source
from .family import KEYS, SEQUENCE, TOKEN, Family, RotaryKeys
from .names import Modules, NamingConfig, flat, in_layers, linear, norm, norms_before, table


def gpt_neox_sources(config: NamingConfig) -> dict[str, Source]:
    """GPTNeoXForCausalLM: q, k and v in one, head by head; a block's two norms read the same rows."""
    modules: Modules = {"embedding": table("embed_in"), "head": table("lm_head")}
    modules |= norms_before(config, "layers", "input_layernorm", "final_layer_norm")
    return flat(modules | in_layers(config, "layers", lambda layer: {
        "attention.qkv": linear(f"{layer}.attention.query_key_value", "(h t e) d -> h t e d", "(h t e) -> h t e"),
        "attention.out": linear(f"{layer}.attention.dense"),
        "mlp.fc1": linear(f"{layer}.mlp.dense_h_to_4h"),
        "mlp.fc2": linear(f"{layer}.mlp.dense_4h_to_h"),
        "attention_norm": norm(f"{layer}.post_attention_layernorm"),
    }))  # fmt: skip


GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    output="CausalLMOutputWithPast",
    base_prefix="gpt_neox.",
    head_prefixes=("lm_head.", "embed_out."),
    sources=gpt_neox_sources,
    hf_keys=KEYS | dict(
        eps=("layer_norm_eps",), dropout=("hidden_dropout",), embedding_dropout=("hidden_dropout",),
        attention_dropout=("attention_dropout",), qkv_bias=("attention_bias",), out_bias=("attention_bias",),
        parallel_residual=("use_parallel_residual",),
    ),
    fixed=dict(norm="layer", gated=False, mlp_bias=True, qk_norm=False),
    ignorable=(r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
    classifiers={SEQUENCE: "score", TOKEN: "classifier"},
    rotary=True,
    rotary_keys=RotaryKeys(
        partial=True,
        theta="rotary_emb_base",
        share="rotary_pct",
        usual_share=0.25,
    ),
    filed={"lm_head.weight": "embed_out.weight"},
)  # fmt: skip
