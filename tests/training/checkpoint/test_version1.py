"""Checkpoints of the first format load, with a warning, and the next save writes the second."""

import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

from tests.common import assert_equal
from tests.models.common import Training, whole
from tests.training.checkpoint.common import made, state
from tpfuse import load_checkpoint, save_checkpoint
from tpfuse.layers.shards import named_specs
from tpfuse.training.checkpoint.state import entries_of, groups_of
from tpfuse.training.dtensor import to_dtensor


def save_as_version_1(directory, model, optimizer, step, extra=None):
    """As it was done: torch.distributed.checkpoint's file system writer, then meta.json and latest."""
    tensors = {}
    for name, p, spec, tp in named_specs(model):
        spread = lambda x, spec=spec, tp=tp: (
            x if tp.size == 1 else to_dtensor(x, spec, tp, DeviceMesh.from_group(tp.group, "cpu"))
        )
        tensors[f"model.{name}"] = spread(p.detach())
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"optimizer.{name}.{key}"] = spread(value) if value.shape == p.shape else value
    path = directory / f"step-{step:08d}"
    alone = not torch.distributed.is_initialized()
    directory.mkdir(exist_ok=True)
    dcp.save(tensors, checkpoint_id=path, no_dist=alone)
    if alone or torch.distributed.get_rank() == 0:
        groups = groups_of(entries_of(model), [optimizer])
        meta = dict(version=1, step=step, extra=extra, param_groups=groups, seed=model.seed, model_step=int(model.step))
        (path / "meta.json").write_text(json.dumps(meta | dict(name=path.name), indent=1))
        (directory / "latest").write_text(path.name + "\n")
    return path


def test_it_comes_back_and_the_next_save_is_of_version_2(tmp_path):
    model, optimizer = made(steps=2, seed=3)
    old = save_as_version_1(tmp_path, model, optimizer, 2, {"sampler": [2]})
    other, theirs = made(steps=1)
    with pytest.warns(
        UserWarning, match="of version 1, .* a pickle, .* only if you trust .* next save writes version 2"
    ):
        assert load_checkpoint(tmp_path, other, theirs) == (2, {"sampler": [2]})
    assert_equal(state(other, theirs), state(model, optimizer))
    new = save_checkpoint(tmp_path, other, theirs, step=3)
    assert old.exists() and json.loads((new / "meta.json").read_text())["version"] == 2
    assert not (new / ".metadata").exists()
    save_checkpoint(tmp_path, other, theirs, step=4)
    assert not old.exists()  # superseded as any other


def both_ways(world, directory, save):
    training = Training(world)
    if save:
        training.steps(0, 2)
        save_as_version_1(directory, training.model, training.optimizer, 2)
    else:
        load_checkpoint(directory, training.model, training.optimizer)
    return whole(training.model), training.steps(2, 3)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_at_another_split(ranks, tmp_path, size):
    weights, steps = ranks(2, both_ways, tmp_path, True)[0]
    found, again = ranks(size, both_ways, tmp_path, False)[0]
    assert_equal(found, weights)
    assert torch.allclose(torch.tensor(again), torch.tensor(steps), rtol=1e-12)


def shard(path):
    return next(path.glob("*.distcp"))


DAMAGE = {
    "no index": lambda path: (path / ".metadata").unlink(),
    "an index that is none": lambda path: (path / ".metadata").write_bytes(b"x"),
    "an index of something else": lambda path: (path / ".metadata").write_bytes(pickle.dumps([1])),
    "an empty shard": lambda path: shard(path).write_bytes(b""),
    "no shard": lambda path: shard(path).unlink(),
    "half a shard": lambda path: shard(path).write_bytes(shard(path).read_bytes()[:2000]),
    "a folder": lambda path: (shard(path).unlink(), (path / "__0_0.distcp").mkdir()),
    "no step": lambda path: (path / "meta.json").write_text('{"version": 1}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.filterwarnings("ignore:load_checkpoint")
def test_a_damaged_one_changes_nothing(tmp_path, damage):
    path = save_as_version_1(tmp_path, *made(steps=1), 1)
    damage(path)
    model, optimizer = made(seed=1, steps=1)
    before = state(model, optimizer)
    with pytest.raises((OSError, ValueError), match=f"load_checkpoint: {path}"):
        load_checkpoint(tmp_path, model, optimizer)
    assert_equal(state(model, optimizer), before)


@pytest.mark.filterwarnings("ignore:load_checkpoint")
def test_what_does_not_fit_is_said_as_ever(tmp_path):
    path = save_as_version_1(tmp_path, *made(steps=1), 1)
    model, _ = made()
    with pytest.raises(ValueError, match="load_checkpoint: the optimizer has 1 parameter groups, .* has 2"):
        load_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()))
    shutil.move(path, tmp_path / "mine")
    (tmp_path / "latest").write_text("mine\n")
    assert load_checkpoint(tmp_path, model) == (1, None)
