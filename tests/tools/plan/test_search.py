"""The search against all splits costed one by one."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.plan import fake
from tests.tools.plan.test_pieces import job_of
from tpfuse.layers.block import SAVING
from tpfuse.tools.ledger.presets import load_config
from tpfuse.tools.plan import search as searching
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.costs import cost_model
from tpfuse.tools.plan.pieces import LedgerCosts
from tpfuse.tools.plan.search import candidates, search
from tpfuse.tools.plan.split import Job, Split


def brute(job, devices, costs, fixed=()):
    """Seconds of all splits that fit, sorted."""
    search, seconds = searching._Search(job, costs, 10), []
    for split in candidates(job, devices, dict(fixed)):
        try:
            load = search.load(split)
        except ValueError:
            continue
        if load is not None:
            seconds.append(load.step().seconds)
    return sorted(seconds)


@settings(max_examples=12, deadline=None)
@given(
    devices=st.sampled_from([1, 2, 3, 4, 8]),
    batch=st.sampled_from([4, 6, 8]),
    blocks=st.lists(st.floats(0.2, 3), min_size=2, max_size=5),
    limit=st.sampled_from([float("inf"), 150.0, 60.0, 35.0, 20.0]),
    hop=st.sampled_from([0.0, 0.3]),
)
def test_it_finds_the_fastest_of_all(devices, batch, blocks, limit, hop):
    job, costs = fake.job(len(blocks), batch), fake.costs(fake.PieceCosts(blocks), limit=limit, hop=hop)
    try:
        splits = candidates(job, devices, {})
    except ValueError:
        return
    try:
        result = search(job, devices, costs)
    except ValueError as error:
        assert "four heads" in str(error)
        return
    assert [s.seconds for s in result.steps] == pytest.approx(brute(job, devices, costs)[:10])
    assert result.simulated <= len(splits) and result.complete
    assert all(
        s.peak <= limit and s.split.ranks == devices and sum(s.split.layers) == len(blocks) for s in result.steps
    )


def test_most_are_not_simulated():
    job = fake.job(8, 32)
    result = search(job, 8, fake.costs(fake.PieceCosts((1.0,) * 8)))
    assert len(result.steps) == 10 and result.simulated < result.costed / 5


def test_layers_give_way_to_memory():
    """The fastest cut leaves the first rank, which keeps the most, too many blocks."""
    job, pieces = fake.job(8, 32), fake.PieceCosts((1.0,) * 8, embedding=0.0, head=2.0)
    fixed = dict(tp=1, pp=4, dp=1, schedule="1f1b", micro_batch=1, saving="fastest", full=False)
    free = search(job, 4, fake.costs(pieces), fixed=fixed, keep=1).steps[0]
    limit = free.peak - 0.5
    tight = search(job, 4, fake.costs(pieces, limit=limit), fixed=fixed, keep=1).steps[0]
    assert tight.split.layers != free.split.layers and tight.peak <= limit and tight.seconds >= free.seconds


def test_fixed_fields():
    job, costs = fake.job(4, 8), fake.costs()
    result = search(job, 4, costs, fixed=dict(pp=2, schedule="zbv", layers=(1, 1, 1, 1), sharded=False))
    assert {(s.split.pp, s.split.schedule, s.split.layers) for s in result.steps} == {(2, "zbv", (1, 1, 1, 1))}
    assert [s.seconds for s in result.steps] == pytest.approx(
        brute(job, 4, costs, dict(pp=2, schedule="zbv", layers=(1, 1, 1, 1), sharded=False))[:10]
    )


def test_gradients_one_step_late_are_asked_for():
    """2bw waits for nothing, so that a search that took it would find it faster than 1F1B."""
    job, costs = fake.job(4, 8), fake.costs(fake.PieceCosts((1.0,) * 4))
    late = search(job, 4, costs, fixed=dict(schedule="2bw"), keep=100).steps
    assert {s.split.schedule for s in late} == {"2bw"} and not any(s.split.sharded for s in late)
    assert {s.split.pp for s in late} == {2, 4} and all(s.micro_batches >= 2 * (s.split.pp - 1) for s in late)
    free = search(job, 4, costs, keep=1000).steps
    assert "2bw" not in {s.split.schedule for s in free}
    flushed = min(s.seconds for s in free if (s.split.pp, s.split.schedule) == (4, "1f1b"))
    assert min(s.seconds for s in late if s.split.pp == 4) < flushed


@pytest.mark.parametrize(
    "fixed, message",
    [
        (dict(speed=9), "--fix knows dp, tp, pp,"),
        (dict(tp=0), "tp must be a positive integer, got 0"),
        (dict(schedule="best"), "schedule must be one of gpipe, 1f1b,"),
        (dict(saving="all"), "saving must be one of fastest, smallest, got all"),
        (dict(tp=3), "no split of 4 devices with tp=3 has dp x cp x tp x pp = 4"),
        (dict(pp=4, chunks=3), "stages within 4 layers"),
        (dict(layers=(2, 0)), "layers must be positive numbers of blocks"),
        (dict(layers=(1, 1)), "layers must add up to the model's 4 blocks, got 1-1"),
        (dict(layers=(3, 4)), "layers must add up to the model's 4 blocks, got 3-4"),
    ],
)
def test_refused(fixed, message):
    with pytest.raises(ValueError, match=message):
        search(fake.job(4, 8), 4, fake.costs(), fixed=fixed)


def test_a_model_without_a_possible_split():
    with pytest.raises(ValueError, match="no split that the model can do: four heads cannot be split"):
        search(fake.job(4, 8), 8, fake.costs(), fixed=dict(tp=8))


def test_a_model_that_fits_nowhere():
    result = search(fake.job(4, 8), 2, fake.costs(limit=5.0))
    assert result.steps == [] and result.fits == 0 and 5.0 < result.least < float("inf")
    assert not searching.fits(fake.job(4, 8), 2, fake.costs(limit=5.0), {})
    assert searching.fits(fake.job(4, 8), 2, fake.costs(limit=100.0), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixed"])
def test_the_cheap_bound_holds_for_the_ledgers_pieces(name):
    """Not vacuously: of splits that keep all it is the closer bound itself, and recomputed passes take longer."""
    bounds = searching._Search(job_of(name), fake.costs(LedgerCosts(preset("a100-80gb", 4))), 1)
    for tp, schedule in itertools.product((1, 2), ("1f1b", "zbv")):
        plain = Split(tp=tp, pp=2, schedule=schedule, chunks=1 + (schedule == "zbv"))
        if schedule == "1f1b":
            assert bounds.cheap_bound(plain) == bounds.compute_bound(plain)
        for saving, full in itertools.product(SAVING, (False, True)):
            split = plain._replace(saving=saving, full=full)
            assert bounds.cheap_bound(split) <= bounds.compute_bound(split) * (1 + 1e-12)
            assert (bounds.cheap_bound(split) > bounds.cheap_bound(plain)) == full


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "windows"])
def test_the_cheap_bound_holds_for_pieces(name):
    """From the cost of whole sequences, and one sum of all gradients: a model so small sends many, each for its
    latency."""
    pieces = LedgerCosts(preset("a100-80gb", 16))
    bounds = searching._Search(job_of(name), cost_model(pieces.cluster, pieces=pieces), 1)
    for kind, cp, full in itertools.product(("heads", "keys"), (2, 4), (False, True)):
        split = Split(tp=2, cp=cp, cp_kind=kind, full=full)
        assert 0.1 * bounds.compute_bound(split) < bounds.cheap_bound(split) <= bounds.compute_bound(split)


def test_an_interrupt_leaves_the_best_so_far(monkeypatch):
    ran, step = [], searching.Load.step

    def interrupted(load):
        ran.append(load)
        if len(ran) > 3:
            raise KeyboardInterrupt
        return step(load)

    monkeypatch.setattr(searching.Load, "step", interrupted)
    result = search(fake.job(4, 8), 4, fake.costs())
    assert len(result.steps) == 3 and not result.complete


def test_splits_cover_the_devices():
    splits = candidates(fake.job(4, 8), 8, {})
    most = Split(2, 2, 2, "zbv", 2, 4, "fastest", True, True)
    assert (
        {s.ranks for s in splits} == {8} and most in splits and most._replace(full=False, saving="smallest") in splits
    )
    assert len(set(splits)) == len(splits)


def test_experts_over_replicas_are_candidates_where_the_model_can_have_them():
    """Replicas, and experts that all ranks of a stage divide."""
    splits = candidates(job_of("mixed")._replace(batch=16), 16, {})
    over = {(s.dp, s.tp, s.pp) for s in splits if s.over_replicas}
    assert {pp for *_, pp in over} == {2, 4} and {s.pp for s in splits} == {1, 2, 4}
    splits = candidates(job_of("mixed")._replace(batch=16), 8, {})
    over = {(s.dp, s.tp, s.pp) for s in splits if s.over_replicas}
    assert over >= {(8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (2, 1, 4)} and (1, 4, 2) not in over
    assert not any(s.cp > 1 for s in splits if s.over_replicas)
    assert {s.sharded for s in splits if s.over_replicas} == {False, True}
    assert not any(s.over_replicas for s in candidates(job_of("gpt2"), 8, {}))
    with pytest.raises(ValueError, match="no split of 8 devices with cp=2, over_replicas=True has"):
        candidates(job_of("mixed"), 8, dict(cp=2, over_replicas=True))


def test_pieces_of_sequences_are_candidates():
    """Of the kind that sends less, with micro-batches of one sequence where twice the replicas could have it whole."""
    splits = candidates(fake.job(4, 8), 8, {})
    pieces = [s for s in splits if s.cp > 1]
    assert {s.cp for s in pieces} == {2, 4, 8} and {s.micro_batch for s in pieces} == {1}
    assert {(s.dp, s.sharded) for s in pieces} == {(dp, sharded) for dp in (1, 2, 4) for sharded in (False, True)}
    assert {(s.cp, s.cp_kind) for s in pieces if s.tp == 1} == {(2, "heads"), (4, "heads"), (8, "keys")}
    assert {s.cp for s in candidates(fake.job(4, 8), 12, {}) if s.micro_batch == 2} == {1, 3}
    keys = candidates(fake.job(4, 8), 8, dict(cp=2, micro_batch=2, cp_kind="keys"))
    assert {(s.cp, s.micro_batch, s.cp_kind) for s in keys} == {(2, 2, "keys")}
    assert not any(s.cp > 1 and s.over_replicas for s in candidates(job_of("mixed"), 8, {}))


A100S = LedgerCosts(preset("a100-80gb", 64))


def test_a_long_sequence_that_tensor_parallelism_alone_does_not_hold():
    """131,072 tokens of an 8B model, eight ranks of tp in a node, nothing recomputed: a rank would need 83.9 GB."""
    job, costs = Job(load_config("llama3.1-8b"), 8, 131072), cost_model(A100S.cluster, pieces=A100S)
    fixed = dict(tp=8, pp=1, saving="fastest", full=False, sharded=True)
    alone = search(job, 64, costs, fixed=fixed | dict(cp=1))
    assert alone.steps == [] and alone.least == pytest.approx(83.9e9, rel=1e-3) and costs.limit == 72e9
    best = search(job, 64, costs, fixed=fixed).steps[0]
    assert (best.split.dp, best.split.cp, best.split.cp_kind) == (4, 2, "keys") and best.peak < 72e9


def test_saving_of_recomputed_blocks():
    splits = candidates(fake.job(4, 8), 8, {})
    fixed = candidates(fake.job(4, 8), 8, {"saving": "smallest"})
    assert {s.saving for s in splits if s.full} == {"fastest"}
    assert {(s.saving, s.full) for s in fixed} == {("smallest", False), ("smallest", True)}
