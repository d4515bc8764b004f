"""Buffers of a state dictionary are in a checkpoint: bit for bit, once, each stage's own and the first replica's.

Spans: what tpfuse/training/checkpoint/ has of buffers, in state.py, save.py, load.py and stages.py.
"""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.common import assert_equal
from tests.models.common import STEP_CONFIG
from tests.pipeline.common import GPT2
from tests.pipeline.common import made as staged
from tpfuse import TensorParallel, load_checkpoint, save_checkpoint
from tpfuse.models import GPT
from tpfuse.training.checkpoint.meta import VERSION, WITH_MORE, sealed


def normed(calls=0, features=4):
    torch.manual_seed(calls)
    model = nn.Sequential(nn.Linear(4, features), nn.BatchNorm1d(features))
    for _ in range(calls):
        model(torch.randn(8, 4) * 3 + 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_they_come_back_but_for_those_that_are_not_persistent(tmp_path):
    model, optimizer = normed(5)
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("left_out", torch.ones(2), persistent=False)
    path = save_checkpoint(tmp_path, torch.compile(model, backend="eager"), optimizer, step=5)
    tensors = json.loads((path / "meta.json").read_text())["tensors"]
    assert tensors["buffer.1.num_batches_tracked"] == ["I64", []]
    other, theirs = normed()
    other.register_buffer("mask", torch.tensor([False, False]))
    other.register_buffer("left_out", torch.zeros(2), persistent=False)
    mean = other[1].running_mean
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_checkpoint(tmp_path, other, theirs) == (5, None)
    assert_equal(other.state_dict(), model.state_dict())
    assert other[1].num_batches_tracked == 5 and other[1].running_mean is mean
    assert other.left_out.equal(torch.zeros(2))


def renamed(model):
    model[1].register_buffer("also", torch.ones(3))


def removed(model):
    model[1].running_mean = None


def reshaped(model):
    model[1].running_var = torch.ones(5)


MISFITS = [
    (renamed, r"buffer.1.also must be \(3,\) for this model, .* has none"),
    (removed, r"holds buffer.1.running_mean, which this model has no place for"),
    (reshaped, r"buffer.1.running_var must be \(5,\) for this model, .* has \(4,\)"),
]


@pytest.mark.parametrize("spoil, words", MISFITS, ids=[spoil.__name__ for spoil, _ in MISFITS])
def test_those_that_do_not_fit_are_named_before_anything_changes(tmp_path, spoil, words):
    save_checkpoint(tmp_path, *normed(1), step=1)
    model, optimizer = normed()
    spoil(model)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"load_checkpoint: .*{words}"):
        load_checkpoint(tmp_path, model, optimizer)
    assert_equal(model.state_dict(), before)


def test_a_checkpoint_without_any_leaves_them_with_a_warning(tmp_path):
    bare, optimizer = normed(1)
    for name in "running_mean", "running_var", "num_batches_tracked":
        setattr(bare[1], name, None)
    save_checkpoint(tmp_path, bare, optimizer, step=1)
    model, optimizer = normed(2)
    before = {name: x.clone() for name, x in model.named_buffers()}
    with pytest.warns(UserWarning) as caught:
        assert load_checkpoint(tmp_path, model, optimizer) == (1, None)
    (words,) = [str(w.message) for w in caught]
    assert words.endswith(
        "holds no buffers, the model's stay as they are: 1.num_batches_tracked, 1.running_mean, 1.running_var"
    )
    assert_equal(dict(model.named_buffers()), before)


class Quantized(torch.Tensor):
    """A tensor of a class of its own, as buffers of few bits are."""


def test_one_that_no_file_holds_is_named(tmp_path):
    model, optimizer = normed()
    model.register_buffer("turns", torch.ones(2, dtype=torch.uint16))
    with pytest.raises(ValueError, match="save_checkpoint: buffer.turns is of torch.uint16"):
        save_checkpoint(tmp_path, model, optimizer, step=1)
    model.turns = torch.ones(2).as_subclass(Quantized)
    with pytest.raises(ValueError, match="the buffer turns is a Quantized, .*persistent=False"):
        save_checkpoint(tmp_path, model, optimizer, step=1)
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("conjugated", [False, True])
def test_complex_ones_come_back(tmp_path, dtype, conjugated):
    """Such as a table of rotary positions; and one of no dimensions, whose parts are two numbers."""

    def turning(table):
        model, optimizer = normed()
        model.register_buffer("turns", table.conj() if conjugated else table)
        model.register_buffer("one", table[1, 1].clone())
        return model, optimizer

    angles = torch.outer(torch.arange(3, dtype=torch.float64), torch.tensor([1.0, 0.1]))
    model, optimizer = turning(torch.polar(torch.ones_like(angles), angles).to(dtype))
    path = save_checkpoint(tmp_path, model, optimizer, step=1)
    tensors = json.loads((path / "meta.json").read_text())["tensors"]
    assert (tensors["buffer.turns"][1], tensors["buffer.one"][1]) == ([3, 2, 2], [2])
    other, theirs = turning(torch.zeros(3, 2, dtype=dtype))
    turns = other.turns
    load_checkpoint(tmp_path, other, theirs)
    assert other.turns is turns and other.turns.dtype == dtype
    assert other.turns.equal(model.turns) and other.one.equal(model.one)


def test_a_reader_that_would_leave_them_out_refuses(tmp_path):
    """By the version, which a checkpoint without any does not have."""
    bare = nn.Linear(4, 4)
    for name, model in ("with", normed(1)[0]), ("without", bare):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = save_checkpoint(tmp_path / name, model, optimizer, step=1)
        version = json.loads((path / "meta.json").read_text())["version"]
        assert version == (WITH_MORE if name == "with" else VERSION)
    bare(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.state[bare.weight]["seen"] = 3  # a number of Python's
    path = save_checkpoint(tmp_path / name, bare, optimizer, step=2)
    assert json.loads((path / "meta.json").read_text())["version"] == WITH_MORE


def test_those_of_a_file_without_that_version_are_read(tmp_path):
    """As files were written before it was there."""
    model, optimizer = normed(3)
    path = save_checkpoint(tmp_path, model, optimizer, step=1) / "meta.json"
    values = json.loads(path.read_text()) | dict(version=VERSION)
    path.write_bytes(sealed({key: value for key, value in values.items() if key != "sha256"}))
    other, theirs = normed()
    load_checkpoint(tmp_path, other, theirs)
    assert_equal(other.state_dict(), model.state_dict())


def test_damage_of_one_is_seen(tmp_path):
    path = save_checkpoint(tmp_path, *normed(1), step=1) / "meta.json"
    values = json.loads(path.read_text())
    values["tensors"]["buffer.1.running_mean"] = ["F32", [5]]
    path.write_bytes(sealed({key: value for key, value in values.items() if key != "sha256"}))
    with pytest.raises(ValueError, match=r"buffer.1.running_mean must be \(4,\) for this model, .* has \(5,\)"):
        load_checkpoint(path.parent, *normed())


def over_replicas(world, directory):
    """Each replica has statistics of its own batches."""
    model, optimizer = normed(world.rank + 1)
    replica = DistributedDataParallel(model, broadcast_buffers=False)
    first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    save_checkpoint(directory, replica, optimizer, step=1)
    load_checkpoint(directory, first, torch.optim.SGD(first.parameters(), lr=0.1))
    return {name: x.clone() for name, x in model.named_buffers()}, dict(first.named_buffers())


def test_of_replicas_the_first_ones_are_saved(ranks, tmp_path):
    (mine, first), (others, second) = ranks(2, over_replicas, str(tmp_path))
    assert not mine["1.running_mean"].equal(others["1.running_mean"])
    assert_equal(first, mine)
    assert_equal(second, mine)


def numbered(model, by):
    """Gives each block a buffer: ``by`` times its number in the whole model."""
    for path, block in model.named_modules():
        if path.startswith("blocks.") and path.count(".") == 1:
            block.register_buffer("number", by * torch.tensor(float(path.partition(".")[2])))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def over_stages(world, directory, save):
    """Saves a model of two stages, or one process's; the others load it."""
    stage = None if world.size == 1 else (world.rank, 2, "1f1b")
    model, optimizer = numbered(staged(GPT2, stage=stage), 1 if save else 0)
    if save:
        save_checkpoint(directory, model, optimizer, step=1)
    else:
        load_checkpoint(directory, model, optimizer)
    return {name: x.item() for name, x in model.named_buffers()}


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_each_stage_has_its_own(ranks, tmp_path, before, after):
    saved = ranks(before, over_stages, str(tmp_path), True)
    loaded = ranks(after, over_stages, str(tmp_path), False)
    merged = [{name: x for mine in by_rank for name, x in mine.items()} for by_rank in (saved, loaded)]
    assert merged[0] == merged[1] == {f"blocks.{i}.number": float(i) for i in range(GPT2.num_layers)}


def beside_slices(world, directory):
    """A buffer that is another on each tensor-parallel rank."""
    model = GPT(STEP_CONFIG, tp=TensorParallel(world.mesh(1, world.size)["tp"]))
    model.register_buffer("first", torch.tensor(world.rank))
    with pytest.warns(UserWarning) as caught:
        save_checkpoint(directory, model, torch.optim.SGD(model.parameters(), lr=0.1), step=1)
    return [str(w.message) for w in caught]


def test_one_that_tensor_parallel_ranks_have_otherwise_is_a_warning(ranks, tmp_path):
    for (words,) in ranks(2, beside_slices, str(tmp_path)):
        assert words.startswith("save_checkpoint: first should be the same on every tensor-parallel rank and differ")
