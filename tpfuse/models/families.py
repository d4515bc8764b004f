"""The families of models: what a model_type of transformers fixes, and how its config.json names the rest.

One table.  A Llama-like family is one entry made by :func:`_llama_like`; a family with other tensor names brings a
function beside those of interop/names.py.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ..interop.huggingface.source import Source
from ..interop.names import bert_sources, gpt2_sources, llama_sources

# Which layers may have a sliding window, as a family's config.json tells it: none, all or none, or some.
NO_WINDOW, ONE_WINDOW, WINDOWED_LAYERS = "no window", "one window", "windowed layers"


# What a classification head classifies.
SEQUENCE, TOKEN = PER = "sequence", "token"


class Classes(NamedTuple):
    """A class of transformers that classifies."""

    architecture: str
    output: str  # what it returns
    module: str  # the head's name in it


class Family(NamedTuple):
    """One model_type.

    ``hf_keys``: config field -> its keys in config.json, the first of which is written.  ``hf_optional``: fields that
    config.json may omit, and the values that transformers then takes (None: the config's own default).  ``fixed``:
    fields that the family decides.  ``not_built``: keys of config.json whose other values are errors.
    """

    architecture: str  # the class of transformers with a language-model head
    output: str  # what that class returns
    base_prefix: str  # precedes the base model's tensors in a file of that class
    head_prefixes: tuple[str, ...]  # begin the names that it does not precede
    sources: Callable[[Any], dict[str, Source]]
    hf_keys: dict[str, tuple[str, ...]]
    hf_optional: dict[str, Any]
    fixed: dict[str, Any] = {}
    not_built: dict[str, Any] = {}
    ignorable: tuple[str, ...] = ()  # patterns of tensors that are no parameters
    classifiers: dict[str, str] = {SEQUENCE: "score", TOKEN: "score"}  # the head of a class that classifies
    causal: bool = True
    rotary: bool = False
    windows: str = NO_WINDOW
    transposed: bool = False  # weights are Conv1D's
    scaled_residuals: bool = False  # residual projections start divided by sqrt(2 num_layers)

    @property
    def base_architecture(self) -> str:
        """The class of transformers without a head."""
        return f"{self._stem}Model"

    @property
    def classes(self) -> dict[str, Classes]:
        """The classes of transformers that classify, by what they do."""
        past = "WithPast" if self.causal else ""
        outputs = {SEQUENCE: f"SequenceClassifierOutput{past}", TOKEN: "TokenClassifierOutput"}
        return {
            per: Classes(f"{self._stem}For{per.capitalize()}Classification", outputs[per], module)
            for per, module in self.classifiers.items()
        }

    @property
    def _stem(self) -> str:
        return re.sub(r"(ForCausalLM|LMHeadModel|ForMaskedLM)$", "", self.architecture)


_BERT = Family(
    architecture="BertForMaskedLM",
    output="MaskedLMOutput",
    base_prefix="bert.",
    head_prefixes=("cls.",),
    sources=bert_sources,
    hf_keys=dict(
        vocab_size=("vocab_size",),
        max_positions=("max_position_embeddings",),
        hidden_size=("hidden_size",),
        num_layers=("num_hidden_layers",),
        num_heads=("num_attention_heads",),
        ffn_size=("intermediate_size",),
        activation=("hidden_act",),
        eps=("layer_norm_eps",),
        dropout=("hidden_dropout_prob",),
        attention_dropout=("attention_probs_dropout_prob",),
        embedding_dropout=("hidden_dropout_prob",),
        init_std=("initializer_range",),
        tie_embeddings=("tie_word_embeddings",),
        type_vocab_size=("type_vocab_size",),
        pad_token_id=("pad_token_id",),
    ),
    hf_optional=dict(tie_embeddings=None, init_std=None, pad_token_id=None),
    not_built=dict(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False),
    ignorable=(r"embeddings\.position_ids", r"cls\.seq_relationship\.(weight|bias)"),
    classifiers={SEQUENCE: "classifier", TOKEN: "classifier"},
    causal=False,
)

_GPT2 = Family(
    architecture="GPT2LMHeadModel",
    output="CausalLMOutputWithCrossAttentions",
    base_prefix="transformer.",
    head_prefixes=("lm_head.",),
    sources=gpt2_sources,
    hf_keys=dict(
        vocab_size=("vocab_size",),
        max_positions=("n_positions", "max_position_embeddings", "n_ctx"),
        hidden_size=("n_embd", "hidden_size"),
        num_layers=("n_layer", "num_hidden_layers"),
        num_heads=("n_head", "num_attention_heads"),
        ffn_size=("n_inner", "intermediate_size"),
        activation=("activation_function", "hidden_act"),
        eps=("layer_norm_epsilon", "layer_norm_eps"),
        dropout=("resid_pdrop",),
        attention_dropout=("attn_pdrop",),
        embedding_dropout=("embd_pdrop",),
        init_std=("initializer_range",),
        tie_embeddings=("tie_word_embeddings",),
    ),
    hf_optional=dict(ffn_size=None, tie_embeddings=None, init_std=None),
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
)


def _llama_like(
    architecture: str,
    *,
    keys: dict[str, tuple[str, ...]] | None = None,
    optional: dict[str, Any] | None = None,
    windows: str = NO_WINDOW,
    **fixed: Any,
) -> Family:
    """Returns a family with Llama's names; ``keys``, ``optional`` and ``fixed`` are what differs."""
    shared: dict[str, tuple[str, ...]] = dict(
        vocab_size=("vocab_size",),
        max_positions=("max_position_embeddings",),
        hidden_size=("hidden_size",),
        num_layers=("num_hidden_layers",),
        num_heads=("num_attention_heads",),
        num_kv_heads=("num_key_value_heads",),
        head_width=("head_dim",),
        ffn_size=("intermediate_size",),
        activation=("hidden_act",),
        eps=("rms_norm_eps",),
        attention_dropout=("attention_dropout",),
        init_std=("initializer_range",),
        tie_embeddings=("tie_word_embeddings",),
    )
    omitted = dict(num_kv_heads=None, head_width=None, tie_embeddings=False, init_std=None, attention_dropout=0.0)
    return Family(
        architecture=architecture,
        output="CausalLMOutputWithPast",
        base_prefix="model.",
        head_prefixes=("lm_head.",),
        sources=llama_sources,
        hf_keys=shared | (keys or {}),
        hf_optional=omitted | (optional or {}),
        fixed=dict(norm="rms", gated=True, dropout=0.0, embedding_dropout=0.0) | fixed,
        ignorable=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        rotary=True,
        windows=windows,
    )


_ATTENTION_BIAS: dict[str, tuple[str, ...]] = dict(qkv_bias=("attention_bias",), out_bias=("attention_bias",))

FAMILIES = {
    "gpt2": _GPT2,
    "llama": _llama_like(
        "LlamaForCausalLM",
        keys=_ATTENTION_BIAS | dict(mlp_bias=("mlp_bias",)),
        optional=dict(qkv_bias=False, out_bias=False, mlp_bias=False),
    ),
    "mistral": _llama_like(
        "MistralForCausalLM",
        keys=dict(window=("sliding_window",)),
        optional=dict(window=None),
        windows=ONE_WINDOW,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    ),
    "qwen2": _llama_like("Qwen2ForCausalLM", windows=WINDOWED_LAYERS, qkv_bias=True, out_bias=False, mlp_bias=False),
    "qwen3": _llama_like(
        "Qwen3ForCausalLM",
        keys=_ATTENTION_BIAS,
        optional=dict(qkv_bias=False, out_bias=False, head_width=128),  # not hidden_size / num_heads
        windows=WINDOWED_LAYERS,
        mlp_bias=False,
        qk_norm=True,
    ),
    "bert": _BERT,
}
CAUSAL = tuple(name for name, family in FAMILIES.items() if family.causal)
