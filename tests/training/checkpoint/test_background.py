"""A save in the background: the bytes of one in the foreground, the same guarantees, and training goes on."""

import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
import torch

from tests.common import assert_equal
from tests.forking import forking
from tests.models.common import STEP_CONFIG, Training, batch
from tests.training.checkpoint.common import made, names, state
from tpfuse import load_checkpoint, save_checkpoint
from tpfuse.training.checkpoint import save as writing

write_shard = writing.write_shard


def held_back(event):
    """Shards that are written when the event is set."""

    def write(*args):
        assert event.wait(60)
        return write_shard(*args)

    return mock.patch.object(writing, "write_shard", write)


def failing():
    return mock.patch.object(writing, "write_shard", mock.Mock(side_effect=OSError("shard: no space left")))


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def step(model, optimizer):
    model(**batch(STEP_CONFIG)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_same_bytes_while_training_goes_on(tmp_path):
    model, optimizer = made(steps=2)
    there = save_checkpoint(tmp_path / "there", model, optimizer, step=2, extra=[1])
    at_the_call, extra = state(model, optimizer), [1]
    with held_back(go := threading.Event()):
        saving = save_checkpoint(tmp_path / "here", model, optimizer, step=2, extra=extra, background=True)
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 7.0
        extra.append(2)
        model.seed = 9
        assert not saving.done() and not (tmp_path / "here" / "latest").exists()
        go.set()
        here = saving.result()
    assert saving.done() and here == tmp_path / "here" / there.name and contents(here) == contents(there)
    assert load_checkpoint(tmp_path / "here", model, optimizer) == (2, [1])
    assert_equal(state(model, optimizer), at_the_call)


def test_the_next_save_and_load_wait(tmp_path):
    model, optimizer = made(steps=1)
    with held_back(go := threading.Event()):
        saving = save_checkpoint(tmp_path / "a", model, optimizer, step=1, background=True)
        threading.Timer(0.1, go.set).start()
        second = save_checkpoint(tmp_path / "b", model, optimizer, step=2, background=True)
        assert saving.done()
        assert load_checkpoint(tmp_path / "b", model, optimizer) == (2, None) and second.done()
    assert load_checkpoint(tmp_path / "a", model, optimizer) == (1, None)


def test_an_error_is_raised_by_the_next_call_of_the_folder_once(tmp_path):
    model, optimizer = made(steps=1)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    said = "in the background: shard: no space left"
    for call in (
        lambda: save_checkpoint(tmp_path, model, optimizer, step=3),
        lambda: save_checkpoint(tmp_path, model, optimizer, step=3, background=True),
        lambda: load_checkpoint(tmp_path, model, optimizer),
    ):
        with failing():
            save_checkpoint(tmp_path, model, optimizer, step=2, background=True)
            with pytest.raises(OSError, match=said):
                call()
        assert names(tmp_path) == {"step-00000001", "latest"}
        assert load_checkpoint(tmp_path, model, optimizer) == (1, None)  # not again


def test_an_error_that_was_asked_for_is_not_raised_again(tmp_path):
    model, optimizer = made(steps=1)
    with failing():
        saving = save_checkpoint(tmp_path, model, optimizer, step=2, background=True)
        for _ in range(2):
            with pytest.raises(OSError, match="^save_checkpoint: shard: no space left"):
                saving.result()
    assert load_checkpoint(tmp_path, model, optimizer) is None


def test_what_cannot_be_saved_is_said_at_once(tmp_path):
    with pytest.raises(ValueError, match="save_checkpoint: extra must be JSON"):
        save_checkpoint(tmp_path, *made(), step=1, extra={1}, background=True)
    assert not list(tmp_path.iterdir())


def train_on(world, directory):
    """Rank 1's shard is held back while both train on: messages of the two must not meet."""
    training = Training(world)
    training.steps(0, 1)
    plain = save_checkpoint(f"{directory}/there", training.model, training.optimizer, step=1)
    go = threading.Event()
    with held_back(go if world.rank == 1 else mock.Mock(wait=lambda _: True)):
        saving = save_checkpoint(f"{directory}/here", training.model, training.optimizer, step=1, background=True)
        training.steps(1, 3)
        waited = not saving.done()
        go.set()
        path = saving.result()
    assert contents(path) == contents(plain)
    return waited


def test_messages_of_training_and_saving_do_not_meet(ranks, tmp_path):
    assert ranks(2, train_on, str(tmp_path)) == [True, True]


def on_some(world, directory):
    training = Training(world)
    with pytest.raises(ValueError) as raised:
        save_checkpoint(directory, training.model, training.optimizer, step=1, background=world.rank == 1)
    return str(raised.value)


def test_a_save_is_in_the_background_on_every_rank_or_on_none(ranks, tmp_path):
    rule = "save_checkpoint: background must be the same on every rank, got rank 0: False; rank 1: True"
    assert ranks(2, on_some, str(tmp_path)) == [rule] * 2
    assert names(tmp_path) == set()


def one_fails(world, directory, asks):
    """Rank 1 cannot write; rank 0 asks for the result, or not -> what the next save says."""
    training = Training(world)
    with failing() if world.rank == 1 else mock.patch.object(writing, "write_shard", write_shard):
        saving = save_checkpoint(directory, training.model, training.optimizer, step=1, background=True)
        if asks > world.rank:
            with pytest.raises(OSError, match="no space left"):
                saving.result()
        try:
            load_checkpoint(directory, training.model, training.optimizer)
        except OSError as error:
            return str(error)
    return None


@pytest.mark.parametrize("asks", [0, 1, 2])
def test_an_error_of_one_rank_is_raised_on_all(ranks, tmp_path, asks):
    """Also where only some have asked for it; where all have, on none."""
    first, second = ranks(2, one_fails, str(tmp_path), asks)
    assert first == second and ("no space left" in first if asks < 2 else first is None)
    assert names(tmp_path) == set()


SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from tests.training.checkpoint.common import made
from tpfuse import save_checkpoint
from tpfuse.training.checkpoint import save

directory, rank, size, address, fails = sys.argv[1:]
torch.set_num_threads(1)
if int(size) > 1:
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=int(rank), world_size=int(size))
model, optimizer = made()
save_checkpoint(directory, model, optimizer, step=1)
write = save.write_shard

def slowly(*args):
    time.sleep(0.3)
    if fails == "fails":
        raise OSError("no space left")
    return write(*args)

save.write_shard = slowly
save_checkpoint(directory, model, optimizer, step=2, background=True)
if int(size) > 1:
    dist.destroy_process_group()
"""


def scripts(tmp_path, size, fails="works"):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path / "meet"), fails], stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    return [(process.communicate()[1], process.returncode) for process in started]


def end_at_once(directory):
    torch.set_num_threads(1)
    model, optimizer = made()
    writing.write_shard = lambda *args: time.sleep(0.2) or write_shard(*args)
    save_checkpoint(directory, model, optimizer, step=1, background=True)


def test_the_end_of_a_forked_process_waits(tmp_path):
    process = forking().Process(target=end_at_once, args=(tmp_path,))
    process.start()
    process.join()
    assert load_checkpoint(tmp_path, *made()) == (1, None)


@pytest.mark.slow
def test_the_end_of_the_process_waits(tmp_path):
    """Also where the process groups are destroyed before."""
    assert [code for _, code in scripts(tmp_path, 2)] == [0, 0]
    assert load_checkpoint(tmp_path / "run", *made()) == (2, None)


@pytest.mark.slow
def test_an_error_that_nobody_asked_for_is_said_at_the_end(tmp_path):
    ((said, _),) = scripts(tmp_path, 1, "fails")
    assert f"save_checkpoint in {tmp_path / 'run'} failed in the background: no space left" in said
    assert load_checkpoint(tmp_path / "run", *made()) == (1, None)


def killed(directory):
    torch.set_num_threads(1)
    model, optimizer = made(steps=1)
    save_checkpoint(directory, model, optimizer, step=1)
    started = threading.Event()

    def hang(*args):
        write_shard(*args)
        started.set()
        threading.Event().wait()

    with mock.patch.object(writing, "write_shard", hang):
        save_checkpoint(directory, model, optimizer, step=2, background=True)
        started.wait()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_leaves_the_previous_one(tmp_path):
    process = forking().Process(target=killed, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert names(tmp_path) == {"step-00000001", "step-00000002", "latest"}
    model, optimizer = made()
    assert load_checkpoint(tmp_path, model, optimizer) == (1, None)
    assert_equal(state(model, optimizer), state(*made(steps=1)))
    save_checkpoint(tmp_path, model, optimizer, step=3)
    assert names(tmp_path) == {"step-00000001", "step-00000003", "latest"}
