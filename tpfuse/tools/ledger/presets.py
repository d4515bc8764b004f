"""Models by name, and from a local Hugging Face config.json."""

from pathlib import Path
from typing import Any

from ...models import config_from_hf
from ...models.config.model import ModelConfig
from ...models.files.directory import read_json
from ...models.files.read import CONFIG
from ..nearest import proposal

Config = dict[str, Any]  # the keys and values of a config.json


def _gpt(width: int, layers: int, heads: int, *, positions: int = 2048, vocab: int = 51200) -> Config:
    return dict(
        model_type="gpt2",
        vocab_size=vocab,
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        resid_pdrop=0.1,
        attn_pdrop=0.1,
        embd_pdrop=0.1,
    )


def _bert(width: int, layers: int, heads: int) -> Config:
    return dict(
        model_type="bert",
        vocab_size=30522,
        max_position_embeddings=512,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_act="gelu",
        layer_norm_eps=1e-12,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        type_vocab_size=2,
    )


_KEYS = dict(
    kv="num_key_value_heads",
    ffn="intermediate_size",
    vocab="vocab_size",
    positions="max_position_embeddings",
    tied="tie_word_embeddings",
    experts="num_local_experts",
    chosen="num_experts_per_tok",
)  # of a config.json, by their short names here


def _decoder(model_type: str, sizes: tuple[int, int, int], common: Config, options: Config) -> Config:
    """Returns the config of a family of Llama's kind: width, layers and heads, what its models have in common, and
    this one's options, which go before.  transformers' defaults stand for keys that are not here."""
    config = dict[str, Any](zip(("hidden_size", "num_hidden_layers", "num_attention_heads"), sizes))
    named = {_KEYS.get(name, name): value for name, value in (common | options).items()}
    return dict(model_type=model_type) | config | named


def _scaled(factor: float) -> Config:
    """Returns Llama's rotary positions from 3.1 on."""
    scaling = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    return dict(positions=131072, rope_scaling=scaling | dict(original_max_position_embeddings=8192))


_TIED = dict(tied=True)
_LLAMA3 = dict(vocab=128256, positions=8192, kv=8, rope_theta=500000.0, rms_norm_eps=1e-5)
_LLAMA31 = _LLAMA3 | _scaled(8.0)
_LLAMA32 = _LLAMA3 | _scaled(32.0) | _TIED
_QWEN25 = dict(vocab=152064, positions=32768, rope_theta=1000000.0, rms_norm_eps=1e-6)
_SMALL_QWEN25 = _QWEN25 | dict(vocab=151936) | _TIED
_QWEN2_MOE = dict(vocab=151936, positions=8192, kv=16, rope_theta=1000000.0, num_experts=60, chosen=4)
_QWEN2_MOE |= dict(shared_expert_intermediate_size=5632)
_QWEN3 = dict(vocab=151936, positions=40960, kv=8, head_dim=128, rope_theta=1000000.0, rms_norm_eps=1e-6)
_QWEN3_MOE = _QWEN3 | dict(kv=4, experts=128, chosen=8, norm_topk_prob=True)
_GEMMA2 = dict(vocab=256000, positions=8192, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096)
_GEMMA3 = _GEMMA2 | dict(vocab=262144, positions=32768, sliding_window=512)
_MISTRAL = dict(vocab=32768, positions=32768, kv=8, rope_theta=1000000.0, sliding_window=None, rms_norm_eps=1e-5)
_TEKKEN = _MISTRAL | dict(vocab=131072, head_dim=128)
_MIXTRAL = _MISTRAL | dict(experts=8, chosen=2)
_OLMO2 = dict(vocab=100352, positions=4096, rope_theta=500000.0, rms_norm_eps=1e-6)
_SMOLLM2 = dict(vocab=49152, positions=8192, rms_norm_eps=1e-5, rope_theta=100000.0) | _TIED

# As a config.json has them: base models, and the Instruct models of Llama 3.3, Qwen2.5 and Phi-3.  From Llama 3 on they
# were compared, in sizes, positions and windows, with copies of these files: litgpt/config.py of Lightning-AI/litgpt;
# for OLMo 2 of 1B the olmo2 configuration of facebookresearch/fairseq2, of 32B allenai/OLMo-core's olmo2_32B; for
# Mistral Nemo kevinstephano/thunder_model_blocks.  Models with experts were compared by their numbers of parameters.
PRESETS = {
    "gpt-3m": _gpt(256, 4, 8, positions=512, vocab=256),
    "gpt-10m": _gpt(384, 6, 12, positions=512, vocab=256),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "gpt2": _gpt(768, 12, 12, positions=1024, vocab=50257),
    "gpt2-xl": _gpt(1600, 48, 25, positions=1024, vocab=50257),
    "gpt3-175b": _gpt(12288, 96, 96),
    "gpt-22b": _gpt(6144, 48, 64),
    "gpt-530b": _gpt(20480, 105, 128),
    "gpt-1t": _gpt(25600, 128, 160),
    "llama3-8b": _decoder("llama", (4096, 32, 32), _LLAMA3, dict(ffn=14336)),
    "llama3-70b": _decoder("llama", (8192, 80, 64), _LLAMA3, dict(ffn=28672)),
    "llama3.1-8b": _decoder("llama", (4096, 32, 32), _LLAMA31, dict(ffn=14336)),
    "llama3.1-70b": _decoder("llama", (8192, 80, 64), _LLAMA31, dict(ffn=28672)),
    "llama3.1-405b": _decoder("llama", (16384, 126, 128), _LLAMA31, dict(ffn=53248)),
    "llama3.2-1b": _decoder("llama", (2048, 16, 32), _LLAMA32, dict(ffn=8192, head_dim=64)),
    "llama3.2-3b": _decoder("llama", (3072, 28, 24), _LLAMA32, dict(ffn=8192)),
    "llama3.3-70b": _decoder("llama", (8192, 80, 64), _LLAMA31, dict(ffn=28672)),
    "qwen2.5-0.5b": _decoder("qwen2", (896, 24, 14), _SMALL_QWEN25, dict(kv=2, ffn=4864)),
    "qwen2.5-1.5b": _decoder("qwen2", (1536, 28, 12), _SMALL_QWEN25, dict(kv=2, ffn=8960)),
    "qwen2.5-3b": _decoder("qwen2", (2048, 36, 16), _SMALL_QWEN25, dict(kv=2, ffn=11008)),
    "qwen2.5-7b": _decoder("qwen2", (3584, 28, 28), _QWEN25, dict(kv=4, ffn=18944)),
    "qwen2.5-14b": _decoder("qwen2", (5120, 48, 40), _QWEN25, dict(kv=8, ffn=13824)),
    "qwen2.5-32b": _decoder("qwen2", (5120, 64, 40), _QWEN25, dict(kv=8, ffn=27648)),
    "qwen2.5-72b": _decoder("qwen2", (8192, 80, 64), _QWEN25, dict(kv=8, ffn=29568)),
    "qwen3-0.6b": _decoder("qwen3", (1024, 28, 16), _QWEN3 | _TIED, dict(ffn=3072)),
    "qwen3-1.7b": _decoder("qwen3", (2048, 28, 16), _QWEN3 | _TIED, dict(ffn=6144)),
    "qwen3-4b": _decoder("qwen3", (2560, 36, 32), _QWEN3 | _TIED, dict(ffn=9728)),
    "qwen3-8b": _decoder("qwen3", (4096, 36, 32), _QWEN3, dict(ffn=12288)),
    "qwen3-14b": _decoder("qwen3", (5120, 40, 40), _QWEN3, dict(ffn=17408)),
    "qwen3-32b": _decoder("qwen3", (5120, 64, 64), _QWEN3, dict(ffn=25600)),
    "qwen3-30b-a3b": _decoder("qwen3_moe", (2048, 48, 32), _QWEN3_MOE, dict(ffn=6144, moe_intermediate_size=768)),
    "qwen3-235b-a22b": _decoder("qwen3_moe", (4096, 94, 64), _QWEN3_MOE, dict(ffn=12288, moe_intermediate_size=1536)),
    "qwen1.5-moe-a2.7b": _decoder("qwen2_moe", (2048, 24, 16), _QWEN2_MOE, dict(ffn=5632, moe_intermediate_size=1408)),
    "gemma2-2b": _decoder("gemma2", (2304, 26, 8), _GEMMA2, dict(kv=4, ffn=9216)),
    "gemma2-9b": _decoder("gemma2", (3584, 42, 16), _GEMMA2, dict(kv=8, ffn=14336)),
    "gemma2-27b": _decoder(
        "gemma2", (4608, 46, 32), _GEMMA2, dict(kv=16, ffn=36864, head_dim=128, query_pre_attn_scalar=144)
    ),
    "gemma3-1b": _decoder("gemma3_text", (1152, 26, 4), _GEMMA3, dict(kv=1, ffn=6912)),
    "mistral-7b-v0.1": _decoder(
        "mistral", (4096, 32, 32), _MISTRAL, dict(vocab=32000, ffn=14336, rope_theta=10000.0, sliding_window=4096)
    ),
    "mistral-7b-v0.3": _decoder("mistral", (4096, 32, 32), _MISTRAL, dict(ffn=14336)),
    "mistral-nemo-12b": _decoder("mistral", (5120, 40, 32), _TEKKEN, dict(ffn=14336, positions=128000)),
    "mistral-small-24b": _decoder("mistral", (5120, 40, 32), _TEKKEN, dict(ffn=32768, rope_theta=100000000.0)),
    "mixtral-8x7b": _decoder("mixtral", (4096, 32, 32), _MIXTRAL, dict(vocab=32000, ffn=14336)),
    "mixtral-8x22b": _decoder("mixtral", (6144, 56, 48), _MIXTRAL, dict(ffn=16384, positions=65536)),
    "olmo2-1b": _decoder("olmo2", (2048, 16, 16), _OLMO2, dict(ffn=8192, kv=16)),
    "olmo2-7b": _decoder("olmo2", (4096, 32, 32), _OLMO2, dict(ffn=11008, kv=32)),
    "olmo2-13b": _decoder("olmo2", (5120, 40, 40), _OLMO2, dict(ffn=13824, kv=40)),
    "olmo2-32b": _decoder("olmo2", (5120, 64, 40), _OLMO2, dict(ffn=27648, kv=8)),
    "olmoe-1b-7b": _decoder("olmoe", (2048, 16, 16), dict(vocab=50304, positions=4096), dict(ffn=1024)),
    "smollm2-135m": _decoder("llama", (576, 30, 9), _SMOLLM2, dict(kv=3, ffn=1536)),
    "smollm2-360m": _decoder("llama", (960, 32, 15), _SMOLLM2, dict(kv=5, ffn=2560)),
    "smollm2-1.7b": _decoder("llama", (2048, 24, 32), _SMOLLM2, dict(kv=32, ffn=8192, rope_theta=130000.0)),
    "phi3-mini-4k": _decoder(
        "phi3", (3072, 32, 32), dict(vocab=32064, positions=4096, sliding_window=2047), dict(kv=32, ffn=8192)
    ),
    "phi4": _decoder(
        "phi3", (5120, 40, 40), dict(vocab=100352, positions=16384, rope_theta=250000.0), dict(kv=10, ffn=17920)
    ),
}


def config_file(name: str) -> Path | None:
    """Returns the config.json of the Hugging Face directory that a model's name stands for, or that the name is itself;
    None for a preset's name, where no directory has it.

    ValueError for a name that is none of them.
    """
    path = Path(name)
    inside = path / CONFIG
    if inside.is_file():
        return inside
    if name in PRESETS:
        return None
    if not path.exists():
        raise ValueError(
            f"model {name!r} is neither a local config.json nor one of {', '.join(PRESETS)}{proposal(name, PRESETS)}"
        )
    if not path.is_file():
        raise ValueError(f"model {name!r}: no config.json in that directory")
    return path


def load_config(name: str) -> ModelConfig:
    """Returns the config for a Hugging Face directory, its config.json or a preset's name.

    ValueError for a name that is none of them, or a model that is not built.
    """
    path = config_file(name)
    return config_from_hf(PRESETS[name] if path is None else read_json(path.parent, path.name))
