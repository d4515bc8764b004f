"""Small models of transformers with experts: routers in the dtype of their parameters, gradients by the names in a
file."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from tests.models.families.test_llama_like import LLAMA3, ROPE, SIZES, oracle


class Names(NamedTuple):
    """Names in a file: of a layer's module with experts, and of an expert's parts."""

    module: str = "mlp"
    both: tuple[str, str] = ("gate_proj", "up_proj")
    down: tuple[str] = ("down_proj",)


class Family(NamedTuple):
    config: type
    options: dict[str, Any]
    names: Names = Names()


EXPERTS = dict(num_experts_per_tok=2, num_key_value_heads=2, attn_implementation="sdpa", experts_implementation="eager")
MIXTRAL = dict(num_local_experts=4, rope_parameters=ROPE, sliding_window=4, router_jitter_noise=0.0)
QWEN = dict(moe_intermediate_size=12, head_dim=10, rope_parameters=ROPE, num_experts=4)
FAMILIES = {
    "mixtral": Family(MixtralConfig, MIXTRAL, Names("block_sparse_moe", ("w1", "w3"), ("w2",))),
    "qwen3_moe": Family(Qwen3MoeConfig, QWEN | dict(norm_topk_prob=True, use_sliding_window=True, sliding_window=4)),
    "qwen3_moe-mixed": Family(  # experts in layer 1 of 4 alone
        Qwen3MoeConfig,
        QWEN
        | dict(num_experts=8, num_experts_per_tok=3, decoder_sparse_step=2, mlp_only_layers=[3, 9], num_hidden_layers=4)
        | dict(tie_word_embeddings=True, attention_bias=True),
    ),
    "qwen2_moe": Family(  # layers 0 and 2 of 3 with a window, 0 and 1 with experts
        Qwen2MoeConfig,
        dict(moe_intermediate_size=12, shared_expert_intermediate_size=20, rope_parameters=ROPE, num_experts=4)
        | dict(use_sliding_window=True, sliding_window=4, max_window_layers=3, mlp_only_layers=[2])
        | dict(num_hidden_layers=3),
    ),
    "olmoe": Family(OlmoeConfig, dict(num_experts=8, rope_parameters=LLAMA3)),
    "olmoe-normed": Family(
        OlmoeConfig, dict(num_experts=4, rope_parameters=ROPE, norm_topk_prob=True, num_key_value_heads=8)
    ),
}


def their_config(name: str, **options: Any) -> Any:
    """A config of transformers."""
    family = FAMILIES[name]
    return family.config(**SIZES | EXPERTS | family.options | options)


def wide_router(router: nn.Module, args: tuple[Tensor], rounded: Any):
    """Their router, whose softmax is not fp32."""
    (x,) = args
    logits = F.linear(x.reshape(-1, router.hidden_dim), router.weight)
    weights, chosen = logits.softmax(-1).topk(router.top_k, dim=-1)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's always divides
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, chosen


def widen(model: nn.Module) -> nn.Module:
    """Routers in the dtype of their parameters."""
    routers = [part for part in model.modules() if type(part).__name__.endswith("TopKRouter")]
    assert routers
    for router in routers:
        router.register_forward_hook(wide_router)
    return model


def theirs(name: str) -> nn.Module:
    """A model of transformers in fp64 throughout."""
    return widen(oracle(their_config(name)))


def an_expert_a_tensor(results: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Gradients of a model's merged tensors, by the names in a file."""
    module, both, down = FAMILIES[name].names
    found = {}
    for key, value in results.items():
        stem, _, leaf = key.replace(".mlp.", f".{module}.").rpartition(".")
        pieces = {"gate_up_proj": both, "down_proj": down}.get(leaf)
        if pieces is None:
            found[key.replace(".mlp.", f".{module}.")] = value
            continue
        for expert, merged in enumerate(value):
            for piece, part in zip(pieces, merged.chunk(len(pieces))):
                found[f"{stem}.{expert}.{piece}.weight"] = part
    return found


def tensors(path) -> dict[str, Tensor]:
    """The contents of a directory's one file."""
    with safe_open(path / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}
