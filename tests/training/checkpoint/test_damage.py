"""Whatever is wrong with a checkpoint's files: an OSError or a ValueError that names it, on every rank, and nothing is
changed.

Spans: load, meta, folder and shards of tpfuse/training/checkpoint/: a file may be damaged in the sight of any of them.
"""

import hashlib
import json
import math
import os
import random
import shutil

import pytest
import torch

from tests.common import assert_equal
from tests.models.common import Training, whole
from tests.training.checkpoint.common import made, state
from tpfuse import load_checkpoint, save_checkpoint
from tpfuse.training.checkpoint.meta import sealed

SHARD = "shard-00000.safetensors"


def flipped(path, bit):
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_noticed(tmp_path, count):
    path = save_checkpoint(tmp_path, *made(steps=1), step=1)
    model, optimizer = made(seed=1)
    before, rng = state(model, optimizer), random.Random(0)
    for name in (SHARD, "meta.json"):
        bits = rng.sample(range(8 * (path / name).stat().st_size), count)
        for bit in bits + list(range(64)):  # of any place, and of the first bytes, which say how the rest is read
            flipped(path / name, bit)
            with pytest.raises((OSError, ValueError)) as caught:
                load_checkpoint(tmp_path, model, optimizer)
            assert f"{path / name}" in str(caught.value) and len(str(caught.value)) < 500
            flipped(path / name, bit)
    assert_equal(state(model, optimizer), before)
    assert load_checkpoint(tmp_path, model, optimizer) == (1, None)


def test_every_flipped_bit_of_latest_is_noticed(tmp_path):
    path = save_checkpoint(tmp_path, *made(steps=1), step=1)
    model, optimizer = made(seed=1)
    for bit in range(8 * len(f"{path.name}\n")):
        flipped(tmp_path / "latest", bit)
        with pytest.raises((OSError, ValueError), match="load_checkpoint: .*latest"):
            load_checkpoint(tmp_path, model, optimizer)
        flipped(tmp_path / "latest", bit)


def test_a_latest_damaged_into_another_name_is_said(tmp_path):
    for step in (2, 3):
        save_checkpoint(tmp_path, *made(steps=1), step=step)
    flipped(tmp_path / "latest", 8 * len("step-0000000"))  # "3" -> "2"
    with pytest.warns(UserWarning, match="latest names step-00000002, and step-00000003 is there too"):
        assert load_checkpoint(tmp_path, *made(seed=1)) == (2, None)


def truncated(file):
    os.truncate(file, file.stat().st_size // 2)


def one_byte_less(file):
    os.truncate(file, file.stat().st_size - 1)


def emptied(file):
    os.truncate(file, 0)


def grown(file):
    with open(file, "ab") as f:
        f.write(b"\0")


def missing(file):
    file.unlink()


def a_folder(file):
    file.unlink()
    file.mkdir()


def a_pipe(file):
    file.unlink()
    os.mkfifo(file)


def a_dangling_link(file):
    file.unlink()
    file.symlink_to("nowhere")


def anothers(file):
    """The same file of another checkpoint, which is whole and as long."""
    save_checkpoint(file.parents[1] / "other", *made(seed=2, steps=1), step=1)
    shutil.copy(file.parents[1] / "other" / "step-00000001" / file.name, file)


NOT_FILES = [a_folder, a_pipe, a_dangling_link]
DAMAGE = [(name, damage) for name in (SHARD, "meta.json") for damage in (truncated, one_byte_less, emptied, grown)]
DAMAGE += [(name, damage) for name in (SHARD, "meta.json") for damage in (missing, *NOT_FILES)]
DAMAGE += [(SHARD, anothers), *(("latest", damage) for damage in NOT_FILES)]


@pytest.mark.parametrize("name, damage", DAMAGE, ids=lambda x: getattr(x, "__name__", x))
def test_damaged_files(tmp_path, name, damage):
    path = save_checkpoint(tmp_path, *made(steps=1), step=1)
    file = tmp_path / name if name == "latest" else path / name
    damage(file)
    model, optimizer = made(seed=1, steps=1)
    before = state(model, optimizer)
    with pytest.raises((OSError, ValueError)) as caught:
        load_checkpoint(tmp_path, model, optimizer)
    assert str(caught.value).startswith("load_checkpoint: ") and str(file) in str(caught.value)
    assert_equal(state(model, optimizer), before)


TEXTS = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a string": b'"meta"',
    "a number": b"2",
    "null": b"null",
    "no version": b"{}",
    "a version that is true": b'{"version": true}',
    "a version that is a list": b'{"version": [2]}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a long number": b'{"version": ' + b"1" * 10_000 + b"}",
    "no seal": b'{"version": 2}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_meta_json_that_is_none(tmp_path, text):
    path = save_checkpoint(tmp_path, *made(), step=1)
    (path / "meta.json").write_bytes(text)
    with pytest.raises(ValueError, match="load_checkpoint: .*meta.json"):
        load_checkpoint(tmp_path, *made())


VALUES = [None, True, -1, 1 << 64, 1.5, "x", "../x", [], [[]], [None], {}, {"a": 1}, {"../x": [1, "0" * 64]}, [{}]]
OBJECTS = [value for value in VALUES if isinstance(value, dict)]
KEEPS = {"config": [None, *OBJECTS], "conditions": OBJECTS, "seed": [-1], "model_step": [-1]}  # what may stand there


def test_fields_that_are_missing_or_of_another_kind(tmp_path):
    """Under a right checksum, as somebody would who edits it by hand."""
    path = save_checkpoint(tmp_path, *made(steps=1), step=1)
    meta = json.loads((path / "meta.json").read_text())
    meta.pop("sha256")
    model, optimizer = made(seed=1)
    before = state(model, optimizer)
    for key in set(meta) - {"name", "extra"}:
        edited = [{k: v for k, v in meta.items() if k != key}]
        edited += [meta | {key: value} for value in VALUES if value not in KEEPS.get(key, ())]
        for wrong in edited:
            (path / "meta.json").write_bytes(sealed(wrong))
            with pytest.raises((OSError, ValueError), match="load_checkpoint: "):
                load_checkpoint(tmp_path, model, optimizer)
    assert_equal(state(model, optimizer), before)


GROUPS = [dict(lr="fast"), dict(lr=None), dict(lr=[1]), dict(betas=[0.9]), dict(betas=0.9), dict(amsgrad=3)]


@pytest.mark.parametrize("change", GROUPS, ids=str)
def test_an_optimizers_number_that_is_none(tmp_path, change):
    path = save_checkpoint(tmp_path, *made(), step=1)
    meta = json.loads((path / "meta.json").read_text())
    meta.pop("sha256")
    meta["param_groups"][0] |= change
    (path / "meta.json").write_bytes(sealed(meta))
    with pytest.raises(ValueError, match="load_checkpoint: .* of group 0 of the optimizer is"):
        load_checkpoint(tmp_path, *made())


NUMBERS = [dict(lr=v) for v in (math.nan, math.inf, -1.0, 10**400)]
NUMBERS += [dict(eps=-1e-8), dict(weight_decay=math.nan), dict(betas=[0.9, 1.0]), dict(betas=[math.nan, 0.9])]


@pytest.mark.parametrize("change", NUMBERS, ids=lambda change: str(change)[:20])
def test_an_optimizers_number_that_trains_nothing(tmp_path, change):
    """Of a file under a right checksum, and of an optimizer that is to be saved."""
    model, optimizer = made(steps=1)
    path = save_checkpoint(tmp_path, model, optimizer, step=1)
    (key,), before = change, state(model, optimizer)
    meta = json.loads((path / "meta.json").read_text())
    meta.pop("sha256")
    meta["param_groups"][0] |= change
    (path / "meta.json").write_bytes(sealed(meta))
    with pytest.raises(ValueError, match=f"load_checkpoint: {key} of group 0 of {path} must (be at least|lie in)"):
        load_checkpoint(tmp_path, model, optimizer)
    assert_equal(state(model, optimizer), before)
    optimizer.param_groups[0] |= change
    with pytest.raises(ValueError, match=f"save_checkpoint: {key} of group 0 of the optimizer must (be at least|lie)"):
        save_checkpoint(tmp_path, model, optimizer, step=2)


def moved(path, change):
    """Changes the places of a shard's tensors, under checksums that are right again."""
    data = (path / SHARD).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    change(header, places)
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    (path / SHARD).write_bytes(data)
    meta = json.loads((path / "meta.json").read_text())
    meta.pop("sha256")
    meta["files"][SHARD] = [len(data), hashlib.sha256(data).hexdigest()]
    (path / "meta.json").write_bytes(sealed(meta))


def overlapping(header, places):
    """Rank 0's half lies where a part of rank 1's does: as many elements, and a hole."""
    places["model.blocks.0.mlp.fc1.weight"]["saved_offsets"][0] += 1


def beyond(header, places):
    places["model.blocks.0.mlp.fc1.weight"]["saved_offsets"][1] += 1


def load_moved(world, directory, change):
    training = Training(world)
    path = save_checkpoint(directory, training.model, training.optimizer, step=1)
    if world.rank == 0:
        moved(path, change)
    torch.distributed.barrier()
    before = whole(training.model)
    with pytest.raises((OSError, ValueError)) as caught:
        load_checkpoint(directory, training.model, training.optimizer)
    assert_equal(whole(training.model), before)
    return str(caught.value)


@pytest.mark.parametrize("change, said", [(overlapping, "has pieces that overlap"), (beyond, "has a piece at")])
def test_pieces_that_overlap_or_reach_beyond_are_refused(ranks, tmp_path, change, said):
    first, second = ranks(2, load_moved, tmp_path, change)
    assert first == second and said in first


NAMES = ["", "\n", "/", ".", "..", "../other", "step-00000001/../step-00000001", "step-00000001\n\n", "a\0b", "gone"]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_latest_is_a_plain_name(tmp_path, name):
    save_checkpoint(tmp_path / "run", *made(), step=1)
    save_checkpoint(tmp_path / "other", *made(), step=2)
    for text in (name, str(tmp_path / "other" / "step-00000002"), "link"):
        (tmp_path / "run" / "latest").write_text(text)
        if text == "link":
            (tmp_path / "run" / "link").symlink_to(tmp_path / "other" / "step-00000002")
        with pytest.raises((OSError, ValueError), match="load_checkpoint: .*latest"):
            load_checkpoint(tmp_path / "run", *made())


def all_refuse(world, directory, file):
    """A file is gone, and all load -> what each says; nothing has changed."""
    training = Training(world)
    training.steps(0, 1)
    save_checkpoint(directory, training.model, training.optimizer, step=1)
    training.steps(1, 2)
    before = whole(training.model)
    if world.rank == 0:
        os.unlink(os.path.join(directory, "step-00000001", file))
    torch.distributed.barrier()
    with pytest.raises((OSError, ValueError)) as caught:
        load_checkpoint(directory, training.model, training.optimizer)
    assert_equal(whole(training.model), before)
    return f"{caught.type.__name__} {caught.value}"


@pytest.mark.parametrize("file", [SHARD, "shard-00001.safetensors", "meta.json"])
def test_every_rank_says_the_same(ranks, tmp_path, file):
    first, second = ranks(2, all_refuse, str(tmp_path), file)
    assert first == second and file in first


def each_reads_its_own(world, directory):
    """Rank 1 has another folder under the same name, with another checkpoint of the same step."""
    training = Training(world)
    mine = f"{directory}/{world.rank}"
    for copy in range(2):
        training.steps(copy, copy + 1)
        save_checkpoint(f"{directory}/{copy}", training.model, training.optimizer, step=1)
    with pytest.raises(OSError) as caught:
        load_checkpoint(mine, training.model, training.optimizer)
    return str(caught.value)


def test_ranks_that_read_different_folders(ranks, tmp_path):
    first, second = ranks(2, each_reads_its_own, str(tmp_path))
    assert first == second and "all ranks must share one folder" in first
