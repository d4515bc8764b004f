"""Models by name, and from a local Hugging Face config.json."""

from pathlib import Path
from typing import Any

from ...models import config_from_hf
from ...models.config.model import ModelConfig
from ...models.files.directory import read_json
from ..nearest import proposal


def _gpt(width: int, layers: int, heads: int, *, positions: int = 2048, vocab: int = 51200) -> dict[str, Any]:
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


def _bert(width: int, layers: int, heads: int) -> dict[str, Any]:
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
)  # of a config.json, by their short names here


def _decoder(model_type: str, width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """Returns the config of a family of Llama's kind; transformers' defaults stand for the keys that are not here."""
    sizes = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads)
    renamed = {_KEYS.get(name, name): value for name, value in others.items()}
    return dict(model_type=model_type, **sizes, **renamed)


def _llama3(width: int, layers: int, heads: int, *, scaled: float | None = None, **others: Any) -> dict[str, Any]:
    """``scaled``: the factor of the rotary positions, from Llama 3.1 on."""
    scaling = dict(
        rope_type="llama3",
        factor=scaled,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    of_length = dict(positions=8192) if scaled is None else dict(positions=131072, rope_scaling=scaling)
    options = dict(vocab=128256, kv=8, rope_theta=500000.0, rms_norm_eps=1e-5) | of_length | others
    return _decoder("llama", width, layers, heads, **options)


def _qwen25(width: int, layers: int, heads: int, *, vocab: int = 152064, **others: Any) -> dict[str, Any]:
    options = dict(vocab=vocab, positions=32768, rope_theta=1000000.0, rms_norm_eps=1e-6) | others
    return _decoder("qwen2", width, layers, heads, **options)


def _qwen3(width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    options = dict(vocab=151936, positions=40960, kv=8, head_dim=128, rope_theta=1000000.0, rms_norm_eps=1e-6)
    return _decoder("qwen3", width, layers, heads, **options, **others)


def _gemma(model_type: str, width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    options = dict(vocab=256000, positions=8192, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096)
    return _decoder(model_type, width, layers, heads, **(options | others))


def _mistral(width: int, layers: int, *, vocab: int, **others: Any) -> dict[str, Any]:
    options = dict(vocab=vocab, positions=32768, kv=8, rope_theta=1000000.0, sliding_window=None, rms_norm_eps=1e-5)
    return _decoder("mistral", width, layers, 32, **(options | others))


def _olmo2(width: int, layers: int, heads: int, *, ffn: int, kv: int | None = None) -> dict[str, Any]:
    options = dict(vocab=100352, positions=4096, rope_theta=500000.0, rms_norm_eps=1e-6)
    return _decoder("olmo2", width, layers, heads, ffn=ffn, kv=kv or heads, **options)


def _smollm2(width: int, layers: int, heads: int, *, kv: int, ffn: int, rope_theta: float) -> dict[str, Any]:
    options = dict(vocab=49152, positions=8192, tied=True, rms_norm_eps=1e-5, rope_theta=rope_theta)
    return _decoder("llama", width, layers, heads, kv=kv, ffn=ffn, **options)


# As a config.json has them.
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
    "llama3-8b": _llama3(4096, 32, 32, ffn=14336),
    "llama3-70b": _llama3(8192, 80, 64, ffn=28672),
    "llama3.1-8b": _llama3(4096, 32, 32, ffn=14336, scaled=8.0),
    "llama3.1-70b": _llama3(8192, 80, 64, ffn=28672, scaled=8.0),
    "llama3.1-405b": _llama3(16384, 126, 128, ffn=53248, scaled=8.0),
    "llama3.2-1b": _llama3(2048, 16, 32, ffn=8192, scaled=32.0, tied=True, head_dim=64),
    "llama3.2-3b": _llama3(3072, 28, 24, ffn=8192, scaled=32.0, tied=True),
    "llama3.3-70b": _llama3(8192, 80, 64, ffn=28672, scaled=8.0),
    "qwen2.5-0.5b": _qwen25(896, 24, 14, kv=2, ffn=4864, vocab=151936, tied=True),
    "qwen2.5-1.5b": _qwen25(1536, 28, 12, kv=2, ffn=8960, vocab=151936, tied=True),
    "qwen2.5-3b": _qwen25(2048, 36, 16, kv=2, ffn=11008, vocab=151936, tied=True),
    "qwen2.5-7b": _qwen25(3584, 28, 28, kv=4, ffn=18944),
    "qwen2.5-14b": _qwen25(5120, 48, 40, kv=8, ffn=13824),
    "qwen2.5-32b": _qwen25(5120, 64, 40, kv=8, ffn=27648),
    "qwen2.5-72b": _qwen25(8192, 80, 64, kv=8, ffn=29568),
    "qwen3-0.6b": _qwen3(1024, 28, 16, ffn=3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, ffn=6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, ffn=9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, ffn=12288),
    "qwen3-14b": _qwen3(5120, 40, 40, ffn=17408),
    "qwen3-32b": _qwen3(5120, 64, 64, ffn=25600),
    "gemma2-2b": _gemma("gemma2", 2304, 26, 8, kv=4, ffn=9216),
    "gemma2-9b": _gemma("gemma2", 3584, 42, 16, kv=8, ffn=14336),
    "gemma2-27b": _gemma("gemma2", 4608, 46, 32, kv=16, ffn=36864, head_dim=128, query_pre_attn_scalar=144),
    "gemma3-1b": _gemma("gemma3_text", 1152, 26, 4, kv=1, ffn=6912, vocab=262144, positions=32768, sliding_window=512),
    "mistral-7b-v0.1": _mistral(4096, 32, vocab=32000, ffn=14336, rope_theta=10000.0, sliding_window=4096),
    "mistral-7b-v0.3": _mistral(4096, 32, vocab=32768, ffn=14336),
    "mistral-nemo-12b": _mistral(5120, 40, vocab=131072, ffn=14336, head_dim=128, positions=131072),
    "mistral-small-24b": _mistral(5120, 40, vocab=131072, ffn=32768, head_dim=128, rope_theta=100000000.0),
    "olmo2-1b": _olmo2(2048, 16, 16, ffn=8192),
    "olmo2-7b": _olmo2(4096, 32, 32, ffn=11008),
    "olmo2-13b": _olmo2(5120, 40, 40, ffn=13824),
    "olmo2-32b": _olmo2(5120, 64, 40, ffn=27648, kv=8),
    "smollm2-135m": _smollm2(576, 30, 9, kv=3, ffn=1536, rope_theta=100000.0),
    "smollm2-360m": _smollm2(960, 32, 15, kv=5, ffn=2560, rope_theta=100000.0),
    "smollm2-1.7b": _smollm2(2048, 24, 32, kv=32, ffn=8192, rope_theta=130000.0),
    "phi3-mini-4k": _decoder("phi3", 3072, 32, 32, kv=32, ffn=8192, vocab=32064, positions=4096, sliding_window=2047),
    "phi3-medium-4k": _decoder(
        "phi3", 5120, 40, 40, kv=10, ffn=17920, vocab=32064, positions=4096, sliding_window=2047
    ),
    "phi4": _decoder("phi3", 5120, 40, 40, kv=10, ffn=17920, vocab=100352, positions=16384, rope_theta=250000.0),
}


def load_config(name: str) -> ModelConfig:
    """Returns the config for a preset's name, a Hugging Face directory or its config.json.

    ValueError for a name that is none of them, or a model that is not built.
    """
    path = Path(name)
    if name in PRESETS:
        values = PRESETS[name]
    elif path.exists():
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"model {name!r}: no config.json in that directory")
        values = read_json(path.parent, path.name)
    else:
        raise ValueError(
            f"model {name!r} is neither a local config.json nor one of {', '.join(PRESETS)}{proposal(name, PRESETS)}"
        )
    return config_from_hf(values)
