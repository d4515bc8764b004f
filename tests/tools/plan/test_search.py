"""The search, against every split there is."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.plan import fake
from tests.tools.plan.test_pieces import job_of
from tpfuse.layers.block import SAVING
from tpfuse.tools.plan import search as searching
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.pieces import LedgerCosts
from tpfuse.tools.plan.search import candidates, search
from tpfuse.tools.plan.split import Split


def brute(job, devices, means, fixed=()):
    """Seconds of every split that fits, the fastest first, and the least bytes of those that do not."""
    looking, took = searching._Search(job, means, 10), []
    for split in candidates(job, devices, dict(fixed)):
        try:
            load = looking.placed(split)
        except ValueError:
            continue
        if load is not None:
            took.append(load.step().seconds)
    return sorted(took)


@settings(max_examples=12, deadline=None)
@given(
    devices=st.sampled_from([1, 2, 3, 4, 8]),
    batch=st.sampled_from([4, 6, 8]),
    blocks=st.lists(st.floats(0.2, 3), min_size=2, max_size=5),
    limit=st.sampled_from([float("inf"), 150.0, 60.0, 35.0, 20.0]),
    hop=st.sampled_from([0.0, 0.3]),
)
def test_it_finds_the_fastest_of_all(devices, batch, blocks, limit, hop):
    job, means = fake.job(len(blocks), batch), fake.means(fake.Costs(blocks), limit=limit, hop=hop)
    try:
        every = candidates(job, devices, {})
    except ValueError:
        return
    try:
        found = search(job, devices, means)
    except ValueError as error:
        assert "four heads" in str(error)
        return
    assert [s.seconds for s in found.steps] == pytest.approx(brute(job, devices, means)[:10])
    assert found.simulated <= len(every) and found.complete
    assert all(s.peak <= limit and s.split.ranks == devices and sum(s.split.layers) == len(blocks) for s in found.steps)


def test_most_are_not_simulated():
    job = fake.job(8, 32)
    found = search(job, 8, fake.means(fake.Costs((1.0,) * 8)))
    assert len(found.steps) == 10 and found.simulated < found.looked / 5


def test_layers_give_way_to_memory():
    """The fastest cut leaves the first rank, which keeps the most, too many blocks."""
    job, costs = fake.job(8, 32), fake.Costs((1.0,) * 8, embedding=0.0, head=2.0)
    fixed = dict(tp=1, pp=4, dp=1, schedule="1f1b", micro_batch=1, saving="fastest", full=False)
    free = search(job, 4, fake.means(costs), fixed=fixed, keep=1).steps[0]
    limit = free.peak - 0.5
    tight = search(job, 4, fake.means(costs, limit=limit), fixed=fixed, keep=1).steps[0]
    assert tight.split.layers != free.split.layers and tight.peak <= limit and tight.seconds >= free.seconds


def test_fixed_fields():
    job, means = fake.job(4, 8), fake.means()
    found = search(job, 4, means, fixed=dict(pp=2, schedule="zbv", layers=(1, 1, 1, 1), sharded=False))
    assert {(s.split.pp, s.split.schedule, s.split.layers) for s in found.steps} == {(2, "zbv", (1, 1, 1, 1))}
    assert [s.seconds for s in found.steps] == pytest.approx(
        brute(job, 4, means, dict(pp=2, schedule="zbv", layers=(1, 1, 1, 1), sharded=False))[:10]
    )


@pytest.mark.parametrize(
    "fixed, words",
    [
        (dict(speed=9), "--fix knows dp, tp, pp,"),
        (dict(tp=0), "tp must be a positive integer, got 0"),
        (dict(schedule="best"), "schedule must be one of gpipe, 1f1b,"),
        (dict(saving="all"), "saving must be one of fastest, smallest, got all"),
        (dict(tp=3), "no split of 4 devices with tp=3 has dp x tp x pp = 4"),
        (dict(pp=4, chunks=3), "stages within 4 layers"),
        (dict(layers=(2, 0)), "layers must be positive numbers of blocks"),
    ],
)
def test_what_is_refused(fixed, words):
    with pytest.raises(ValueError, match=words):
        search(fake.job(4, 8), 4, fake.means(), fixed=fixed)


def test_a_model_that_no_split_suits():
    with pytest.raises(ValueError, match="no split that the model can do: four heads cannot be split"):
        search(fake.job(4, 8), 8, fake.means(), fixed=dict(tp=8))


def test_a_model_that_fits_nowhere():
    found = search(fake.job(4, 8), 2, fake.means(limit=5.0))
    assert found.steps == [] and found.fits == 0 and 5.0 < found.least < float("inf")
    assert not searching.fits(fake.job(4, 8), 2, fake.means(limit=5.0), {})
    assert searching.fits(fake.job(4, 8), 2, fake.means(limit=100.0), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_first_bound_holds_for_the_ledgers_pieces(name):
    """And not by chance: of what keeps all it is the bound itself, and recomputed passes are seen to take longer."""
    looking = searching._Search(job_of(name), fake.means(LedgerCosts(preset("a100-80gb", 4))), 1)
    for tp, schedule in itertools.product((1, 2), ("1f1b", "zbv")):
        plain = Split(tp=tp, pp=2, schedule=schedule, chunks=1 + (schedule == "zbv"))
        if schedule == "1f1b":
            assert looking.first_bound(plain) == looking.at_least(plain)
        for saving, full in itertools.product(SAVING, (False, True)):
            split = plain._replace(saving=saving, full=full)
            assert looking.first_bound(split) <= looking.at_least(split) * (1 + 1e-12)
            assert (looking.first_bound(split) > looking.first_bound(plain)) == full


def test_an_interrupt_leaves_the_best_so_far(monkeypatch):
    ran, step = [], searching.Load.step

    def interrupted(load):
        ran.append(load)
        if len(ran) > 3:
            raise KeyboardInterrupt
        return step(load)

    monkeypatch.setattr(searching.Load, "step", interrupted)
    found = search(fake.job(4, 8), 4, fake.means())
    assert len(found.steps) == 3 and not found.complete


def test_splits_cover_the_devices():
    every = candidates(fake.job(4, 8), 8, {})
    most = Split(2, 2, 2, "zbv", 2, 4, "fastest", True, True)
    assert {s.ranks for s in every} == {8} and most in every and most._replace(full=False, saving="smallest") in every
    assert len(set(every)) == len(every)


def test_recomputed_blocks_keep_as_is_fixed():
    every = candidates(fake.job(4, 8), 8, {})
    fixed = candidates(fake.job(4, 8), 8, {"saving": "smallest"})
    assert {s.saving for s in every if s.full} == {"fastest"}
    assert {(s.saving, s.full) for s in fixed} == {("smallest", False), ("smallest", True)}
