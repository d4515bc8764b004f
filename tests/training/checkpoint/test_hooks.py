"""Checkpoints of a sparse all-reduce: residuals and thresholds, at the same layout bit for bit and at others."""

import json
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.models.common import STEP_CONFIG, batch, default_dtype
from tests.training.checkpoint.common import made
from tpfuse import OkTopk, TensorParallel, check_replicas, load_checkpoint, ok_topk_hook, param_groups, save_checkpoint
from tpfuse.models import GPT
from tpfuse.training.checkpoint.meta import sealed


class Sparse:
    """A GPT at (dp, tp) whose gradients are averaged by what is large."""

    def __init__(self, world, dp, tp):
        self.mesh = world.mesh(dp, tp)
        with default_dtype(torch.float64):
            self.model = GPT(STEP_CONFIG, tp=TensorParallel(self.mesh["tp"]), dp=self.mesh["dp"])
        self.group = self.mesh["dp"].get_group()
        self.hook = OkTopk(0.05, exact_every=3, borders_every=2, group=self.group)
        self.ddp = DistributedDataParallel(self.model, process_group=self.group, bucket_cap_mb=0.02)
        self.ddp.register_comm_hook(self.hook, ok_topk_hook)
        self.optimizer = torch.optim.AdamW(param_groups(self.model, 0.1), lr=1e-3)

    def steps(self, first, last):
        for step in range(first, last):
            self.ddp(**batch(STEP_CONFIG, seed=10 * step + self.group.rank())).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        parts = {id(p): part for unit in self.hook.units for p, part in unit.parts()}
        return {n: (p.detach().clone(), parts[id(p)].clone()) for n, p in self.model.named_parameters()}

    def load(self, directory, **options):
        return load_checkpoint(directory, self.ddp, self.optimizer, **options)


def saved(world, directory, dp, tp, background):
    run = Sparse(world, dp, tp)
    run.steps(0, 4)
    made = save_checkpoint(directory, run.ddp, run.optimizer, step=4, hook=run.hook, background=background)
    half = run.state()
    run.steps(4, 7)
    if background:
        made.result()
    return half, run.state(), [unit.state for unit in run.hook.units]


def resumed(world, directory, dp, tp):
    run = Sparse(world, dp, tp)
    assert run.load(directory, hook=run.hook) == (4, None)
    half = run.state()
    run.steps(4, 7)
    check_replicas(run.ddp, run.optimizer)
    return half, run.state(), [unit.state for unit in run.hook.units]


def same(a, b):
    return all(torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True))


@pytest.mark.parametrize(
    "dp, tp, background", [(2, 1, False), (2, 1, True), pytest.param(2, 2, False, marks=pytest.mark.slow)]
)
def test_the_same_layout_goes_on_bit_for_bit(ranks, tmp_path, dp, tp, background):
    before = ranks(dp * tp, saved, tmp_path, dp, tp, background)
    after = ranks(dp * tp, resumed, tmp_path, dp, tp)
    for (half, end, states), (half_again, end_again, states_again) in zip(before, after, strict=True):
        assert same(half, half_again) and same(end, end_again) and states == states_again


@pytest.mark.slow
def test_what_every_tensor_parallel_rank_has_whole_stays_the_same_on_all(ranks, tmp_path):
    """A unit of slices chooses by each rank's own: a parameter that ranks share may not be in one."""
    first, second, *_ = [end for _, end, _ in ranks(4, saved, tmp_path, 2, 2, False)]
    shared = [name for name in first if "norm" in name or name.endswith("fc2.bias")]
    assert shared and same({n: first[n] for n in shared}, {n: second[n] for n in shared})


@pytest.mark.parametrize("dp, tp", [(1, 1), (3, 1), (1, 2)])
def test_at_other_sizes_what_is_to_come_stays(ranks, tmp_path, dp, tp):
    """A step adds the mean of the residuals to the average: each new one is the mean of the old.

    At another tensor-parallel size a unit is divided: of what ranks share, all choose the same entries.
    """
    before = [half for half, *_ in ranks(2, saved, tmp_path, 2, 1, False)]
    after = ranks(dp * tp, resumed, tmp_path, dp, tp)
    for name in before[0]:
        mean = (before[0][name][1] + before[1][name][1]) / 2
        for half, *_ in after:
            if half[name][1].shape == mean.shape:  # not a slice
                torch.testing.assert_close(half[name][1], mean, rtol=1e-12, atol=0)
    assert any(half[name][1].count_nonzero() for half in before for name in half)


def without(world, directory):
    """-> what a load says that is not told of the hook"""
    run = Sparse(world, 2, 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.load(directory)
    return [str(w.message) for w in said if "OkTopk" in str(w.message)], run.hook.units


def test_a_load_without_the_hook_says_what_is_left_out(ranks, tmp_path):
    ranks(2, saved, tmp_path, 2, 1, False)
    (said, units), (others, _) = ranks(2, without, tmp_path)
    assert "hook= is not given" in said[0] and not units and not others


def dense(world, directory):
    """Loads a hook from a checkpoint that had none."""
    run = Sparse(world, 2, 1)
    run.steps(0, 1)
    save_checkpoint(directory, run.ddp, run.optimizer, step=1)
    run.load(directory, hook=run.hook)
    return run.hook.units, run.hook.step


def test_a_checkpoint_without_a_hook_starts_it_anew(ranks, tmp_path):
    assert ranks(2, dense, tmp_path) == [([], 0)] * 2


def foreign(world, directory):
    run = Sparse(world, 2, 1)
    other = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    hook = OkTopk(1.0)
    other.register_comm_hook(hook, ok_topk_hook)
    other(torch.ones(1, 2)).sum().backward()
    try:
        save_checkpoint(directory, run.ddp, run.optimizer, step=1, hook=hook)
    except ValueError as error:
        return str(error)


def test_a_hook_of_another_model_is_refused(ranks, tmp_path):
    assert all("not the model's" in said for said in ranks(2, foreign, tmp_path))
    assert not (tmp_path / "latest").exists()


def on_one_rank(world, directory, rank):
    run = Sparse(world, 2, 1)
    run.steps(0, 1)
    with pytest.raises(ValueError) as caught:
        save_checkpoint(directory, run.ddp, run.optimizer, step=1, hook=run.hook if world.rank == rank else None)
    return str(caught.value)


@pytest.mark.parametrize(
    "rank, words", [(0, 'got {"replicas": 2, .* on rank 0 and nothing'), (1, "got nothing on rank 0")]
)
def test_a_hook_on_one_rank_alone_is_refused(ranks, tmp_path, rank, words):
    first, second = ranks(2, on_one_rank, str(tmp_path), rank)
    assert first == second and re.match(f"save_checkpoint: hook must be the same on every rank, {words}", first)
    assert not list(tmp_path.iterdir())


def test_what_is_written_of_it(ranks, tmp_path):
    ranks(2, saved, tmp_path, 2, 1, False)
    (meta,) = tmp_path.glob("step-*/meta.json")
    said = json.loads(meta.read_text())
    assert (said["hook"]["replicas"], said["hook"]["step"]) == (2, 4)
    names = sorted(name for unit in said["hook"]["units"] for name in unit)
    assert sorted(n.removeprefix("residual.1.") for n in said["tensors"] if n.startswith("residual.1.")) == names


BAD = [3, [], {}, dict(replicas=2, step=1), dict(replicas=2, step=-1, units=[]), dict(replicas=2, step=1, units=[[3]])]


@pytest.mark.parametrize("said", BAD, ids=str)
def test_a_hook_of_another_form_is_damage(tmp_path, said):
    model, optimizer = made()
    path = save_checkpoint(tmp_path, model, optimizer, step=1) / "meta.json"
    values = json.loads(path.read_text()) | dict(hook=said)
    path.write_bytes(sealed({key: value for key, value in values.items() if key != "sha256"}))
    with pytest.raises(ValueError, match="is damaged: hook must be replicas, a step and units of names"):
        load_checkpoint(tmp_path, model, optimizer)
