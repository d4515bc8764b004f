"""A step's estimate against the simulator, its lower bound, and peak memory against the order's own actions."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.plan import fake
from tpfuse.models import GPTConfig
from tpfuse.pipeline import order, simulate
from tpfuse.pipeline.schedules import EVERY, TRAINED, begun, possible
from tpfuse.tools.ledger import Pipe, Plan, dry_pipeline
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.pieces import LedgerCosts
from tpfuse.tools.plan.spans import Spans
from tpfuse.tools.plan.split import Job, Split
from tpfuse.tools.plan.step import DP, OPTIMIZER, PP, STEP_PARTS, Load, micro_batches

SPLIT = Split(pp=2, layers=(2, 2))


def load(split, job=None, **options):
    job, costs = job or fake.job(sum(split.layers)), fake.costs(**options)
    return Load(job, split, costs, Spans(costs.pieces(job, split), split=EVERY[split.schedule].split))


def one_of(name, data):
    """A split of a schedule that it can do, with its job."""
    ranks, chunks = data.draw(st.sampled_from([2, 4])), data.draw(st.sampled_from([1, 2]))
    count = data.draw(st.sampled_from([2, 4, 8, 12]))
    choices = EVERY[name].chunks
    chunks = chunks if chunks in choices else choices[0]
    count = max(count, {"dualpipev": ranks * chunks, "2bw": 2 * (ranks - 1)}.get(name, 0))
    layers = tuple(data.draw(st.integers(1, 3)) for _ in range(ranks * chunks))
    blocks = [data.draw(st.floats(0.1, 3)) for _ in range(sum(layers))]
    possible(name, ranks, count, chunks)
    split = Split(2, 1, ranks, name, chunks, layers=layers)
    return split, fake.job(len(blocks), 2 * count), fake.PieceCosts(blocks, head=data.draw(st.floats(0, 3)))


@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_step_is_the_simulators(name, data):
    split, job, pieces = one_of(name, data)
    hop = data.draw(st.sampled_from([0.0, 0.2]))
    loaded = load(split, job, pieces=pieces, hop=hop)
    step, stages, count = loaded.step(), loaded.stages, micro_batches(job, split)
    actions_of, two_passes = order(name, split.pp, count, chunks=split.chunks), EVERY[name].split
    F, B, I, W = stages.passes.T.tolist()  # noqa: E741
    messages = fake.hops(split.pp, hop * split.micro_batch).tolist()
    halves = (I, W) if two_passes else (B, [0.0] * len(W))
    timeline = simulate(actions_of, F, *halves, communication=messages)
    assert loaded.timeline() == timeline
    assert step.hop == pytest.approx(hop * split.micro_batch * (3 if split.pp > 2 else 1))
    tail = loaded.copies + loaded.dp + loaded.update
    assert (loaded.copies > 0).all() == (name == "chimera" and hop > 0)
    begins = [events[0].start if name == "2bw" else 0.0 for events in timeline.events]
    ends = [events[-1].end + t - begin for events, t, begin in zip(timeline.events, tail, begins, strict=True)]
    assert step.seconds == pytest.approx(max(ends)) and ends[step.rank] == pytest.approx(max(ends))
    assert sum(loaded.busy) == pytest.approx(sum(timeline.busy))
    assert sum(step.parts.values()) == pytest.approx(step.seconds) and tuple(step.parts) == STEP_PARTS
    assert loaded.bound <= step.seconds * (1 + 1e-9)
    # the peak by the order's own list of actions
    for rank, (memory, actions) in enumerate(zip(step.memory, actions_of.actions, strict=True)):
        changes = {"F": stages.saved, "B": -stages.saved, "I": stages.held - stages.saved, "W": -stages.held}
        before = sum(stages.saved[a.stage] for a in begun(actions))
        peak = max(itertools.accumulate((changes[a.kind][a.stage] for a in actions), initial=before))
        assert memory.activations == pytest.approx(peak + 0.3) and memory.state == 16 * loaded.parameters[rank]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_bound_is_tight_where_stages_are_alike(name):
    chunks = EVERY[name].chunks[0]
    pieces = fake.PieceCosts((1.0,) * 4 * chunks, embedding=0.01, head=0.0)  # as much as a border
    split = Split(1, 1, 4, name, chunks, layers=(1,) * 4 * chunks)
    loaded = load(split, fake.job(4 * chunks, 8), pieces=pieces, hop=0.0)
    assert loaded.bound == pytest.approx(loaded.step().seconds, rel=1e-3)


def test_sums_hide_only_behind_the_last_backward_pass():
    alone = Split(dp=2, layers=(4,))
    size = load(alone).parameters[0] * 2
    backward = load(alone).stages.seconds("B").sum()
    for hides, split, seconds in (
        (False, alone, 0.1 * size),
        (True, alone, max(0.0, 0.1 * size - backward)),
        (False, alone._replace(sharded=True), 4 * 0.15 * size),
        (True, alone._replace(sharded=True), 0.0),
    ):
        assert load(split, fake.job(4, 8), hides=hides).step().parts[DP] == pytest.approx(seconds)
    staged = load(Split(2, 1, 2, layers=(2, 2)), fake.job(4, 8), hides=True)
    assert staged.dp.tolist() == pytest.approx((0.1 * 2 * staged.parameters).tolist()) and min(staged.dp) > 0
    sharded = load(Split(2, 1, 2, sharded=True, layers=(2, 2)), fake.job(4, 8))  # a gather and a scatter
    assert sharded.dp.tolist() == pytest.approx(staged.dp.tolist())


def test_parts_of_one_rank():
    step = load(Split(tp=2, layers=(4,)), fake.job(4, 8)).step()
    assert step.parts[PP] == pytest.approx(0.0, abs=1e-9) and step.parts[DP] == 0.0 and step.parts[OPTIMIZER] > 0
    assert step.parts["GEMM"] == pytest.approx(2 * step.parts["attention"]) and step.micro_batches == 8


def test_chimera_holds_two_copies():
    chimera, plain = (load(Split(1, 1, 2, name, layers=(2, 2))) for name in ("chimera", "1f1b"))
    assert chimera.parameters.sum() == 2 * plain.parameters.sum()


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(ValueError, match="a batch of 8 is not divisible by dp 3 x micro-batches of 1"):
        micro_batches(fake.job(), Split(dp=3))


@pytest.mark.parametrize("name", ["1f1b", "zbv", "chimera"])
def test_bytes_are_those_of_a_dry_run(name):
    """Bytes over pp and dp; tests/pipeline/test_counted.py holds the dry run to what gloo's ranks send."""
    config = GPTConfig(vocab_size=96, max_positions=64, hidden_size=32, num_layers=4, num_heads=4)
    plan = Plan(tp=2, dp=2, seq=32, micro_batch=2, dtype=torch.float32)
    ranks = dry_pipeline(config, plan, Pipe(2, name, 4))
    chunks = EVERY[name].chunks[0]
    split = Split(2, 2, 2, name, chunks, 2, layers=(4 // (2 * chunks),) * 2 * chunks)
    costs = LedgerCosts(preset("a100-80gb", 8))
    job = Job(config, 16, 32, torch.float32)
    loaded = load(split, job, pieces=costs)
    for rank, run in enumerate(ranks):
        sent, summed = (
            next((m for m in run.messages if (m.over, m.op) == key), None)
            for key in (("pp", "send"), ("dp", "all_reduce (gradients)"))
        )
        assert sent.bytes == sent.calls * costs(job, split).hop_bytes
        assert summed.bytes == 4 * loaded.parameters[rank]
