"""Valid directories of every family, and ways to spoil them, drawn by a seed."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tpfuse import add_lora, save_adapter
from tpfuse.models import GPT, Bert, BertConfig, GPTConfig
from tpfuse.models.files import write

SIZES = dict(vocab_size=11, max_positions=16, hidden_size=8, num_layers=2, num_heads=2, ffn_size=12)
ROPE = dict(rope_type="default", rope_theta=10000.0)
LONG = dict(ROPE, rope_type="longrope", short_factor=[1.0, 2.0], long_factor=[3.0, 4.0])
LONG |= dict(original_max_position_embeddings=4)
LLAMA = dict(norm="rms", gated=True, out_bias=False, mlp_bias=False, dropout=0.0, embedding_dropout=0.0, rope=ROPE)
CONFIGS: dict[str, Any] = {
    "gpt2": GPTConfig(**SIZES),
    "llama": GPTConfig(family="llama", qkv_bias=False, num_kv_heads=1, **LLAMA, **SIZES),
    "mistral": GPTConfig(family="mistral", qkv_bias=False, window=4, **LLAMA, **SIZES),
    "qwen2": GPTConfig(family="qwen2", **LLAMA, **SIZES),
    "qwen3": GPTConfig(family="qwen3", qkv_bias=False, qk_norm=True, head_width=6, **LLAMA, **SIZES),
    "starcoder2": GPTConfig(family="starcoder2", rope=ROPE, **SIZES),
    "phi3": GPTConfig(family="phi3", qkv_bias=False, num_kv_heads=1, **LLAMA | dict(rope=LONG), **SIZES),
    "gpt_neox": GPTConfig(
        family="gpt_neox", parallel_residual=True, rope=ROPE | dict(partial_rotary_factor=0.5), **SIZES
    ),
    "bert": BertConfig(**SIZES),
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def make(family: str) -> Any:
    config = CONFIGS[family]
    return Bert(config) if family == "bert" else GPT(config)


def valid_bases(folder: Path) -> list[Path]:
    """One directory a family, and one in shards."""
    for family in CONFIGS:
        make(family).save_pretrained(folder / family)
    with mock.patch.object(write, "MAX_SHARD_BYTES", 1000):
        make("llama").save_pretrained(folder / "shards")
    return sorted(folder.iterdir())


def valid_adapters(folder: Path) -> list[Path]:
    """Adapters of the Llama model."""
    save_adapter(add_lora(make("llama"), rank=2, alpha=4), folder / "llama")
    return [folder / "llama"]


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 7, 1.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")),
    *(1 << 20, 1 << 31, (1 << 31) - 1, 10**9, 1 << 63, 1 << 64, 10**30, -(10**90), 10**400),
    *("", "0.1", "2", "\ud800", "\U0001f600", "\0", "x" * 100_000, "../x", "full_attention", "gelu", "LORA", "yarn"),
    *([], [1], [[]], ["full_attention"], ["x"] * 5000, {}, {"a": 1}, {"rope_type": "yarn"}, [None, {"a": [1.0]}]),
]
ROPE_TYPES = "default", "linear", "dynamic", "llama3", "yarn", "longrope", "x"
ROPE_KEYS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast"),
    *("beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"),
    *("max_position_embeddings", "short_factor", "type", "rope_type"),
)
NAMES = (
    *(
        "../outside/model.safetensors",
        "/dev/zero",
        "a/b.safetensors",
        "",
        ".",
        "..",
        ".x.safetensors",
        "x\0.safetensors",
    ),
    *("..\\x.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors", "config.json", 1, None, [], {}),
)
HEADERS: dict[str, list[Any]] = dict(
    dtype=["I8", "F8_E4M3", "F16", "BOOL", "C64", "F4"],
    shape=[[0], [1] * 2000, [1 << 62, 4], [96]],
    data_offsets=[[0, 0], [8, 4]],
)


def deep(depth: int) -> Any:
    value: Any = 1
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


# ---- JSON ----


def any_value(draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.1:
        return deep(draw.choice([20, 63, 64, 65, 200, 400]))
    if kind < 0.2:
        return draw.choice([1, -1]) * draw.getrandbits(draw.choice([3, 8, 16, 31, 33, 64, 100]))
    if kind < 0.3:
        return draw.uniform(-2, 2) * 10.0 ** draw.randrange(-30, 30)
    return draw.choice(VALUES)


def spoilt_object(draw: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    key = draw.choice(sorted(value))
    kind = draw.randrange(8)
    if kind < 4:
        value[key] = any_value(draw)
    elif kind == 4:
        del value[key]
    elif kind == 5:
        value[draw.choice(["", "\ud800", key.upper(), "x" * 1000])] = value.pop(key)
    elif kind == 6:
        other = draw.choice(sorted(value))
        value[key], value[other] = value[other], value[key]
    else:
        rope = dict(ROPE, rope_type=draw.choice(ROPE_TYPES), factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0)
        rope |= {k: any_value(draw) for k in draw.sample(ROPE_KEYS, draw.randrange(4))}
        value[draw.choice(["rope_parameters", "rope_scaling"])] = rope
    return value


def spoil_json(draw: random.Random, file: Path) -> None:
    value = json.loads(file.read_text())
    for _ in range(draw.randint(1, 3)):
        if value and isinstance(value, dict):  # which an earlier fault may have replaced
            value = spoilt_object(draw, value)
    file.write_text(json.dumps(value))


def spoil_text(draw: random.Random, file: Path) -> None:
    text = file.read_bytes()
    forms: list[Callable[[], bytes]] = [
        lambda: b"[" * 10 ** draw.randrange(1, 6),
        lambda: b'{"a":' * 10 ** draw.randrange(1, 6) + b"1" + b"}" * 10,
        lambda: text[: draw.randrange(len(text))],
        lambda: b"",
        lambda: b"\xef\xbb\xbf" + text,
        lambda: text.decode().encode("utf-16"),
        lambda: text.replace(b"2", b"2" * 10 ** draw.randrange(1, 5), 1),
        lambda: text + b" " * (9 << 20),
        lambda: b"[" + b"[]," * (2 << 20) + b"1]",
        lambda: text.replace(b"}", b', "n_layer": 2, "vocab_size": 11}', 1),
        lambda: json.dumps(any_value(draw)).encode(),
    ]
    file.write_bytes(draw.choice(forms)())


def spoil_index(draw: random.Random, file: Path) -> None:
    value = json.loads(file.read_text())
    files = value["weight_map"]
    for key in draw.sample(sorted(files), draw.randint(1, 3)):
        files[key] = draw.choice(NAMES)
    file.write_text(json.dumps(value))


# ---- safetensors ----


def flip(draw: random.Random, file: Path) -> None:
    data = bytearray(file.read_bytes())
    if data:
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(min(len(data), draw.choice([8, 200, len(data)])))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def cut(draw: random.Random, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data) + 1)] + b"x" * draw.choice([0, 0, 1, 100]))


def spoil_header(draw: random.Random, file: Path) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for _ in range(draw.randint(1, 2)):
        name = draw.choice(sorted(header))
        kind = draw.randrange(6)
        if kind == 0:
            header[draw.choice(["", "\0", "\u202e" + name, name.upper(), "x" * 100_000, "a\nb"])] = header.pop(name)
        elif kind == 1:
            header[name] = any_value(draw)
        elif kind == 2:
            header[name] = header[draw.choice(sorted(header))]
        elif isinstance(header[name], dict):
            key = draw.choice(["dtype", "shape", "data_offsets"])
            header[name][key] = draw.choice([*HEADERS[key], any_value(draw)])
    text = json.dumps(header).encode()
    size = draw.choice([len(text)] * 6 + [0, len(text) + 1, 1 << 27, (1 << 64) - 1])
    file.write_bytes(size.to_bytes(8, "little") + text + data[8 + length :])


# ---- the directory ----


def replace(draw: random.Random, file: Path) -> None:
    outside = file.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    shutil.copyfile(file, outside / file.name)
    file.unlink()
    kinds: list[Callable[[], Any]] = [
        lambda: os.mkfifo(file),
        lambda: file.mkdir(),
        lambda: file.symlink_to(file.name),
        lambda: file.symlink_to("nowhere"),
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to(f"../outside/{file.name}"),
        lambda: file.symlink_to(draw.choice(sorted(os.listdir(file.parent)) or ["."])),
        lambda: None,
        lambda: os.truncate(os.open(file, os.O_CREAT | os.O_WRONLY), 1 << 36),
    ]
    draw.choice(kinds)()


def spoil(seed: int, bases: list[Path], target: Path) -> str:
    """Makes ``target`` a spoilt copy of one of the directories; returns what was done."""
    draw = random.Random(seed)
    base = draw.choice(bases)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
    done = []
    for _ in range(draw.choice([1, 1, 1, 2])):
        files = [file for file in sorted(target.iterdir()) if file.is_file() and not file.is_symlink()]
        if not files:
            break
        file = draw.choice([f for f in files if f.suffix == ".json" and f.name != INDEX] * 4 + files)
        if file.stat().st_size > 1 << 20:
            continue
        ways = [spoil_json] * 6 + [spoil_text] * 2 + [spoil_index] * 3 * (file.name == INDEX)
        ways = ways if file.suffix == ".json" else [spoil_header] * 4 + [cut]
        way = draw.choice([*ways, flip, replace])
        try:
            way(draw, file)
        except (ValueError, RecursionError, TypeError, AttributeError, KeyError):  # spoilt before: not what it was
            way = cut
            cut(draw, file)
        done.append(f"{way.__name__} {file.name}")
    return f"{base.name}: {', '.join(done)}"
