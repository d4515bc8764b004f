"""Names in a checkpoint are the model's own, whatever of torch's wraps its blocks.

Spans: tpfuse/training/checkpoint/state.py and tpfuse/models/files/: both name the parameters of a wrapped model.
"""

import json

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.common import assert_equal
from tests.models.common import batch
from tests.training.checkpoint.common import made, state
from tpfuse import data_parallel, load_checkpoint, save_checkpoint
from tpfuse.models import GPT


def wrap(model, how):
    if how == "outside":
        return torch.compile(checkpoint_wrapper(model))
    for i, block in enumerate(model.blocks):
        model.blocks[i] = {
            "checkpoint": checkpoint_wrapper,
            "compile": torch.compile,
            "both": lambda b: torch.compile(checkpoint_wrapper(b)),
        }[how](block)
    return model


@pytest.mark.parametrize("how", ["checkpoint", "compile", "both", "outside"])
def test_there_and_back(tmp_path, how):
    model, optimizer = made(steps=1)
    exact = state(model, optimizer)
    wrapped = wrap(model, how)
    path = save_checkpoint(tmp_path, wrapped, optimizer, step=1)
    assert "_checkpoint_wrapped_module" not in (path / "meta.json").read_text()
    assert "_orig_mod" not in (path / "meta.json").read_text()

    plain, its = made(seed=1)
    assert load_checkpoint(tmp_path, plain, its) == (1, None)
    assert_equal(state(plain, its), exact)

    save_checkpoint(tmp_path, plain, its, step=2)
    other, its = made(seed=2)
    inside = other
    assert load_checkpoint(tmp_path, wrap(other, how), its) == (2, None)
    clean = lambda name: name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
    assert_equal({clean(k): v for k, v in state(inside, its).items()}, exact)


def test_a_replica_of_micro_batches(tmp_path):
    """What data_parallel returns where gradients are trees."""
    model, optimizer = made(steps=1, seed=5)
    exact = state(model, optimizer)
    path = save_checkpoint(tmp_path, data_parallel(model, None, bitwise_micro_batches=2), optimizer, step=1)
    meta = json.loads((path / "meta.json").read_text())
    assert (meta["seed"], meta["model_step"]) == (5, 1) and meta["config"]["hidden_size"] == 48
    for wrap in (lambda model: model, lambda model: data_parallel(model, None, bitwise_micro_batches=2)):
        other, theirs = made(seed=1)
        assert load_checkpoint(tmp_path, wrap(other), theirs) == (1, None)
        assert_equal(state(other, theirs), exact)


class WithStep(torch.nn.Linear):
    """A module of one's own whose ``step`` and ``seed`` are no numbers of tpfuse's."""

    seed = None

    @property
    def step(self):
        return torch.ones(2)


def test_steps_and_seeds_of_other_modules_are_their_own(tmp_path):
    models = WithStep(4, 4), torch.nn.Linear(4, 4)
    models[1].step = 7
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = save_checkpoint(tmp_path, model, optimizer, step=1)
        assert '"seed": 0,\n"model_step": 0,\n' in (path / "meta.json").read_text()
        assert load_checkpoint(tmp_path, model, optimizer) == (1, None)
    assert models[0].seed is None and models[1].step == 7 and not hasattr(models[1], "seed")


def test_files_of_a_wrapped_model(tmp_path):
    model, _ = made()
    exact = model(**batch(model.config)).loss
    wrap(model, "checkpoint").save_pretrained(tmp_path)
    assert torch.equal(GPT.from_pretrained(tmp_path).train()(**batch(model.config), step=0).loss, exact)
