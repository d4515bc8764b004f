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


def _llama(width: int, layers: int, heads: int, *, kv_heads: int, ffn: int) -> dict[str, Any]:
    return dict(
        model_type="llama",
        vocab_size=128256,
        max_position_embeddings=8192,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
    )


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
    "llama3-8b": _llama(4096, 32, 32, kv_heads=8, ffn=14336),
    "llama3-70b": _llama(8192, 80, 64, kv_heads=8, ffn=28672),
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
