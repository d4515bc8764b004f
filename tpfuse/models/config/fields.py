"""The values that each field of a config may have, for configs made by hand and those read from a file alike."""

from collections.abc import Mapping

from ...kernels.gemm.activation import ACTIVATIONS
from ...kernels.norm import KINDS
from ...kernels.runtime.rules import Rule, boolean, instance, integer, integers, number, one_of, optional

MAX_LAYERS = 10_000
MAX_EXPERTS = 1 << 18  # of all layers, each of which has names of its own in a file
MAX_WEIGHT = 1 << 48  # elements: far below what overflows 64 bits, far above what fits anywhere
_PROBABILITY = number(0, 1 - 2**-17, "[)")  # what masks of 16 bits have
_POSITIVE = number(0, 1e6, "(]")

MODEL_FIELDS: dict[str, Rule] = dict(
    vocab_size=integer(),
    max_positions=integer(),
    hidden_size=integer(),
    num_layers=integer(most=MAX_LAYERS),
    num_heads=integer(),
    ffn_size=optional(integer()),
    activation=one_of(sorted(ACTIVATIONS)),
    eps=number(0, 1),
    dropout=_PROBABILITY,
    attention_dropout=_PROBABILITY,
    embedding_dropout=_PROBABILITY,
    init_std=number(0, 1e6),
    tie_embeddings=boolean,
    gated=boolean,
    qkv_bias=boolean,
    out_bias=boolean,
    mlp_bias=boolean,
    rope=optional(instance("a mapping", Mapping)),
    local_rope=optional(instance("a mapping", Mapping)),
    window=optional(integer()),
    layer_types=optional(instance("a list", list, tuple)),
)
GPT_FIELDS = MODEL_FIELDS | dict(
    norm=one_of(KINDS),
    num_kv_heads=optional(integer()),
    head_width=optional(integer()),
    num_experts=optional(integer()),
    experts_per_token=optional(integer()),
    expert_size=optional(integer()),
    shared_size=optional(integer()),
    shared_gate=boolean,
    renormalize=boolean,
    router_bias=boolean,
    mlp_layers=integers,
    balanced=boolean,
    balance_coefficient=number(-1e6, 1e6),
    qk_norm=boolean,
    parallel_residual=boolean,
    pre_norm=boolean,
    branch_norm=boolean,
    qk_norm_kind=one_of(kind for kind, entry in KINDS.items() if not entry.centred),
    qk_norm_all=boolean,
    attention_scalar=optional(_POSITIVE),
    attention_softcap=optional(_POSITIVE),
    logit_softcap=optional(_POSITIVE),
    scaled_embedding=boolean,
)
BERT_FIELDS = MODEL_FIELDS | dict(
    type_vocab_size=integer(least=0),
    pad_token_id=optional(integer(least=-1)),
    positions_skip_padding=boolean,
    head_activation=optional(one_of(sorted(ACTIVATIONS))),
    head_bias=boolean,
    pooling=one_of(("cls", "mean")),
    norm_bias=boolean,
    post_norm=boolean,
)
# Keys of config.json that are no field.
FILE_KEYS: dict[str, Rule] = dict(
    use_sliding_window=boolean,
    max_window_layers=integer(least=0),
    sliding_window_pattern=integer(),
    local_attention=integer(),
    global_attn_every_n_layers=integer(),
    decoder_sparse_step=integer(),
    mlp_only_layers=optional(integers),
)
