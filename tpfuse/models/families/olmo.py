"""OLMo 2 (2025, arXiv:2501.00656): Llama with a norm on what attention and the MLP give in place of what they are
given, and norms over all query heads together and over all key heads.  OLMoE (Muennighoff et al. 2024,
arXiv:2409.02060) has these norms of heads in Llama's wiring, and experts."""

from ..files.source import Source
from .family import SEQUENCE
from .llama_like import ATTENTION_BIAS, EXPERTS, expert_sources, llama_like, llama_modules, with_experts
from .names import NamingConfig, flat, norm


def olmo2_sources(config: NamingConfig) -> dict[str, Source]:
    """Olmo2ForCausalLM: no norm enters a layer; the last block has the final one."""
    norms = dict(attention_branch_norm="post_attention_layernorm", mlp_branch_norm="post_feedforward_layernorm")
    return flat(llama_modules(config, norms) | {f"blocks.{config.num_layers - 1}.mlp_norm": norm("norm")})


OLMO2 = llama_like(
    "Olmo2ForCausalLM",
    keys=ATTENTION_BIAS,
    sources=olmo2_sources,
    mlp_bias=False,
    qk_norm=True,
    qk_norm_all=True,
    pre_norm=False,
    branch_norm=True,
)._replace(classifiers={SEQUENCE: "score"})

OLMOE = with_experts(
    llama_like(
        "OlmoeForCausalLM",
        keys=ATTENTION_BIAS | EXPERTS | dict(head_width=()),  # the norms of heads are as wide as hidden_size
        sources=expert_sources,
        mlp_bias=False,
        qk_norm=True,
        qk_norm_all=True,
    ),
    clip_qkv=None,
)._replace(classifiers={})
