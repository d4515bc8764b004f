"""The cost model against dry runs of real models: what ranks hold, and the optimizer's pass."""

import pytest

from tests.tools.plan.test_pieces import MODELS, job_of
from tpfuse.kernels.runtime.launch import pretending
from tpfuse.pipeline.schedules import EVERY
from tpfuse.tools.ledger import Pipe, Plan, dry_pipeline, dry_run
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.costs import cost_model, optimizer_seconds
from tpfuse.tools.plan.pieces import LedgerCosts
from tpfuse.tools.plan.spans import Spans
from tpfuse.tools.plan.split import Split
from tpfuse.tools.plan.step import Load, updated

PIECES = LedgerCosts(preset("a100-80gb", 8))
COSTS = cost_model(PIECES.cluster, pieces=PIECES)


def load(job, split):
    return Load(job, split, COSTS, Spans(PIECES(job, split), split=EVERY[split.schedule].split))


def states(job, split):
    return [memory.state for memory in load(job, split).memory]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dp, optimizer", [(3, "adamw"), (4, "sgd"), (4, "adamw-fp32")])
def test_state_of_one_stage(name, dp, optimizer):
    """Rows that dp does not divide are padded: at 3 ranks all models', at 4 of BERT's token types and of gates."""
    job = job_of(name)._replace(batch=12, optimizer=optimizer)
    held = dry_run(job.config, Plan(tp=2, dp=dp, seq=128, optimizer=optimizer)).held
    split = Split(dp=dp, tp=2, layers=(4,))
    assert states(job, split) == [held.state.total] and load(job, split).parameters.tolist() == [held.parameters]
    assert states(job, split._replace(sharded=True)) == [held.sharded.total]
    fraction = Spans(PIECES(job, split), split=False).shard_fraction(dp)
    assert fraction == pytest.approx(held.sharded.parameters / held.state.parameters)
    padded = dp == 3 or name in ("bert", "llama", "mixtral")
    assert fraction > 1 / dp if padded else fraction == pytest.approx(1 / dp)


@pytest.mark.parametrize("dp, cp", [(1, 4), (2, 2), (1, 3)])
def test_state_of_ranks_with_pieces(dp, cp):
    """All have the same weights, which FSDP divides among dp x cp."""
    job, kind = job_of("llama")._replace(batch=6), dict(cp=cp, cp_kind="keys")
    held = dry_run(job.config, Plan(tp=2, dp=dp, seq=128, **kind)).held
    split = Split(dp=dp, tp=2, layers=(4,), **kind)
    assert states(job, split) == [held.state.total] and load(job, split).parameters.tolist() == [held.parameters]
    assert states(job, split._replace(sharded=True)) == [held.sharded.total]


@pytest.mark.parametrize("name", ["mixtral", "mixed"])
@pytest.mark.parametrize("dp, optimizer", [(2, "adamw"), (4, "adamw-fp32")])
def test_state_of_experts_over_replicas(name, dp, optimizer):
    """They are in no bucket, FSDP neither cuts nor gathers them, and replicas sum the gradients of the others."""
    job = job_of(name)._replace(batch=4 * dp, optimizer=optimizer)
    held = dry_run(job.config, Plan(tp=2, dp=dp, seq=128, optimizer=optimizer, over_replicas=True)).held
    split = Split(dp=dp, tp=2, layers=(4,), over_replicas=True)
    loaded, whole = load(job, split), load(job, split._replace(over_replicas=False))
    assert states(job, split) == [held.state.total] and loaded.parameters.tolist() == [held.parameters]
    assert states(job, split._replace(sharded=True)) == [held.sharded.total]
    assert loaded.experts[0] * 2 == held.state.parameters - held.state.buckets > 0
    assert whole.parameters[0] - loaded.parameters[0] == (dp - 1) * loaded.experts[0] and whole.experts[0] == 0
    sharded = load(job, split._replace(sharded=True)).step()
    assert sharded.updated == loaded.experts[0] + (loaded.parameters[0] - loaded.experts[0]) / dp


@pytest.mark.parametrize(
    "name, schedule",
    [
        ("llama", "1f1b"),
        ("mixed", "1f1b"),
        ("mixed", "interleaved"),
        *(("gpt2", s) for s in ("1f1b", "zbv", "chimera", "interleaved", "2bw")),
    ],
)
def test_state_and_activations_of_a_pipeline(name, schedule):
    """GPT-2's embedding is tied: schedules with both ends on a rank hold it once."""
    job, chunks = job_of(name), EVERY[schedule].chunks[0]
    split = Split(2, 2, 2, schedule, chunks, layers=(4 // (2 * chunks),) * 2 * chunks)
    ranks = dry_pipeline(job.config, Plan(tp=2, dp=2, seq=128), Pipe(2, schedule, 4))
    assert states(job, split) == [rank.state.total for rank in ranks]
    assert load(job, split).parameters.tolist() == [rank.parameters for rank in ranks]
    if schedule != "2bw":  # which FSDP is not built for
        # sharded by two, which divides all their rows; parameters and gradients are gathered
        sharded = [rank.state.total / 2 + 2 * 2 * rank.parameters for rank in ranks]
        assert states(job, split._replace(sharded=True)) == sharded
    transient = load(job, split).transient
    if name == "mixed" and schedule == "interleaved":  # a stage of an MLP beside one of experts
        assert transient[1] > transient[2] and len(set(states(job, split))) == 2
    pieces = PIECES(job, split)
    assert pieces.hop_bytes == 128 * 128 // 2 * 2
    for stage in (stage for rank in ranks for stage in rank.stages.values()):
        assert stage.saved == sum(piece.saved for piece in pieces.stage(stage.chunk.layers))
        assert stage.held == sum(piece.held for piece in pieces.stage(stage.chunk.layers))


ONE_STAGE = Split(tp=2, micro_batch=2), Split(tp=1, micro_batch=3, full=True)


@pytest.mark.parametrize(
    "name, split",
    [(name, split) for name in MODELS for split in ONE_STAGE]
    + [(name, Split(2, 2, over_replicas=True)) for name in ("mixtral", "mixed")],
)
def test_saved_and_transient_bytes_are_no_less_than_the_peak(name, split):
    """More by what is free already when the embedding's gradient is made, the largest tensor of a model so small."""
    job = job_of(name)
    with pretending("sm_80"):
        work = dry_run(job.config, split.plan(job)).work
    pieces = PIECES(job, split).stage(range(4))
    predicted = sum(piece.saved for piece in pieces) + max(piece.transient for piece in pieces)
    assert 0.999 * work.peak < predicted < 1.5 * work.peak


@pytest.mark.parametrize("kind", ["heads", "keys"])
def test_the_peak_of_ranks_with_pieces(kind):
    """But for the rows that pass from a piece of the model to the next, which neither counts as its own."""
    job, split = job_of("llama"), Split(tp=2, cp=2, cp_kind=kind)
    with pretending("sm_80"):
        peak, whole = (dry_run(job.config, s.plan(job)).work.peak for s in (split, Split(tp=2)))
    pieces = PIECES(job, split)
    stage = pieces.stage(range(4))
    predicted = sum(piece.saved for piece in stage) + max(piece.transient for piece in stage)
    assert 0.999 * (peak - pieces.hop_bytes) < predicted < 1.5 * peak and peak < whole


def test_an_optimizer_is_a_pass_through_memory():
    """AdamW in 16 bit: two numbers and two states are read, one and two states written."""
    job, a100 = job_of("gpt2"), PIECES.cluster.device
    assert optimizer_seconds(10**9, job, a100) == pytest.approx(3e-6 + 14e9 / (0.8 * 2.039e12))
    assert updated(Split(dp=4), 9e9, 1e9) == 9e9 and updated(Split(dp=4, sharded=True), 9e9, 1e9) == 3e9
