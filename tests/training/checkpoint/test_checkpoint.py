"""Training checkpoints: resumed exactly at any size, the previous one intact whatever happens, nothing else touched.

Spans: all of tpfuse/training/checkpoint/: save and load as a training run calls them.
"""

import json
import operator
import os
import shutil
import signal
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.common import assert_equal
from tests.forking import forking
from tests.models.common import STEP_CONFIG, Training, batch, whole
from tests.planted import planted
from tests.training.checkpoint.common import made, names, state
from tpfuse import load_checkpoint, param_groups, save_checkpoint
from tpfuse.models import GPT, Bert, BertConfig
from tpfuse.training import checkpoint
from tpfuse.training.checkpoint.meta import NEWEST

# ---- resume ----


def resume(world, directory, last, dp=1, kind="ddp", save=False):
    """Trains on from what is there, or from the start, to step ``last`` -> losses and norms, weights, what came
    back."""
    training = Training(world, dp, kind=kind)
    loaded = load_checkpoint(directory, training.replica, training.optimizer) if directory else None
    found = training.steps(0 if loaded is None else loaded[0], last)
    if save:
        save_checkpoint(directory, training.replica, training.optimizer, step=last, extra={"sampler": [last, "ä"]})
    return found, whole(training.model), loaded


@pytest.fixture(scope="module")
def undisturbed(ranks):
    """Six steps at (tp, dp) = (2, 1)."""
    return ranks(2, resume, None, 6)[0]


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    """The directory of a run that ended after three steps, by its layout."""
    made = {}

    def make(R, dp, kind):
        if (R, dp, kind) not in made:
            made[R, dp, kind] = str(tmp_path_factory.mktemp("run"))
            ranks(R, resume, made[R, dp, kind], 3, dp, kind, True)
        return made[R, dp, kind]

    return make


F64 = torch.float64
TP2, FSDP, PIECES = (2, 1, "ddp"), (4, 2, "fsdp"), (4, 1, "pieces")
RESUMES = [
    (TP2, TP2),
    (TP2, (1, 1, "ddp")),
    (TP2, FSDP),
    (FSDP, FSDP),
    (FSDP, (1, 1, "ddp")),
    (TP2, PIECES),
    (PIECES, (2, 1, "pieces")),
    (PIECES, (1, 1, "ddp")),
]
MORE = [
    (TP2, (4, 1, "ddp")),
    ((4, 1, "ddp"), (3, 1, "ddp")),
    ((4, 2, "ddp"), (3, 3, "ddp")),
    ((4, 2, "pieces"), (2, 2, "ddp")),
    (FSDP, (2, 2, "fsdp")),
    (TP2, (2, 1, "dtensor")),
]


@pytest.mark.parametrize("before, after", RESUMES + [pytest.param(*c, marks=pytest.mark.slow) for c in MORE])
def test_resuming_goes_on_where_it_stopped(ranks, written, undisturbed, before, after):
    R, dp, kind = after
    for steps, weights, loaded in ranks(R, resume, written(*before), 6, dp, kind):
        assert loaded == (3, {"sampler": [3, "ä"]})
        if before == after == TP2:  # bit for bit
            assert steps == undisturbed[0][3:]
            assert_equal(weights, undisturbed[1])
        assert (torch.tensor(steps, dtype=F64) - torch.tensor(undisturbed[0][3:], dtype=F64)).abs().max() < 1e-9
        for name, p in undisturbed[1].items():
            assert (weights[name] - p).abs().max() < 1e-9, name


def test_without_the_optimizers_state_it_would_show(ranks, written, undisturbed):
    steps, weights, _ = ranks(2, forgetful, written(*TP2))[0]
    assert max((weights[name] - p).abs().max() for name, p in undisturbed[1].items()) > 1e-5


def forgetful(world, directory):
    with planted("tpfuse.training.checkpoint.state.put_optimizers", lambda right, *args: None):
        return resume(world, directory, 6)


# ---- one process from here on ----


def test_everything_comes_back(tmp_path):
    model, optimizer = made(steps=3, seed=5)
    optimizer.param_groups[0]["lr"] = 0.125
    path = save_checkpoint(tmp_path, model, optimizer, step=3)
    assert (
        path.parent == tmp_path
        and path.name == "step-00000003"
        and (tmp_path / "latest").read_text() == "step-00000003\n"
    )
    other, theirs = made(steps=1, lr=0.5)
    assert load_checkpoint(tmp_path, other, theirs) == (3, None)
    want = state(model, optimizer)
    assert want["step"] == 3 and want["seed"] == 5 and want["0 lr"] == 0.125 and want["embedding.weight step"] == 3
    assert_equal(state(other, theirs), want)
    assert isinstance(theirs.param_groups[0]["betas"], tuple)
    assert other(**batch(STEP_CONFIG)).loss == model(**batch(STEP_CONFIG)).loss  # the next masks, too


def test_the_model_alone_and_from_a_wrapper(tmp_path):
    model, optimizer = made(steps=2)
    save_checkpoint(tmp_path, torch.compile(model, backend="eager"), optimizer, step=2, extra=[1])
    other, theirs = made(steps=1, seed=1)
    moments = {k: v for k, v in state(other, theirs).items() if "exp_avg" in k}
    assert load_checkpoint(tmp_path, other) == (2, [1])
    assert_equal(whole(other), whole(model))
    assert_equal({k: v for k, v in state(other, theirs).items() if "exp_avg" in k}, moments)
    assert load_checkpoint(tmp_path / "nothing", other) is None


def test_one_checkpoint_by_its_own_path(tmp_path):
    """Not the latest of its folder, and no warning that there is a later one."""
    model, optimizer = made(steps=1)
    path = save_checkpoint(tmp_path, model, optimizer, step=1)
    want = state(model, optimizer)
    save_checkpoint(tmp_path, *made(steps=2, seed=7), step=2)
    other, theirs = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_checkpoint(path, other, theirs) == (1, None)
    assert_equal(state(other, theirs), want)
    (path / "saving.json").write_text("{}")
    with pytest.raises(OSError, match="step-00000001 is a checkpoint that was not finished"):
        load_checkpoint(path, other)
    with pytest.raises(OSError, match="meta.json is a file, and not a folder of checkpoints"):
        load_checkpoint(path / "meta.json", other)


def elsewhere(world, path):
    """Loads, rank 0 from a folder that is not there."""
    model, _ = made()
    try:
        load_checkpoint(path if world.rank else f"{path}/nothing", model)
    except OSError as error:
        return str(error)


def test_ranks_that_load_from_unlike_folders(ranks, tmp_path):
    save_checkpoint(tmp_path, *made(steps=1), step=1)
    first, second = ranks(2, elsewhere, str(tmp_path))
    assert first == second and "has a checkpoint, and rank 0 sees none: all ranks must share one folder" in first


def test_before_the_first_step_there_is_no_state(tmp_path):
    save_checkpoint(tmp_path, *made(), step=0)
    other, theirs = made(steps=2)
    load_checkpoint(tmp_path, other, theirs)
    assert not theirs.state  # what the optimizer had is gone


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),  # a learning rate that is a tensor
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_other_optimizers(tmp_path, make):
    found = []
    for _ in range(2):
        model = GPT(STEP_CONFIG)
        optimizer = make(model.parameters())
        load_checkpoint(tmp_path, model, optimizer)
        for _ in range(2):
            model(**batch(STEP_CONFIG)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if not found:
            save_checkpoint(tmp_path, model, optimizer, step=2)
            for _ in range(2):
                model(**batch(STEP_CONFIG)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(state(model, optimizer))
    assert_equal(*found)


class Counting(torch.optim.SGD):
    """An optimizer with numbers of Python's in its state."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            values = self.state[p]
            values |= {"d": values.get("d", 0.1) * 1.1, "n": values.get("n", -(1 << 60)) + 1, "flag": True}


def test_numbers_of_an_optimizers_state_are_numbers_again(tmp_path):
    model, _ = made(steps=1)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(**batch(STEP_CONFIG)).loss.backward()
        optimizer.step()
    save_checkpoint(tmp_path, model, optimizer, step=2)
    other, _ = made()
    theirs = Counting(other.parameters(), lr=0.1, momentum=0.9)
    load_checkpoint(tmp_path, other, theirs)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        values, again = dict(optimizer.state[p]), dict(theirs.state[q])
        assert values.pop("momentum_buffer").equal(again.pop("momentum_buffer"))
        assert values == again == {"d": 0.1 * 1.1 * 1.1, "n": 2 - (1 << 60), "flag": True}
        assert [type(x) for x in values.values()] == [type(again[key]) for key in values] == [float, int, bool]


def test_numbers_that_are_tensors_come_back_in_place(tmp_path):
    """A compiled step holds on to them."""
    rate, betas = torch.tensor(0.5), (torch.tensor(0.25), torch.tensor(0.75))
    model, _ = made(steps=1)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=rate, betas=betas)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    for number in rate, *betas:
        number.fill_(0)
    load_checkpoint(tmp_path, model, optimizer)
    (group, *_) = optimizer.param_groups
    assert group["lr"] is rate and all(map(operator.is_, group["betas"], betas))
    assert (rate, *betas) == (0.5, 0.25, 0.75)


def test_a_checkpoint_without_an_optimizer_says_so(tmp_path):
    model, optimizer = made(steps=1)
    save_checkpoint(tmp_path, model, [], step=1)
    with pytest.raises(ValueError, match="the optimizer is AdamW, .* was written with none"):
        load_checkpoint(tmp_path, model, optimizer)


def test_state_that_cannot_be_resharded_is_refused(tmp_path):
    model = GPT(STEP_CONFIG)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    model(**batch(STEP_CONFIG)).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="save_checkpoint: the optimizer's row_var of embedding.weight is neither"):
        save_checkpoint(tmp_path, model, optimizer, step=1)
    assert not list(tmp_path.iterdir())


class Quantized(torch.Tensor):
    """As optimizers of few bits keep their states: a tensor of a class of its own."""


def test_state_of_another_tensor_class_is_refused(tmp_path):
    model, optimizer = made(steps=1)
    for values in optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].as_subclass(Quantized)
    with pytest.raises(ValueError, match="save_checkpoint: the optimizer's exp_avg of .* is a Quantized.*torch.save"):
        save_checkpoint(tmp_path, model, optimizer, step=1)
    assert not list(tmp_path.glob("step-*"))


# ---- errors, before anything changes ----


def edit(path, **changes):
    meta = path / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | changes))


def bigger(path):
    return made(replace(STEP_CONFIG, vocab_size=101), 1)


def deeper(path):
    return made(replace(STEP_CONFIG, num_layers=2), 1)


def shallower(path):
    """A checkpoint with a layer more than the model."""
    shutil.rmtree(path)
    save_checkpoint(path.parent, *made(replace(STEP_CONFIG, num_layers=2), 1), step=1)
    return made(steps=1)


def other_kind(path):
    config = BertConfig(vocab_size=97, max_positions=32, hidden_size=48, num_layers=1, num_heads=12, ffn_size=84)
    model = Bert(config)
    return model, torch.optim.AdamW(param_groups(model, 0.1))


def newer_format(path):
    edit(path, version=NEWEST + 1)
    return made(steps=1)


def one_group(path):
    model = GPT(STEP_CONFIG)
    return model, torch.optim.AdamW(model.parameters())


def other_groups(path):
    model = GPT(STEP_CONFIG)
    decayed, rest = param_groups(model, 0.1)
    rest["params"].append(decayed["params"].pop())
    return model, torch.optim.AdamW([decayed, rest])


def frozen(path):
    model = GPT(STEP_CONFIG)
    model.positions.weight.requires_grad_(False)
    return model, torch.optim.AdamW(param_groups(model, 0.1))


def strangers(path):
    model = GPT(STEP_CONFIG)
    return model, torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.ones(5))])


ERRORS = [
    (bigger, r"model.embedding.weight must be \(101, 48\) for this model, .* has \(97, 48\)"),
    (deeper, r"model.blocks.1.* for this model, .* has none"),
    (shallower, r"holds model.blocks.1.*, which this model has no place for"),
    (other_kind, r"must be .* for this model, .* has"),
    (newer_format, rf"has format version {NEWEST + 1}, this tpfuse reads {NEWEST}"),
    (one_group, r"the optimizer has 1 parameter groups, .* has 2"),
    (other_groups, r"group 0 of the optimizer has other parameters than .*: blocks.0.mlp.fc2.weight"),
    (frozen, r"group 0 of the optimizer has other parameters than .*: positions.weight"),
    (strangers, r"the optimizer holds a parameter of shape \(5,\) that is not the model's"),
]


@pytest.mark.parametrize("spoil, said", ERRORS, ids=[spoil.__name__ for spoil, _ in ERRORS])
def test_what_does_not_fit_is_said_before_anything_changes(tmp_path, spoil, said):
    path = save_checkpoint(tmp_path, *made(steps=2, seed=9), step=2)
    model, optimizer = spoil(path)
    before = state(model, optimizer)
    with pytest.raises(ValueError, match=said):
        load_checkpoint(tmp_path, model, optimizer)
    assert_equal(state(model, optimizer), before)


def both_refuse(world, directory):
    training = Training(world, 1)
    optimizer = torch.optim.AdamW(training.model.parameters())
    with pytest.raises(ValueError) as caught:
        load_checkpoint(directory, training.model, optimizer)
    torch.distributed.barrier()
    return str(caught.value)


def test_every_rank_says_the_same(ranks, written):
    first, second = ranks(2, both_refuse, written(*TP2))
    assert first == second and "1 parameter groups" in first


def cannot_write(world, directory):
    """The directory is a file on the way."""
    training = Training(world, 1)
    with pytest.raises(OSError) as caught:
        save_checkpoint(directory, training.model, training.optimizer, step=1)
    torch.distributed.barrier()
    return caught.value.errno


def test_an_error_of_rank_0_is_every_ranks(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    first, second = ranks(2, cannot_write, str(tmp_path / "file"))
    assert first == second


# ---- what is kept ----


def test_the_last_two_are_kept_and_nothing_else_is_touched(tmp_path):
    model, optimizer = made(steps=1)
    mine = {"notes.txt", "step-00000001-best", "model.safetensors", "step-2"}
    for name in mine:
        (tmp_path / name).mkdir() if name.startswith("step") else (tmp_path / name).write_text("mine")
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, model, optimizer, step=step)
        kept = {f"step-{s:08d}" for s in (step - 1, step) if s}
        assert names(tmp_path) == mine | kept | {"latest"}
    shutil.copytree(
        tmp_path / "step-00000004", tmp_path / "step-00000042"
    )  # somebody's copy: whole, and not of this line
    again = save_checkpoint(tmp_path, model, optimizer, step=4, extra="again")  # never written over
    assert again.name == "step-00000004-1" and load_checkpoint(tmp_path, model, optimizer) == (4, "again")
    assert names(tmp_path) == mine | {"step-00000004", "step-00000004-1", "step-00000042", "latest"}


def test_a_later_format_is_kept(tmp_path):
    """Somebody tried a newer tpfuse, which means something else by the same fields, and went back."""
    model, optimizer = made(steps=1)
    newer = save_checkpoint(tmp_path, model, optimizer, step=1)
    meta = json.loads((newer / "meta.json").read_text())
    (newer / "meta.json").write_text(json.dumps(meta | dict(version=NEWEST + 1)))
    for step in (2, 3, 4):
        save_checkpoint(tmp_path, model, optimizer, step=step)
    assert names(tmp_path) == {"step-00000001", "step-00000003", "step-00000004", "latest"}


# ---- killed ----

KILLS = {  # where the process is when it dies -> the step that is loaded then
    "before anything": ("tpfuse.training.checkpoint.save.check_shared", 1),
    "while shards are written": ("tpfuse.training.checkpoint.shards.os.fsync", 1),
    "before publishing": ("tpfuse.training.checkpoint.save._publish", 1),
    "before meta.json": ("tpfuse.training.checkpoint.folder.write_whole", 1),
    "before latest": ("tpfuse.training.checkpoint.folder.fsync", 1),  # of the folder with its meta.json
    "before cleaning": ("tpfuse.training.checkpoint.save.tidy", 2),
}


def killed_saves(folder):
    """In a process of its own, which forks one for each place: that one dies in its third save."""
    torch.set_num_threads(1)
    for place, (function, _) in KILLS.items():
        directory = folder / place
        directory.mkdir()
        if os.fork() == 0:
            model, optimizer = made(steps=1)
            save_checkpoint(directory, model, optimizer, step=0)
            save_checkpoint(directory, model, optimizer, step=1)
            with mock.patch(function, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)):
                save_checkpoint(directory, model, optimizer, step=2)
            os._exit(1)  # it has lived on
        assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL, place


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_previous_one(tmp_path):
    """Real processes, real SIGKILL, at each of these places; then the next save tidies up."""
    process = forking().Process(target=killed_saves, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    for place, (_, step) in KILLS.items():
        model, optimizer = made()
        assert load_checkpoint(tmp_path / place, model, optimizer) == (step, None), place
        assert_equal(whole(model), whole(made(steps=1)[0]))
        before = names(tmp_path / place)
        assert "step-00000001" in before and len(before) > 3 - (place == "before anything"), (place, before)
        save_checkpoint(tmp_path / place, model, optimizer, step=3)
        assert names(tmp_path / place) == {f"step-{step:08d}", "step-00000003", "latest"}, place
        assert load_checkpoint(tmp_path / place, model, optimizer) == (3, None)


def die_while_saving(world, directory):
    training = Training(world, 1)
    training.steps(0, 3)
    write = checkpoint.save.write_shard

    def killed(*args):
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    with mock.patch.object(checkpoint.save, "write_shard", killed):
        save_checkpoint(directory, training.model, training.optimizer, step=3)


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_save_leaves_the_previous_one(ranks, undisturbed, tmp_path):
    ranks(2, resume, str(tmp_path), 2, 1, "ddp", True)
    with pytest.raises(Exception):  # noqa: B017 -- the dead rank's, or what its peer makes of it
        ranks(2, die_while_saving, str(tmp_path))
    steps, weights, loaded = ranks(2, resume, str(tmp_path), 6, 1, "ddp", True)[0]
    assert loaded[0] == 2 and steps == undisturbed[0][2:]
    assert_equal(weights, undisturbed[1])
    assert names(tmp_path) == {"step-00000002", "step-00000006", "latest"}
