"""State and messages by parameter counts: the numbers of dry runs of real models, and of rings."""

import pytest
import torch

from tests.tools.plan.test_pieces import MODELS, job_of
from tpfuse.kernels.runtime.launch import pretending
from tpfuse.tools.ledger import Pipe, Plan, dry_pipeline, dry_run
from tpfuse.tools.plan.cluster import Cluster, Level, preset
from tpfuse.tools.plan.collectives import ALL_REDUCE, seconds
from tpfuse.tools.plan.devices import Device
from tpfuse.tools.plan.messages import between_stages, over_dp, over_tp
from tpfuse.tools.plan.pieces import LedgerCosts
from tpfuse.tools.plan.split import Split
from tpfuse.tools.plan.state import optimizer_seconds, rank_parameters, rank_share, rank_state

COSTS = LedgerCosts(preset("a100-80gb", 64))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fp32"])
def test_a_whole_model_holds_what_its_dry_run_says(name, optimizer):
    job, plan = job_of(name)._replace(optimizer=optimizer), Plan(tp=2, dp=4, seq=128, optimizer=optimizer)
    held, all_layers = dry_run(job.config, plan).held, [range(4)]
    split = Split(dp=4, tp=2)
    pieces = COSTS(job, split)
    assert rank_parameters(pieces, all_layers) == held.parameters
    assert rank_state(pieces, all_layers, job, split) == held.state
    # BERT's two types of tokens and Llama's two matrices of a gate are padded to four rows
    assert rank_state(pieces, all_layers, job, split._replace(sharded=True)) == held.sharded


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("split", [Split(tp=2, micro_batch=2), Split(tp=1, micro_batch=3, full=True)])
def test_saved_and_transient_bytes_are_no_less_than_the_peak(name, split):
    """More by what is free already when the embedding's gradient is made, the first thing of a model so small."""
    job = job_of(name)
    plan = Plan(tp=split.tp, seq=128, micro_batch=split.micro_batch, full=split.full)
    with pretending("sm_80"):
        work = dry_run(job.config, plan).work
    pieces = COSTS(job, split).stage(range(4))
    said = sum(piece.saved for piece in pieces) + max(piece.transient for piece in pieces)
    assert 0.999 * work.peak < said < 1.5 * work.peak


def test_where_shapes_are_not_known_the_cut_is_even():
    split = Split(dp=4, tp=2, sharded=True)
    pieces = COSTS(job_of("gpt2"), split)
    bare = pieces._replace(blocks=[block._replace(sizes={}) for block in pieces.blocks])
    assert rank_share(bare, [range(4)], split) == rank_share(pieces, [range(4)], split)


@pytest.mark.parametrize("schedule, pp", [("1f1b", 2), ("zbv", 2), ("chimera", 2), ("interleaved", 2)])
def test_ranks_of_a_pipeline_hold_what_theirs_say(schedule, pp):
    job = job_of("gpt2")  # whose embedding is tied
    chunks = 1 if schedule in ("1f1b", "chimera") else 2
    split = Split(dp=2, tp=2, pp=pp, schedule=schedule, chunks=chunks)
    pieces = COSTS(job, split)
    assert pieces.rows == 128 * 128 // 2 * 2
    for rank in dry_pipeline(job.config, Plan(tp=2, dp=2, seq=128), Pipe(pp, schedule, 4)):
        stages = [work.chunk.layers for work in rank.stages.values()]
        state = rank_state(pieces, stages, job, split)
        assert rank_parameters(pieces, stages) == rank.parameters and state == rank.state
        for work in rank.stages.values():
            assert work.saved == sum(piece.saved for piece in pieces.stage(work.chunk.layers))
            assert work.held == sum(piece.held for piece in pieces.stage(work.chunk.layers))


def test_costs_are_kept_and_are_the_devices():
    job, split = job_of("gpt2"), Split(tp=2, micro_batch=2)
    pieces = COSTS(job, split)
    assert COSTS(job, split._replace(dp=4)).blocks is pieces.blocks
    block, split_later = pieces.blocks[0], COSTS(job, split._replace(pp=2, chunks=2, schedule="zbv")).blocks[0]
    assert block.seconds("W") == 0 and block.seconds("B") == block.seconds("I") > block.seconds("F")
    assert split_later.seconds("I") + split_later.seconds("W") == pytest.approx(split_later.seconds("B"))
    assert min(split_later.seconds("W"), split_later.held, block.transient) > 0
    assert COSTS(job, split._replace(full=True)).blocks[0].seconds("B") > block.seconds("B")
    # twice as fast a device takes half of the time, but for what is sent
    fast = Device("fast", {"bfloat16": 624e12}, 4.078e12, 80e9, launch=1.5e-6, arch="sm_80")
    slow, quick = (LedgerCosts(Cluster(d, 8, preset("a100-80gb", 8).levels)) for d in (COSTS.cluster.device, fast))
    ours, theirs = (costs(job, split).blocks[0].passes["B"] for costs in (slow, quick))
    assert {k: ours[k] / theirs[k] for k in ours} == pytest.approx(
        {"GEMM": 2, "attention": 2, "memory-bound": 2, "tp": 1}
    )


def test_what_costs_refuse():
    job = job_of("gpt2")
    with pytest.raises(ValueError, match="plan: 4 layers cannot be cut into 6 stages"):
        COSTS(job, Split(pp=3, schedule="interleaved", chunks=2))
    with pytest.raises(ValueError, match="num_heads=8 is not divisible by tensor-parallel size 3"):
        COSTS(job, Split(tp=3))
    with pytest.raises(ValueError, match="a100-80gb has no peak for float64"):
        COSTS(job._replace(dtype=torch.float64), Split())


# ---- messages ----

TWO = Cluster(COSTS.cluster.device, 64, (Level(8, 200e9, 1e-6), Level(64, 20e9, 1e-5)))
RING = ALL_REDUCE["ring"]


def test_messages_over_tp():
    n, size = Split(tp=4), 10**8
    sent = size * 3 / 4  # of a gather, and of an exchange
    half = seconds(RING, 4, size, TWO.link(4, 1)) / 2
    assert over_tp("all_gather", sent, n, TWO) == over_tp("reduce_scatter", size, n, TWO) == half
    assert over_tp("all_reduce", size, n, TWO) == 2 * half
    assert over_tp("all_to_all", sent, n, TWO) == pytest.approx(half - 2e-6)  # one round in place of three
    assert over_tp("all_gather", sent, Split(), TWO) == 0


def test_an_exchange_between_nodes_has_a_card_of_its_own():
    """A ring of 16 has all eight cards of a node; of each rank's 15 messages 8 leave it by its own."""
    sent = 15e8
    assert over_tp("all_gather", sent, Split(tp=16), TWO) == pytest.approx(15e-5 + sent / 160e9)
    assert over_tp("all_to_all", sent, Split(tp=16), TWO) == pytest.approx(1e-5 + 8e8 / 20e9)


def test_messages_over_dp():
    """26 MiB of gradients are two buckets."""
    split, size = Split(dp=4, tp=8), 26 << 20
    ring = 2 * seconds(RING, 4, size / 2, TWO.link(4, 8))
    assert over_dp(size, split, TWO) == pytest.approx(ring)
    assert over_dp(size, split._replace(sharded=True), TWO) == pytest.approx(1.5 * ring)
    assert over_dp(1, split, TWO) == seconds(RING, 4, 1, TWO.link(4, 8))
    assert over_dp(size, Split(tp=8), TWO) == over_dp(0, split, TWO) == 0


def test_messages_between_stages():
    assert between_stages(2e9, Split(pp=2, tp=4), TWO) == pytest.approx(1e-6 + 2e9 / 200e9)
    assert between_stages(2e9, Split(pp=4, tp=4), TWO) == pytest.approx(1e-5 + 2e9 / 20e9)
    assert between_stages(2e9, Split(tp=4), TWO) == 0


def test_an_optimizer_is_a_pass_through_memory():
    """AdamW in 16 bit: two numbers and two states are read, one and two states written."""
    job, a100 = job_of("gpt2"), COSTS.cluster.device
    took = optimizer_seconds(10**9, job, Split(dp=4), a100)
    assert took == pytest.approx(3e-6 + 14e9 / (0.8 * 2.039e12))
    assert optimizer_seconds(4 * 10**9, job, Split(dp=4, sharded=True), a100) == pytest.approx(took)
