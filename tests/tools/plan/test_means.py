"""What a rank holds as a search costs it: the state of dry runs of real models."""

import pytest

from tests.tools.plan.test_pieces import MODELS, job_of
from tpfuse.pipeline import SCHEDULES
from tpfuse.tools.ledger import Pipe, Plan, dry_pipeline, dry_run
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.means import means_of
from tpfuse.tools.plan.pieces import LedgerCosts
from tpfuse.tools.plan.spans import Spans
from tpfuse.tools.plan.split import Split
from tpfuse.tools.plan.step import Load

COSTS = LedgerCosts(preset("a100-80gb", 8))
MEANS = means_of(COSTS.cluster, costs=COSTS)


def spans(job, split):
    return Spans(COSTS(job, split), split=SCHEDULES[split.schedule].split)


def states(job, split):
    return [memory.state for memory in Load(job, split, MEANS, spans(job, split)).memory]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dp", [3, 4])
def test_of_one_stage(name, dp):
    """Rows that dp does not divide are padded: at 3 ranks all models', at 4 of Llama's gates and BERT's token types."""
    job = job_of(name)._replace(batch=12)
    held = dry_run(job.config, Plan(tp=2, dp=dp, seq=128)).held
    split = Split(dp=dp, tp=2, layers=(4,))
    assert states(job, split) == [held.state.total]
    assert states(job, split._replace(sharded=True)) == [held.sharded.total]
    share = spans(job, split).cut_by(dp)
    assert share == pytest.approx(held.sharded.parameters / held.state.parameters)
    assert share > 1 / dp if dp == 3 or name in ("bert", "llama") else share == pytest.approx(1 / dp)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_of_a_pipeline(name):
    job, split = job_of(name), Split(dp=2, tp=2, pp=2, layers=(2, 2))
    ranks = dry_pipeline(job.config, Plan(tp=2, dp=2, seq=128), Pipe(2, "1f1b", 4))
    assert states(job, split) == [rank.state.total for rank in ranks]
    # sharded by two, which all their rows can be; parameters and gradients are whole beside
    sharded = [rank.state.total / 2 + 2 * 2 * rank.parameters for rank in ranks]
    assert states(job, split._replace(sharded=True)) == sharded
