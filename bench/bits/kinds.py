"""Kinds of models whose bits are compared, and layouts; tests/bitwise reads them too."""

from typing import Any, NamedTuple

import torch

from tpfuse import TensorParallel, add_lora
from tpfuse.models import BertConfig, GPTConfig
from tpfuse.models.families import FAMILIES
from tpfuse.tools.bits.command import MakeModel
from tpfuse.tools.bits.layouts import Layout

LAYOUTS = Layout(1, True), Layout(2), Layout(2, True), Layout(4), Layout(4, True)

# The rows of a batch, 3 x 13, are padded to 40; the last leaf of the vocabulary has fewer tokens.
ODD: dict[str, Any] = dict(
    hidden_size=112, ffn_size=296, vocab_size=227, num_heads=8, num_layers=2, max_positions=32
)  # fmt: skip
BARE = dict(qkv_bias=False, out_bias=False, mlp_bias=False, gated=True)
ROPE = dict(rope_type="default", rope_theta=1e4)
DROPOUT = dict(dropout=0.1, embedding_dropout=0.1, attention_dropout=0.1)
KINDS: dict[str, Any] = {
    "gpt2": GPTConfig(hidden_size=64, num_heads=8, num_layers=2, vocab_size=96, max_positions=32, **DROPOUT),
    "gpt2 odd": GPTConfig(**ODD, **DROPOUT),
    "llama": GPTConfig(
        family="llama", hidden_size=64, num_heads=16, num_kv_heads=8, num_layers=2, vocab_size=96, ffn_size=176,
        norm="rms", activation="silu", rope=ROPE, tie_embeddings=False, max_positions=32, **BARE, **DROPOUT,
    ),
    "qwen2 odd": GPTConfig(
        family="qwen2", **ODD, num_kv_heads=2, head_width=12, norm="rms", activation="silu", rope=ROPE,
        **BARE | dict(qkv_bias=True), **DROPOUT,
    ),
    "qwen3 odd": GPTConfig(
        family="qwen3", **ODD, num_kv_heads=2, head_width=12, norm="rms", activation="silu", rope=ROPE, qk_norm=True,
        **BARE, **DROPOUT,
    ),
    "gemma odd": GPTConfig(
        family="gemma2", **ODD, num_kv_heads=1, norm="gemma_rms", activation="gelu_tanh", rope=ROPE, branch_norm=True,
        attention_softcap=50.0, logit_softcap=30.0, scaled_embedding=True, **BARE, **DROPOUT,
    ),
    "olmo2 odd": GPTConfig(
        family="olmo2", **ODD, num_kv_heads=4, head_width=12, norm="rms", activation="silu", rope=ROPE, qk_norm=True,
        qk_norm_all=True, pre_norm=False, branch_norm=True, tie_embeddings=False, **BARE, **DROPOUT,
    ),
    "neox odd": GPTConfig(family="gpt_neox", **ODD, rope=ROPE, parallel_residual=True, tie_embeddings=False, **DROPOUT),
    "qwen2 moe odd": GPTConfig(
        family="qwen2_moe", **ODD, num_kv_heads=4, norm="rms", activation="silu", rope=ROPE, num_experts=8,
        experts_per_token=3, shared_size=152, shared_gate=True, balanced=True, balance_coefficient=0.1,
        tie_embeddings=False, **BARE | dict(qkv_bias=True), **DROPOUT,
    ),
    "bert odd": BertConfig(**ODD, **DROPOUT),
}  # fmt: skip

# Where a family's config.json can say it; all else is as transformers has it.
SMALL = ODD | DROPOUT | dict(num_kv_heads=2, head_width=12, window=5)
SMALL |= dict(num_experts=8, experts_per_token=3, expert_size=12, shared_size=24)
FILE_KEYS = dict(local_attention=8, sliding_window_pattern=2, mlp_only_layers=[0])


def small(family: str) -> Any:
    """Returns the configuration of a small model of a family, by its config.json."""
    entry = FAMILIES[family]
    keys = {names[0]: SMALL[field] for field, names in entry.hf_keys.items() if field in SMALL}
    keys |= {key: n for key, n in FILE_KEYS.items() if key in (*entry.defaults, entry.pattern_key)}
    config: Any = GPTConfig if entry.causal else BertConfig
    return config.from_hf(dict(model_type=family) | keys)


SMALL_KINDS = {f"small {family}": small(family) for family in FAMILIES}
ADAPTED_KINDS = {f"{kind} lora": KINDS[kind] for kind in ("gpt2 odd", "qwen2 odd", "qwen2 moe odd")}
HOOKED_KINDS = {f"{kind} hooked": KINDS[kind] for kind in ("gemma odd", "neox odd", "bert odd")}
TRAINED_KINDS = KINDS | ADAPTED_KINDS | HOOKED_KINDS
ALL_KINDS = TRAINED_KINDS | SMALL_KINDS


class MakeKind(NamedTuple):
    """Makes a model of a kind."""

    kind: str
    dtype: torch.dtype
    saving: str

    @property
    def config(self) -> Any:
        return ALL_KINDS[self.kind]

    def __call__(self, tp: TensorParallel) -> Any:
        model = MakeModel(self.config, None, self.dtype, self.saving)(tp)
        if self.kind in ADAPTED_KINDS:
            add_lora(model, rank=3, alpha=6.0)
        if self.kind in HOOKED_KINDS:
            for part in list(model.modules())[1:]:
                part.register_forward_hook(_nothing)
                part.register_full_backward_hook(_nothing)
        return model


def _nothing(*_: Any) -> None:
    """A hook: for its sake a layer runs part by part."""
