"""GPT-2 (Radford et al. 2019)."""

from ..files.source import Source
from .family import KEYS, SEQUENCE, TOKEN, Family
from .names import Modules, NamingConfig, flat, in_layers, linear, norm, norms_before, table


def gpt2_sources(config: NamingConfig) -> dict[str, Source]:
    """GPT2LMHeadModel: Conv1D holds its weights transposed, and q, k and v in one."""
    transposed = "i o -> o i"
    modules: Modules = {"embedding": table("wte"), "positions": table("wpe"), "head": table("lm_head")}
    modules |= norms_before(config, "h", "ln_1", "ln_f")
    return flat(modules | in_layers(config, "h", lambda layer: {
        "attention.qkv": linear(f"{layer}.attn.c_attn", "d (t h e) -> h t e d", "(t h e) -> h t e"),
        "attention.out": linear(f"{layer}.attn.c_proj", transposed),
        "mlp.fc1": linear(f"{layer}.mlp.c_fc", transposed),
        "mlp.fc2": linear(f"{layer}.mlp.c_proj", transposed),
        "attention_norm": norm(f"{layer}.ln_2"),
    }))  # fmt: skip


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    output="CausalLMOutputWithCrossAttentions",
    base_prefix="transformer.",
    head_prefixes=("lm_head.",),
    sources=gpt2_sources,
    hf_keys=KEYS | dict(
        max_positions=("n_positions", "max_position_embeddings"),
        hidden_size=("n_embd", "hidden_size"), num_layers=("n_layer", "num_hidden_layers"),
        num_heads=("n_head", "num_attention_heads"), ffn_size=("n_inner",),
        activation=("activation_function",), eps=("layer_norm_epsilon",),
        dropout=("resid_pdrop",), attention_dropout=("attn_pdrop",), embedding_dropout=("embd_pdrop",),
    ),
    fixed=dict(norm="layer", gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=False, rope=None),
    not_built=dict(
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        reorder_and_upcast_attn=False,
        add_cross_attention=False,
    ),
    ignorable=(r"h\.\d+\.attn\.(masked_)?bias",),
    classifiers={SEQUENCE: "score", TOKEN: "classifier"},
    transposed=True,
    scaled_residuals=True,
)  # fmt: skip
