"""What a directory of unknown origin can and cannot do, case by case.

Spans: tpfuse/models/files, tpfuse/training/checkpoint and tpfuse/interop, whose readers meet the same spoilt files.
"""

import errno
import functools
import json
import os
import re
import shutil
import stat
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.attack import spoil
from tests.models.theirs import make as theirs
from tpfuse import add_lora, load_adapter, parallelize, save_adapter
from tpfuse.kernels.runtime.rules import quoted
from tpfuse.models import GPT, GPTConfig
from tpfuse.models.files import directory, disk

WEIGHTS, INDEX = spoil.WEIGHTS, spoil.INDEX


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return {path.name: path for path in spoil.valid_bases(tmp_path_factory.mktemp("valid"))}


@pytest.fixture
def copy(bases, tmp_path):
    """``copy(family, **changes)`` -> a copy of a valid directory with changes of its config.json."""

    def make(family, **changes):
        path = tmp_path / "m"
        shutil.copytree(bases[family], path)
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return path

    return make


@pytest.fixture
def small():
    """What a refusal may allocate."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def refused(path, match, cls=GPT):
    with pytest.raises((ValueError, OSError), match=match) as caught:
        cls.from_pretrained(path)
    said = str(caught.value)
    assert said.isprintable() and len(said) < 1000 and not isinstance(caught.value, UnicodeError)
    return said


# ---- config.json ----

NOT_SIZES = ("2", [2], {}, True, 2.0, 1 << 63, 10**30, -1, 0, float("nan"))
FIELDS = [
    *(("gpt2", key, value) for key in ("n_layer", "n_embd", "n_head", "vocab_size", "n_inner") for value in NOT_SIZES),
    *(("llama", key, value) for key in ("num_key_value_heads", "head_dim") for value in NOT_SIZES),
    *(("bert", "type_vocab_size", value) for value in NOT_SIZES),
    *(("gpt2", "resid_pdrop", value) for value in ("0.1", [0.1], True, float("nan"), -0.1, 10**90)),
    *(("gpt2", "layer_norm_epsilon", value) for value in ("1e-5", float("nan"), float("inf"), -1e-5)),
    *(("gpt2", "initializer_range", value) for value in ("0.02", [0.02], float("nan"), float("inf"), -0.02)),
    *(("gpt2", "activation_function", value) for value in (["gelu"], {}, 1, "\ud800")),
    *(("gpt2", "model_type", value) for value in (["gpt2"], {}, 1, "\ud800")),
    *(("gpt2", "tie_word_embeddings", value) for value in ("no", 1, [])),
    *(("qwen2", "use_sliding_window", value) for value in ("yes", 1)),
    *(("mistral", "sliding_window", value) for value in ("4", True, [4])),
    ("llama", "attention_bias", "no"),
]


@pytest.mark.parametrize("family, key, value", FIELDS, ids=lambda v: quoted(v)[:24])
def test_a_value_of_another_type_or_range_is_refused_by_name(copy, small, family, key, value):
    path = copy(family, **{key: value})
    said = refused(path, "must be|must lie in|is not built", spoil.Bert if family == "bert" else GPT)
    assert str(path / "config.json") in said
    assert key in said or any(word in said for word in ("activation", "vocab_size", "window"))


@pytest.mark.parametrize("value", ["x", [1], 1, True])
def test_rope_parameters_are_an_object(copy, value):
    refused(copy("llama", rope_parameters=value), "rope_parameters must be an object, got")


ROPES = [
    *(dict(rope_theta=value) for value in ("1e4", [1e4], float("nan"), float("inf"), -1.0, 0, 1, True, 10**90)),
    *(dict(rope_type=value) for value in ("su", ["yarn"], {})),
    *(dict(rope_type="linear", factor=value) for value in ("2", 0, -1.0, float("nan"), float("inf"), [2.0])),
    *(dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=value) for value in ("8", 0, 8.5, -8, True)),
    dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=8, rope_theta=1),
    dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=8, beta_fast=1e-320),
    dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=8, truncate="no"),
    dict(rope_type="llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=1.0),
    dict(rope_type="dynamic", factor=2.0, max_position_embeddings="16"),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: str(rope)[:60])
def test_rotary_parameters_of_another_type_or_range(copy, rope):
    refused(copy("llama", rope_parameters=spoil.ROPE | rope), "must be|must lie in|is not built")


@pytest.mark.parametrize(
    "change",
    [
        dict(hidden_size=True), dict(dropout="0.1"), dict(eps=float("nan")), dict(init_std=[0.02]), dict(rope="x"),
        dict(gated=1), dict(norm=["rms"]), dict(activation=None), dict(window=0.5), dict(layer_types=3),
        dict(layer_types=[[], []], window=2), dict(family=["gpt2"]), dict(hidden_size=None, ffn_size=None),
        dict(num_layers=10**9), dict(hidden_size=10**5000), dict(vocab_size=1 << 30, hidden_size=1 << 30, num_heads=1),
        dict(family="llama", rope=spoil.ROPE, head_width=10**9), dict(tie_embeddings="no"),
    ],
    ids=lambda change: quoted(change)[:40],
)  # fmt: skip
def test_configs_made_by_hand_have_the_same_rules(small, change):
    with pytest.raises(ValueError, match="must be|must lie in|elements"):
        replace(GPTConfig(**spoil.SIZES), **change)


@pytest.mark.parametrize("change", [dict(n_layer=10**9), dict(n_layer=9_999), dict(n_embd=10**9, n_head=1)], ids=str)
def test_sizes_that_the_tensors_do_not_bear_out_cost_nothing(copy, small, change):
    refused(copy("gpt2", **change), r"num_layers|elements")


def test_a_head_of_any_width_costs_nothing(copy, small):
    refused(copy("llama", head_dim=10**9), "head_width must be at most 65536, got 1000000000")


TEXTS = {
    "deep": (b'{"a":' * 90_000 + b"1" + b"}" * 90_000, "not valid JSON"),
    "many lists": (b"[" + b"[]," * (2 << 20) + b"1]", "at most 100000 lists and objects, got 2097153"),
    "rather deep": (b'{"a":' * 100 + b"1" + b"}" * 100, "nested at most 64 deep"),
    "long": (b"{" + b" " * (9 << 20) + b"}", "at most 8388608 bytes"),
    "digits": (b'{"a":' + b"1" * 4000 + b"}", "at most 100 digits"),
    "not unicode": (b'{"a": "\xff"}', "not valid JSON"),
    "a list": (b"[]", "must hold a JSON object, got list"),
}


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("file", ["config.json", INDEX, "adapter_config.json"])
def test_json_has_limits(copy, tmp_path, file, case):
    text, match = TEXTS[case]
    path = copy("shards" if file == INDEX else "llama")
    (path / file).write_bytes(text)
    if file == "adapter_config.json":
        with pytest.raises(ValueError, match=match):
            load_adapter(spoil.make("llama"), path)
    else:
        refused(path, match)


def test_a_key_twice_is_the_last(copy):
    path = copy("gpt2")
    file = path / "config.json"
    file.write_text('{"n_layer": "x", ' + file.read_text().lstrip()[1:])
    assert GPT.from_pretrained(path).config.num_layers == 2


# ---- which files ----


@pytest.mark.parametrize("name", spoil.NAMES, ids=lambda name: repr(name)[:30])
def test_an_index_names_plain_files_only(copy, name):
    path = copy("shards")
    index = json.loads((path / INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    (path.parent / "outside").mkdir()
    shutil.copyfile(path / first, path.parent / "outside" / "model.safetensors")
    index["weight_map"] = {k: name if v == first else v for k, v in index["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(index))
    refused(path, "not a valid index: weight_map must map tensors to plain names of .safetensors files beside it")


def test_an_absolute_path_is_no_plain_name(copy):
    path = copy("shards")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = {k: str(path / v) for k, v in index["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(index))
    refused(path, "plain names")


def test_a_tensor_in_two_files_is_refused(copy):
    path = copy("shards")
    index = json.loads((path / INDEX).read_text())
    shutil.copyfile(path / index["weight_map"]["model.norm.weight"], path / "more.safetensors")
    index["weight_map"]["x"] = "more.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    refused(path, "holds .* twice, in model-.* and more.safetensors")


@pytest.mark.parametrize("file", ["config.json", WEIGHTS, INDEX, "adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop", "dangling"])
def test_only_regular_files_are_opened(copy, tmp_path, file, kind):
    adapter = file.startswith("adapter")
    path = copy("shards" if file == INDEX else "llama")
    if adapter:
        save_adapter(add_lora(spoil.make("llama"), rank=2, alpha=4), path)
    place = path / file
    place.unlink()
    {
        "pipe": lambda: os.mkfifo(place),
        "folder": place.mkdir,
        "device": lambda: place.symlink_to("/dev/zero"),
        "loop": lambda: place.symlink_to(file),
        "dangling": lambda: place.symlink_to("nowhere"),
    }[kind]()
    if adapter:
        with pytest.raises(ValueError, match=f"must hold adapter_config.json .*{file}"):
            load_adapter(spoil.make("llama"), path)
    else:
        refused(path, "has no config.json|has neither")


def test_a_shard_that_is_a_pipe(copy):
    path = copy("shards")
    shard = sorted(path.glob("model-*"))[0]
    shard.unlink()
    os.mkfifo(shard)
    refused(path, "must be a regular file")


@pytest.mark.parametrize("file", ["config.json", WEIGHTS])
def test_a_link_out_of_the_directory_is_not_followed(copy, tmp_path, file):
    path = copy("llama")
    (path / file).rename(tmp_path / "elsewhere")
    (path / file).symlink_to("../elsewhere")
    refused(path, "is a link to .*elsewhere, outside its directory, which is not followed")
    (path / file).unlink()
    (tmp_path / "elsewhere").rename(path / "inside")
    (path / file).symlink_to("inside")
    GPT.from_pretrained(path)


def test_the_hubs_cache_is_read(copy, tmp_path):
    """``snapshots/<revision>/`` holds links into ``blobs/``, and is often reached by a link."""
    path, hub = copy("llama"), tmp_path / "models--a--b"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "0123").mkdir(parents=True)
    for i, file in enumerate(sorted(path.iterdir())):
        file.rename(hub / "blobs" / f"{i}")
        (hub / "snapshots" / "0123" / file.name).symlink_to(f"../../blobs/{i}")
    (tmp_path / "mine").symlink_to(hub / "snapshots" / "0123")
    for folder in (hub / "snapshots" / "0123", tmp_path / "mine"):
        GPT.from_pretrained(folder)


def test_a_header_has_a_limit_and_an_error_is_short(copy):
    path = copy("gpt2")
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes((17 << 20).to_bytes(8, "little") + data[8:] + b" " * (17 << 20))
    refused(path, "at most 16777216 bytes of header")
    (path / WEIGHTS).write_bytes(data)
    tensors = load_file(path / WEIGHTS)
    odd = "\u202ex\n" + "y" * 100_000
    save_file(tensors | {f"transformer.h.0.{odd}": torch.ones(1)}, path / WEIGHTS)
    refused(path, "which GPT has no place for")
    save_file(tensors | {odd: torch.ones(1)}, path / WEIGHTS)
    with pytest.warns(UserWarning, match="of no module of GPT: not read") as caught:
        GPT.from_pretrained(path)
    assert len(text := str(caught[0].message)) < 1000 and text.isprintable()


def test_a_file_larger_than_memory_is_an_oserror(copy, monkeypatch):
    """A sparse file costs nobody anything."""
    path = copy("gpt2")

    def full(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("tpfuse.models.files.source.rearrange", full)
    with pytest.raises(OSError, match="from_pretrained: .*weight in .* cannot be read: .*can't allocate memory"):
        GPT.from_pretrained(path)


# ---- adapters ----


@pytest.fixture
def adapter(tmp_path):
    """``adapter(**changes)`` -> a directory with changes of its adapter_config.json."""

    def make(**changes):
        path = tmp_path / "a"
        save_adapter(add_lora(spoil.make("llama"), rank=2, alpha=4), path)
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return path

    return make


def rejected(path, match):
    """Nothing of the model has changed."""
    model = spoil.make("llama")
    model.head.requires_grad_(False)
    state, flags = dict(model.state_dict()), [p.requires_grad for p in model.parameters()]
    with pytest.raises((ValueError, OSError), match=match) as caught:
        load_adapter(model, path, trainable=True)
    assert model.state_dict().keys() == state.keys() and [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert str(path) in str(caught.value)


ADAPTERS = [
    *(("r", value) for value in NOT_SIZES),
    *(("lora_alpha", value) for value in ("4", [4], None, True, float("nan"), float("inf"), -1.0, 10**90)),
    *(("lora_dropout", value) for value in ("0", [0], float("nan"), 1.0)),
    ("use_rslora", "no"), ("peft_type", ["LORA"]), ("bias", {}), ("rank_pattern", "\ud800"),
]  # fmt: skip


@pytest.mark.parametrize("key, value", ADAPTERS, ids=lambda v: quoted(v)[:24])
def test_an_adapters_config_is_checked(adapter, key, value):
    rejected(adapter(**{key: value}), f"adapter_config.json: {key}(=| must)")


def test_an_adapter_of_any_rank_costs_nothing(adapter, small):
    rejected(adapter(r=2_000_000), r"lora_A.weight in .* must be \(2000000, 12\), got \(2, 12\)")


def test_a_tensor_of_any_rank_costs_nothing(adapter):
    """Its other size is one, so that it is small, and what it would be taken for is not."""
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    path = change(adapter(r=2_000_000), lambda t: t.update({name: torch.ones(2_000_000, 1)}))
    rejected(path, r"lora_A.weight in .* must be \(2000000, 12\), got \(2000000, 1\)")


def change(path, edit):
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    return path


def test_an_adapters_tensors_are_checked(adapter):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    rejected(change(adapter(), lambda t: t.update({name: t[name].to(torch.int8)})), "must be one of .*F32.* got I8")
    rejected(change(adapter(), lambda t: t.clear()), "holds no adapter")
    short = name.replace("model.layers.0.self_attn.", "")  # an ending of many modules' names
    rejected(change(adapter(), lambda t: t.update({short: torch.ones(2, 8)})), "no layer is called q_proj")


def test_an_adapter_that_cannot_be_read_changes_nothing(adapter, monkeypatch):
    def full(*args, **kwargs):
        raise RuntimeError("can't allocate memory")

    path = adapter()
    monkeypatch.setattr("tpfuse.models.files.source.rearrange", full)
    rejected(path, "load_adapter: .* cannot be read: can't allocate memory")


# ---- parallelize ----


@pytest.mark.parametrize(
    "key, value",
    [("num_hidden_layers", 10**9), ("num_hidden_layers", 9_999), ("rms_norm_eps", float("nan")), ("head_dim", "4"),
     ("hidden_act", ["silu"]), ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1, "factor": 2.0})],
    ids=str,
)  # fmt: skip
def test_parallelize_checks_the_same(small, key, value):
    model = theirs("llama")
    object.__setattr__(model.config, key, value)
    with pytest.raises(ValueError, match="must be|must lie in|too few for num_layers|is not built"):
        parallelize(model)
    assert model.model.layers is not None


# ---- saving ----


def saved(model, path):
    model.save_pretrained(path)
    return sorted(file.name for file in path.iterdir())


def test_leftovers_are_neither_used_nor_published(tmp_path):
    model, out, other = spoil.make("gpt2"), tmp_path / "out", tmp_path / "other"
    other.mkdir()
    (other / "secret").write_text("mine")
    (out / ".saving-old").mkdir(parents=True)
    (out / ".saving-old" / "stale.txt").write_text("old")
    (out / f".saving-{os.getpid()}").symlink_to(other)  # where an older version kept its files
    names = saved(model, out)
    assert "stale.txt" not in names and "secret" not in names and (other / "secret").read_text() == "mine"
    save_adapter(add_lora(model, rank=2, alpha=4), out)
    assert sorted(os.listdir(out)) == sorted([*names, "adapter_config.json", "adapter_model.safetensors"])
    assert os.listdir(other) == ["secret"] and GPT.from_pretrained(out).config == model.config


def test_a_link_under_a_final_name_is_replaced(tmp_path):
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_text("mine")
    names = [WEIGHTS, "config.json", "model-00001-of-00002.safetensors"]
    for name in names:
        (out / name).symlink_to(victim)
    assert saved(spoil.make("gpt2"), out) == ["config.json", WEIGHTS]
    assert victim.read_text() == "mine" and not any((out / name).is_symlink() for name in names)


def test_parallelized_models_write_no_link_through(tmp_path):
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_text("mine")
    (out / "generation_config.json").symlink_to(victim)
    parallelize(theirs("llama")).save_pretrained(out)
    assert victim.read_text() == "mine" and json.loads((out / "generation_config.json").read_text())


def test_tokenizer_files_of_others_are_not_copied(copy, tmp_path):
    path = copy("gpt2")
    (tmp_path / "secret").write_text("mine")
    (path / "tokenizer.json").symlink_to("../secret")
    os.mkfifo(path / "vocab.json")
    (path / "merges.txt").write_text("own")
    model = GPT.from_pretrained(path)
    with pytest.warns(UserWarning) as warned:
        names = saved(model, tmp_path / "out")
    said = "\n".join(str(w.message) for w in warned)
    assert names == ["config.json", "merges.txt", WEIGHTS]
    assert re.search("tokenizer.json is a link to .*secret, outside .* is not copied", said) and "vocab.json" in said


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_of_any_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        spoil.make("gpt2").save_pretrained(tmp_path / "m")
        save_adapter(add_lora(spoil.make("gpt2"), rank=2, alpha=4), tmp_path / "m")
    finally:
        os.umask(before)
    files = list((tmp_path / "m").iterdir())
    assert len(files) == 4 and {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~mask}


def cannot(world, path, act, kind):
    """-> type and text of the error, and how many tensors were gathered before."""
    from tests.common import make_tp
    from tpfuse.interop import adapter
    from tpfuse.models.files import write

    model, gathered = GPT(spoil.CONFIGS["gpt2"], tp=make_tp(world)), []
    whole = write.full_tensor
    counted = lambda *args: gathered.append(1) or whole(*args)
    if act == "save_adapter":
        add_lora(model, rank=2, alpha=4)
    mkdtemp = disk.tempfile.mkdtemp
    if kind == "read-only":

        def refuse(*args, **kwargs):
            raise PermissionError(30, "Read-only file system", path)

        disk.tempfile.mkdtemp = refuse
    write.full_tensor = adapter.full_tensor = counted
    try:
        with pytest.raises(OSError) as caught:
            save_adapter(model, path) if act == "save_adapter" else model.save_pretrained(path)
    finally:
        disk.tempfile.mkdtemp = mkdtemp
        write.full_tensor = adapter.full_tensor = whole
    return type(caught.value), str(caught.value), len(gathered)


@pytest.mark.parametrize("act", ["save_pretrained", "save_adapter"])
@pytest.mark.parametrize("kind", ["file", pytest.param("read-only", marks=pytest.mark.slow)])
def test_a_target_that_cannot_be_written_is_an_oserror_on_every_rank(ranks, tmp_path, act, kind):
    path = tmp_path / "a" / "b"
    if kind == "file":
        path.parent.mkdir()
        path.write_text("mine")
    first, second = ranks(2, cannot, str(path), act, kind)
    said = "exists and is not a directory" if kind == "file" else "Read-only file system"
    assert first == second and first[0] is OSError and first[2] == 0
    assert first[1].startswith(f"{act}: {path} cannot be written: ") and said in first[1]
    assert path.read_text() == "mine" if kind == "file" else os.listdir(tmp_path) == []


def test_a_failed_save_leaves_nothing(tmp_path):
    model = spoil.make("gpt2")
    (tmp_path / "m" / "config.json").mkdir(parents=True)
    with pytest.raises(OSError) as caught:
        model.save_pretrained(tmp_path / "m")
    place = tmp_path / "m" / "config.json"
    assert str(caught.value) == f"save_pretrained: {place} cannot be written: it is a directory"
    assert os.listdir(tmp_path / "m") == ["config.json"]


def test_what_safetensors_cannot_write_is_an_oserror(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise directory.SafetensorError("No space left on device")

    adapted = add_lora(spoil.make("gpt2"), rank=2, alpha=4)
    monkeypatch.setattr(disk.safetensors, "save_file", full)
    for write in (spoil.make("gpt2").save_pretrained, functools.partial(save_adapter, adapted)):
        with pytest.raises(OSError, match="cannot be written: No space left on device"):
            write(tmp_path / "m" / "n")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_named_by_the_file(tmp_path, monkeypatch):
    """Also where it is a config that finds no place, of which the system's error has no name."""

    def full(file, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    adapted = add_lora(spoil.make("gpt2"), rank=2, alpha=4)
    monkeypatch.setattr(Path, "write_text", full)
    saves = {"config": spoil.make("gpt2").save_pretrained, "adapter_config": functools.partial(save_adapter, adapted)}
    for name, write in saves.items():
        with pytest.raises(OSError) as caught:
            write(tmp_path / "m" / "n")
        file, _, said = str(caught.value).partition(" cannot be written: ")
        assert Path(file).match(f"{tmp_path}/m/n/.saving-*/{name}.json") and said == "No space left on device"
    assert os.listdir(tmp_path) == []


# ---- tables of positions ----


def test_tables_of_positions_are_as_long_as_calls_need():
    config = replace(spoil.CONFIGS["llama"], max_positions=1 << 20)
    model = GPT(config).eval()
    ids = torch.ones(1, 5, dtype=torch.int64)
    model.generate(ids, max_new_tokens=3)
    model(ids, position_ids=torch.arange(5)[None])
    model(ids, cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32))
    assert max(len(t) for _, tables in model._rope.kept.values() for t in tables) <= 8192
    far = model(ids, position_ids=torch.arange(20_000, 20_005)[None], return_logits=True).logits
    again = GPT(replace(config, max_positions=32_768)).eval()
    assert torch.equal(far, again(ids, position_ids=torch.arange(20_000, 20_005)[None], return_logits=True).logits)
