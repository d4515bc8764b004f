"""The cost model against dry runs of real models: what ranks hold, and the optimizer's pass."""

import pytest

from tests.tools.plan.test_pieces import MODELS, job_of
from tpfuse.kernels.runtime.launch import pretending
from tpfuse.pipeline import SCHEDULES
from tpfuse.tools.ledger import Pipe, Plan, dry_pipeline, dry_run
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.costs import cost_model, optimizer_seconds
from tpfuse.tools.plan.pieces import LedgerCosts
from tpfuse.tools.plan.spans import Spans
from tpfuse.tools.plan.split import Split
from tpfuse.tools.plan.step import Load

PIECES = LedgerCosts(preset("a100-80gb", 8))
COSTS = cost_model(PIECES.cluster, pieces=PIECES)


def load(job, split):
    return Load(job, split, COSTS, Spans(PIECES(job, split), split=SCHEDULES[split.schedule].split))


def states(job, split):
    return [memory.state for memory in load(job, split).memory]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dp, optimizer", [(3, "adamw"), (4, "sgd"), (4, "adamw-fp32")])
def test_state_of_one_stage(name, dp, optimizer):
    """Rows that dp does not divide are padded: at 3 ranks all models', at 4 of Llama's gates and BERT's token types."""
    job = job_of(name)._replace(batch=12, optimizer=optimizer)
    held = dry_run(job.config, Plan(tp=2, dp=dp, seq=128, optimizer=optimizer)).held
    split = Split(dp=dp, tp=2, layers=(4,))
    assert states(job, split) == [held.state.total] and load(job, split).parameters.tolist() == [held.parameters]
    assert states(job, split._replace(sharded=True)) == [held.sharded.total]
    fraction = Spans(PIECES(job, split), split=False).shard_fraction(dp)
    assert fraction == pytest.approx(held.sharded.parameters / held.state.parameters)
    assert fraction > 1 / dp if dp == 3 or name in ("bert", "llama") else fraction == pytest.approx(1 / dp)


@pytest.mark.parametrize(
    "name, schedule", [("llama", "1f1b"), *(("gpt2", s) for s in ("1f1b", "zbv", "chimera", "interleaved"))]
)
def test_state_and_activations_of_a_pipeline(name, schedule):
    """GPT-2's embedding is tied: schedules with both ends on a rank hold it once."""
    job, chunks = job_of(name), SCHEDULES[schedule].chunks[0]
    split = Split(2, 2, 2, schedule, chunks, layers=(4 // (2 * chunks),) * 2 * chunks)
    ranks = dry_pipeline(job.config, Plan(tp=2, dp=2, seq=128), Pipe(2, schedule, 4))
    assert states(job, split) == [rank.state.total for rank in ranks]
    assert load(job, split).parameters.tolist() == [rank.parameters for rank in ranks]
    # sharded by two, which divides all their rows; parameters and gradients are gathered
    sharded = [rank.state.total / 2 + 2 * 2 * rank.parameters for rank in ranks]
    assert states(job, split._replace(sharded=True)) == sharded
    pieces = PIECES(job, split)
    assert pieces.hop_bytes == 128 * 128 // 2 * 2
    for stage in (stage for rank in ranks for stage in rank.stages.values()):
        assert stage.saved == sum(piece.saved for piece in pieces.stage(stage.chunk.layers))
        assert stage.held == sum(piece.held for piece in pieces.stage(stage.chunk.layers))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("split", [Split(tp=2, micro_batch=2), Split(tp=1, micro_batch=3, full=True)])
def test_saved_and_transient_bytes_are_no_less_than_the_peak(name, split):
    """More by what is free already when the embedding's gradient is made, the largest tensor of a model so small."""
    job = job_of(name)
    plan = Plan(tp=split.tp, seq=128, micro_batch=split.micro_batch, full=split.full)
    with pretending("sm_80"):
        work = dry_run(job.config, plan).work
    pieces = PIECES(job, split).stage(range(4))
    predicted = sum(piece.saved for piece in pieces) + max(piece.transient for piece in pieces)
    assert 0.999 * work.peak < predicted < 1.5 * work.peak


def test_an_optimizer_is_a_pass_through_memory():
    """AdamW in 16 bit: two numbers and two states are read, one and two states written."""
    job, a100 = job_of("gpt2"), PIECES.cluster.device
    seconds = optimizer_seconds(10**9, job, Split(dp=4), a100)
    assert seconds == pytest.approx(3e-6 + 14e9 / (0.8 * 2.039e12))
    assert optimizer_seconds(4 * 10**9, job, Split(dp=4, sharded=True), a100) == pytest.approx(seconds)
