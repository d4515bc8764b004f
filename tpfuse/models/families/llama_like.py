"""The common part of Llama and its many relatives: names of parameters, keys of config.json."""

from collections.abc import Callable
from typing import Any

from ..files.source import Source
from .family import KEYS, NO_WINDOW, USUAL, Family, RotaryKeys
from .names import (
    Modules,
    NamingConfig,
    experts,
    flat,
    gate_up,
    in_layers,
    linear,
    norm,
    norms_before,
    qkv,
    shared_expert,
    table,
)


def llama_sources(config: NamingConfig) -> dict[str, Source]:
    """LlamaForCausalLM: each norm stands before what it feeds."""
    norms = norms_before(config, "layers", "input_layernorm", "norm")
    return flat(llama_modules(config, {"attention_norm": "post_attention_layernorm"}) | norms)


def expert_sources(
    config: NamingConfig, module: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Source]:
    """Llama's, and the experts that layers may have in place of an MLP, in a ``module`` of the layer."""
    count = config.num_experts or 0
    mixture = lambda layer: {"mlp": experts(f"{layer}.{module}", f"{layer}.mlp", count, names)}
    return llama_sources(config) | flat(in_layers(config, "layers", mixture))


def shared_expert_sources(config: NamingConfig) -> dict[str, Source]:
    """Experts, and beside them one that every token has."""
    shared = lambda layer: {"mlp": shared_expert(f"{layer}.mlp.shared_expert")}
    return expert_sources(config) | flat(in_layers(config, "layers", shared))


def llama_modules(config: NamingConfig, norms: dict[str, str]) -> Modules:
    """Llama's parameters, q, k and v apart, gate and up apart; ``norms`` of a block -> their names in a layer.  Norms
    of query and key heads are named, and a model without them takes no notice."""
    heads = config.num_heads // config.kv_heads
    return {"embedding": table("embed_tokens"), "head": table("lm_head")} | in_layers(config, "layers", lambda layer: {
        "attention.qkv": qkv(*(f"{layer}.self_attn.{name}_proj" for name in "qkv"), heads=heads),
        "attention.q_norm": norm(f"{layer}.self_attn.q_norm"),
        "attention.k_norm": norm(f"{layer}.self_attn.k_norm"),
        "attention.out": linear(f"{layer}.self_attn.o_proj"),
        "mlp.fc1": gate_up(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
        "mlp.fc2": linear(f"{layer}.mlp.down_proj"),
        **{module: norm(f"{layer}.{name}") for module, name in norms.items()},
    })  # fmt: skip


def llama_like(
    architecture: str,
    *,
    keys: dict[str, tuple[str, ...]] | None = None,
    sources: Callable[[Any], dict[str, Source]] = llama_sources,
    windows: str = NO_WINDOW,
    rotary_keys: RotaryKeys = USUAL,
    **fixed: Any,
) -> Family:
    """Returns a family with Llama's keys; what is given is what differs, a field without a key as ()."""
    shared: dict[str, tuple[str, ...]] = dict(
        num_kv_heads=("num_key_value_heads",),
        head_width=("head_dim",),
        eps=("rms_norm_eps",),
        attention_dropout=("attention_dropout",),
    )
    hf_keys = {field: names for field, names in (KEYS | shared | (keys or {})).items() if names}
    decided = dict(norm="rms", gated=True, dropout=0.0, embedding_dropout=0.0) | fixed
    return Family(
        architecture=architecture,
        output="CausalLMOutputWithPast",
        base_prefix="model.",
        head_prefixes=("lm_head.",),
        sources=sources,
        hf_keys=hf_keys,
        fixed={key: value for key, value in decided.items() if key not in hf_keys},
        ignorable=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        rotary=True,
        windows=windows,
        rotary_keys=rotary_keys,
    )


ATTENTION_BIAS: dict[str, tuple[str, ...]] = dict(qkv_bias=("attention_bias",), out_bias=("attention_bias",))
EXPERTS: dict[str, tuple[str, ...]] = dict(
    num_experts=("num_experts", "num_local_experts"),
    experts_per_token=("num_experts_per_tok",),
    renormalize=("norm_topk_prob",),
)


BALANCE: dict[str, tuple[str, ...]] = dict(
    balanced=("output_router_logits",), balance_coefficient=("router_aux_loss_coef",)
)


def with_experts(family: Family, **not_built: Any) -> Family:
    """Returns a family whose layers have experts, with the keys of the loss that balances them."""
    return family._replace(output="MoeCausalLMOutputWithPast", hf_keys=family.hf_keys | BALANCE, not_built=not_built)
