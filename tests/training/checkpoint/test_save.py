"""A save that fails leaves nothing and moves nothing, says why on every rank, and is never published by halves."""

import errno
import json
import os
import resource
import shutil
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from tests.common import assert_equal
from tests.models.common import Training, whole
from tests.training.checkpoint.common import made, names, state
from tpfuse import load_checkpoint, save_checkpoint
from tpfuse.training.checkpoint import job


@contextmanager
def files_of_at_most(size):
    """Longer files fail as they do on a full disk: after a part of them is written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 200, 2000, 100_000])
def test_a_disk_that_is_full(tmp_path, monkeypatch, size):
    """At job.json, at saving.json or meta.json, in a shard."""
    model, optimizer = made(steps=1)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    (tmp_path / "job.json").unlink()
    monkeypatch.setattr(job, "_mine", {})
    with files_of_at_most(size), pytest.raises(OSError, match=rf"save_checkpoint: {tmp_path}.*File too large"):
        save_checkpoint(tmp_path, model, optimizer, step=2)
    assert names(tmp_path) == {"step-00000001", "latest"}
    assert load_checkpoint(tmp_path, model, optimizer) == (1, None)


def test_a_full_disk_at_meta_json_and_at_latest(tmp_path):
    model, optimizer = made(steps=1)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    replace = os.replace
    for name in ("meta.json", "latest"):

        def full(old, new, name=name):
            if os.path.basename(new) == name:
                raise OSError(errno.ENOSPC, "No space left on device")
            replace(old, new)

        with mock.patch("os.replace", full), pytest.raises(OSError, match=f"save_checkpoint: .*{name}: No space"):
            save_checkpoint(tmp_path, model, optimizer, step=2)
        assert names(tmp_path) == {"step-00000001", "latest"}


SAVE = "tpfuse.training.checkpoint.save."


def fail_at(world, directory, function, rank):
    training = Training(world)
    training.steps(0, 1)
    save_checkpoint(directory, training.model, training.optimizer, step=1)
    before = sorted(os.listdir(directory))
    with mock.patch(SAVE + function, failing_on(world.rank == rank, function)):
        with pytest.raises(OSError) as caught:
            save_checkpoint(directory, training.model, training.optimizer, step=2)
    torch.distributed.barrier()
    assert sorted(os.listdir(directory)) == before
    weights = whole(training.model)
    training.steps(1, 2)
    assert load_checkpoint(directory, training.model, training.optimizer) == (1, None)
    assert_equal(whole(training.model), weights)
    return str(caught.value)


def failing_on(here, function):
    def fail(*args):
        raise OSError(errno.EIO, f"Input/output error in {function}")

    return fail if here else getattr(__import__("tpfuse").training.checkpoint.save, function)


@pytest.mark.parametrize(
    "function, rank",
    [("write_shard", 0), ("write_shard", 1), ("new_checkpoint", 0), ("check_shared", 1), ("publish", 0)],
)
def test_a_failure_on_one_rank_is_one_on_all_and_leaves_nothing(ranks, tmp_path, function, rank):
    first, second = ranks(2, fail_at, str(tmp_path), function, rank)
    assert first == second and first.startswith("save_checkpoint: ") and function in first


def local_folders(world, directory):
    """Each rank has a folder of its own under the same name, as machines without a shared disk have."""
    training = Training(world)
    mine = os.path.join(directory, str(world.rank))
    for step in (1, 2):
        training.steps(step - 1, step)
        save_checkpoint(os.path.join(directory, "shared"), training.model, training.optimizer, step=step)
    if world.rank == 0:
        for copy in ("0", "1"):  # the same two checkpoints in both
            shutil.copytree(os.path.join(directory, "shared"), os.path.join(directory, copy))
    torch.distributed.barrier()
    before = sorted(os.listdir(mine))
    with pytest.raises(OSError) as caught:
        save_checkpoint(mine, training.model, training.optimizer, step=3)
    torch.distributed.barrier()
    assert sorted(os.listdir(mine)) == before
    with open(os.path.join(mine, "latest")) as latest:
        assert latest.read() == "step-00000002\n"
    return str(caught.value)


def test_folders_that_are_not_shared(ranks, tmp_path):
    first, second = ranks(2, local_folders, str(tmp_path))
    assert first == second and "all ranks must share one" in first


def lost_on_the_way(world, directory):
    """Rank 1's shard is gone, or short, when rank 0 looks for it."""
    training, said = Training(world), []
    from tpfuse.training.checkpoint import save

    write = save.write_shard
    for spoil in (os.unlink, lambda path: os.truncate(path, 100)):

        def spoiled(path, pieces, spoil=spoil):
            shard = write(path, pieces)
            spoil(path)
            return shard

        with mock.patch.object(save, "write_shard", spoiled if world.rank == 1 else write):
            with pytest.raises(OSError) as caught:
                save_checkpoint(directory, training.model, training.optimizer, step=1)
        said.append(str(caught.value))
    torch.distributed.barrier()
    assert not os.path.exists(os.path.join(directory, "latest"))
    return said


def test_a_shard_that_rank_0_does_not_see_is_not_published(ranks, tmp_path):
    first, second = ranks(2, lost_on_the_way, str(tmp_path))
    assert first == second and all("shard-00001.safetensors" in text for text in first)
    assert names(tmp_path) == set()


ENDLESS: list = []
ENDLESS.append(ENDLESS)
EXTRAS = [{1, 2}, object(), {1: 2}, {"a": [{None: 0}]}, b"bytes", torch.ones(2), 1j, ENDLESS]


def test_extra_that_is_not_json(tmp_path):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for extra in (*EXTRAS, deep):
        with pytest.raises(ValueError, match="save_checkpoint: extra must be JSON values"):
            save_checkpoint(tmp_path / "run", *made(), step=1, extra=extra)
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_none(tmp_path):
    for step in (-1, 1.5, True, "1", None, 1 << 63):
        with pytest.raises(ValueError, match="save_checkpoint: step must be an integer from 0"):
            save_checkpoint(tmp_path, *made(), step=step)


def test_steps_of_more_than_eight_digits(tmp_path):
    model, optimizer = made()
    for step in (99_999_999, 100_000_000, 100_000_001, 100_000_002):
        save_checkpoint(tmp_path, model, optimizer, step=step)
        assert load_checkpoint(tmp_path, model) == (step, None)
    assert names(tmp_path) == {"step-100000001", "step-100000002", "latest"}


def disagree(world, directory, key):
    training = Training(world)
    call = dict(step=1, extra=[0])
    if key in call:
        call[key] = world.rank if key == "step" else [world.rank]
    elif key == "seed":
        training.model.seed = world.rank
    else:
        training.optimizer.param_groups[0]["lr"] = 0.1 * world.rank
    with pytest.raises(ValueError) as caught:
        save_checkpoint(directory, training.model, training.optimizer, **call)
    return str(caught.value)


@pytest.mark.parametrize("key", ["step", "extra", "seed", "param_groups"])
def test_ranks_that_disagree(ranks, tmp_path, key):
    first, second = ranks(2, disagree, str(tmp_path), key)
    assert first == second and f"save_checkpoint: {key} must be the same on every rank" in first
    assert not list(tmp_path.iterdir())


def test_a_latest_that_cannot_be_read_is_replaced_and_nothing_removed(tmp_path):
    model, optimizer = made(steps=1)
    for step in (1, 2):
        save_checkpoint(tmp_path, model, optimizer, step=step)
    (tmp_path / "latest").write_text("../elsewhere")
    save_checkpoint(tmp_path, model, optimizer, step=3)
    assert names(tmp_path) == {"step-00000001", "step-00000002", "step-00000003", "latest"}
    assert load_checkpoint(tmp_path, model, optimizer) == (3, None)


def test_a_checkpoint_is_the_same_bytes_every_time(tmp_path):
    model, optimizer = made(steps=1)
    first = save_checkpoint(tmp_path / "a", model, optimizer, step=1)
    again = save_checkpoint(tmp_path / "b", model, optimizer, step=1)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in again.iterdir()}
    assert json.loads((first / "meta.json").read_text())["version"] == 2
    assert_equal(state(model, optimizer), state(*made(steps=1)))
