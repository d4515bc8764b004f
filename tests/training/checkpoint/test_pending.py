"""Checkpoints of gradients that are one step late: a save changes no bit, and every layout goes on; what is refused."""

import json
from pathlib import Path

import pytest
import torch

from tests.models.common import default_dtype
from tests.pipeline.common import GPT2, ROWS, batches, made, mine, place, said
from tpfuse import (
    DelayedGradients,
    TensorParallel,
    clip_grad_norm_,
    load_checkpoint,
    param_groups,
    save_checkpoint,
)
from tpfuse.layers.shards import named_specs
from tpfuse.pipeline import schedule

SAVED, STEPS = 2, 4
ONE, TWO, SPLIT, REPLICAS = ((1, 1, 1), None), ((2, 1, 1), "2bw"), ((2, 1, 2), "2bw"), ((2, 2, 1), "2bw")


class Training:
    """A model over ``layout``, (pp, dp, tp), whose gradients are one step late: by 2bw, or None, by one process."""

    def __init__(self, world, layout, name):
        mesh = world.stages(*layout)
        self.rows = mine(mesh)
        with default_dtype(torch.float64):
            options = {} if name is None else place(mesh, name)
            self.model = made(GPT2, tp=TensorParallel(mesh["tp"]), **options)
            self.optimizer = torch.optim.AdamW(param_groups(self.model, weight_decay=0.1), lr=1e-2)
        if name is None:
            self.delayed = DelayedGradients(self.model)
        else:
            self.delayed = schedule(self.model, mesh["pp"], name, ROWS // mesh["dp"].size())

    def steps(self, first, end, directory=None):
        """-> each step's loss, saving after SAVED of them where there is a directory."""
        losses = []
        for t, (ids, labels) in list(enumerate(batches(end)))[first:]:
            if isinstance(self.delayed, DelayedGradients):
                loss = self.model(ids, labels=labels).loss
                loss.backward()
                loss = self.delayed.swap(loss)
            else:
                loss = self.delayed.step(ids[self.rows], labels=labels[self.rows])
            losses.append(None if loss is None else loss.item())
            clip_grad_norm_(self.model, 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if directory and t + 1 == SAVED:
                self.model.eval()  # as before an evaluation; the batch in flight goes on as it began
                save_checkpoint(directory, self.model, self.optimizer, step=SAVED)
                self.model.train()
        losses.append(self.delayed.drain().item())
        weights = {
            name: (spec.local(tp), p.detach().clone(), p.grad.clone()) for name, p, spec, tp in named_specs(self.model)
        }
        return losses, weights


def undisturbed(world, where, directory=None):
    return Training(world, *where).steps(0, STEPS, directory)


def resumed(world, where, directory, forget=False):
    training = Training(world, *where)
    training.steps(0, 1)  # what is in flight is not that of the file
    training.optimizer.zero_grad()
    assert load_checkpoint(directory, training.model, training.optimizer) == (SAVED, None)
    if forget:
        training.delayed.resume(None)
        return training.steps(SAVED, STEPS)[0]
    return training.steps(SAVED, STEPS)


def size(where):
    (pp, dp, tp), _ = where
    return pp * dp * tp


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """where -> the directory of a run that saved, and what each rank had at its end."""
    known = {}

    def make(where):
        if where not in known:
            directory = str(tmp_path_factory.mktemp("run"))
            known[where] = directory, ranks(size(where), undisturbed, where, directory)
        return known[where]

    return make


def same_bits(a, b):
    assert a[0] == b[0]
    assert all(torch.equal(a[1][name][i], b[1][name][i]) for name in a[1] for i in (1, 2))


@pytest.mark.parametrize("where", [ONE, TWO, pytest.param(SPLIT, marks=pytest.mark.slow)], ids=str)
def test_a_save_changes_no_bit_and_is_resumed_bit_for_bit(ranks, run, where):
    directory, saved = run(where)
    for rank, (plain, again) in enumerate(
        zip(ranks(size(where), undisturbed, where), ranks(size(where), resumed, where, directory), strict=True)
    ):
        same_bits(saved[rank], plain)
        assert again[0] == plain[0][SAVED:]
        same_bits((None, again[1]), (None, plain[1]))


@pytest.mark.parametrize(
    "before, after",
    [
        (TWO, ONE),
        (ONE, SPLIT),
        pytest.param(SPLIT, REPLICAS, marks=pytest.mark.slow),
        pytest.param(REPLICAS, TWO, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_goes_on(ranks, run, before, after):
    losses, weights = run(ONE)[1][0]
    for again, held in ranks(size(after), resumed, after, run(before)[0]):
        assert again == pytest.approx(losses[SAVED:], rel=1e-9)
        for name, (place_, *tensors) in held.items():
            for x, exact in zip(tensors, weights[name][1:], strict=True):
                assert (x - exact[place_]).abs().max() < 1e-9, name


def test_a_forgotten_gradient_is_seen(ranks, run):
    losses = run(ONE)[1][0][0]
    (again,) = ranks(1, resumed, ONE, run(TWO)[0], True)
    assert again[0] is None and abs(again[-1] - losses[-1]) > 1e-6


def test_it_comes_back_in_the_models_dtype(tmp_path):
    ids = torch.arange(12).view(2, 6)
    for dtype, resumes in ((torch.float32, False), (torch.bfloat16, True)):
        model = made(GPT2).to(dtype)
        delayed, optimizer = DelayedGradients(model), torch.optim.AdamW(model.parameters())
        if resumes:
            load_checkpoint(tmp_path, model, optimizer)
        loss = model(ids, labels=ids).loss
        loss.backward()
        delayed.swap(loss)
        if not resumes:
            save_checkpoint(tmp_path, model, optimizer, step=1)
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.count_nonzero() for p in model.parameters())


def on_rank_0_alone(world, directory):
    """-> the errors of a save where a gradient waits on rank 0, and of a load where rank 0 alone could take one."""
    model = made(GPT2)
    optimizer, ids = torch.optim.AdamW(model.parameters()), torch.arange(12).view(2, 6)
    delayed = DelayedGradients(model)

    def late():
        loss = model(ids, labels=ids, step=0, first_sample=0).loss
        loss.backward()
        delayed.swap(loss)

    if world.rank == 0:
        late()
    errors = [said(lambda: save_checkpoint(directory, model, optimizer, step=1))]
    if world.rank > 0:
        late()
    save_checkpoint(directory, model, optimizer, step=1)
    other = model if world.rank == 0 else made(GPT2)
    theirs = torch.optim.AdamW(other.parameters())
    return [*errors, said(lambda: load_checkpoint(directory, other, theirs))]


def test_one_that_some_ranks_have_is_named(ranks, tmp_path):
    for save, load in ranks(3, on_rank_0_alone, str(tmp_path)):
        words = "save_checkpoint: a gradient that is not yet applied waits on rank 0 and not on ranks 1, 2: "
        assert save.startswith(words)
        assert "of training with gradients one step late, and nothing on ranks 1, 2 would apply it; load" in load


def refusals(world, directory):
    model = made(GPT2)
    optimizer = torch.optim.AdamW(param_groups(model.double(), weight_decay=0.1), lr=1e-2)
    found = said(lambda: load_checkpoint(directory, model, optimizer))
    assert load_checkpoint(directory, model) == (SAVED, None)  # the weights alone: nothing is trained
    return found


def test_without_a_delay_it_is_refused(ranks, run):
    directory, _ = run(TWO)
    (words,) = ranks(1, refusals, directory)
    assert "holds a gradient that is not yet applied" in words and "tpfuse.DelayedGradients(model)" in words
    (meta,) = Path(directory).glob("step-*/meta.json")
    assert json.loads(meta.read_text())["version"] == 3  # which a reader without delays refuses
