"""The common part of Llama and its many relatives: names of parameters, keys of config.json."""

from collections.abc import Callable
from typing import Any

from ..files.source import Source
from .family import KEYS, NO_WINDOW, USUAL, Family, RotaryKeys
from .names import Modules, NamingConfig, experts, flat, gate_up, linear, norm, qkv, shared_expert, table


def llama_sources(config: NamingConfig) -> dict[str, Source]:
    """LlamaForCausalLM: each norm stands before what it feeds."""
    modules = around() | {"input_norm": norm("layers.0.input_layernorm")}
    final = config.num_layers - 1
    for i in range(config.num_layers):
        modules |= layer(config, i) | {
            f"blocks.{i}.attention_norm": norm(f"layers.{i}.post_attention_layernorm"),
            f"blocks.{i}.mlp_norm": norm("norm" if i == final else f"layers.{i + 1}.input_layernorm"),
        }
    return flat(modules)


def expert_sources(
    config: NamingConfig, module: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Source]:
    """Llama's, and the experts that layers may have in place of an MLP, in a ``module`` of the layer."""
    mixtures = {
        f"blocks.{i}.mlp": experts(f"layers.{i}.{module}", f"layers.{i}.mlp", config.num_experts or 0, names)
        for i in range(config.num_layers)
    }
    return llama_sources(config) | flat(mixtures)


def shared_expert_sources(config: NamingConfig) -> dict[str, Source]:
    """Experts, and beside them one that every token has."""
    layers = range(config.num_layers)
    shared = {f"blocks.{i}.mlp": shared_expert(f"layers.{i}.mlp.shared_expert") for i in layers}
    return expert_sources(config) | flat(shared)


def around() -> Modules:
    """The parameters around the layers, but for norms."""
    return {"embedding": table("embed_tokens"), "head": table("lm_head")}


def layer(config: NamingConfig, i: int) -> Modules:
    """A layer without its norms: q, k and v apart, gate and up apart.  Norms of query and key heads are named, and a
    model without them takes no notice."""
    ours, attention, mlp = f"blocks.{i}", f"layers.{i}.self_attn", f"layers.{i}.mlp"
    q, k, v = (f"{attention}.{name}_proj" for name in "qkv")
    return {
        f"{ours}.attention.qkv": qkv(q, k, v, config.num_heads // config.kv_heads),
        f"{ours}.attention.q_norm": norm(f"{attention}.q_norm"),
        f"{ours}.attention.k_norm": norm(f"{attention}.k_norm"),
        f"{ours}.attention.out": linear(f"{attention}.o_proj"),
        f"{ours}.mlp.fc1": gate_up(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        f"{ours}.mlp.fc2": linear(f"{mlp}.down_proj"),
    }


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
