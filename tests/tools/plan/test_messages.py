"""Messages of a plan: their seconds on links, and their bytes against those of gloo's ranks that run the plan."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.routing import evenly, routed
from tpfuse import data_parallel
from tpfuse.models import GPTConfig
from tpfuse.pipeline import schedule
from tpfuse.pipeline.placement import Stage
from tpfuse.tools.ledger import Ledger
from tpfuse.tools.ledger.dryrun import axis_of, ranks_of
from tpfuse.tools.ledger.layer import build, layer_kinds
from tpfuse.tools.plan.cluster import Cluster, Level, preset
from tpfuse.tools.plan.collectives import ALL_REDUCE, seconds
from tpfuse.tools.plan.messages import between_stages, over_cp, over_dp, over_tp
from tpfuse.tools.plan.pieces import LedgerCosts, run_pieces
from tpfuse.tools.plan.split import Job, Split
from tpfuse.tools.plan.step import micro_batches

# Untied: plans leave out the sum of a tied embedding's gradients over the first and the last stage.
SIZES = dict(vocab_size=96, max_positions=64, hidden_size=32, num_layers=4, num_heads=4, tie_embeddings=False)
JOB = Job(GPTConfig(**SIZES), 8, 16, torch.float32)
EXPERTS = dict(gated=True, activation="silu", mlp_bias=False, num_experts=4, experts_per_token=3)
MIXTURE = JOB._replace(config=GPTConfig(**SIZES, **EXPERTS))
UNLIKE = JOB._replace(config=replace(MIXTURE.config, mlp_layers=(0, 3)))
COSTS = LedgerCosts(preset("a100-80gb", 8))
PLANS = [Split(2, 1, 1), Split(1, 2, 1, saving="smallest"), Split(2, 2, 1, micro_batch=2), Split(1, 2, 2, full=True)]
PLANS += [Split(2, 2, cp=2, cp_kind="heads"), Split(1, 1, 2, cp=2, cp_kind="keys", full=True)]


def parts_of(world, job, split):
    """The ranks of a plan, and a function that runs a step's passes of its model over rows of ids."""
    mesh = world.stages(split.pp, split.dp, split.cp, split.tp)
    tp = ranks_of(split.plan(job), mesh, overlap="off")
    options = dict(saving=split.saving, full=split.full, dtype=job.dtype, device="cpu")
    options["dp"] = mesh["dp"] if split.dp > 1 else None
    options["experts"] = mesh["dp", "tp"] if split.over_replicas else None
    count = micro_batches(job, split)
    if split.pp > 1:
        stage = Stage(mesh["pp"].get_local_rank(), split.pp, split.schedule, layers=split.layers)
        pipeline = schedule(build(job.config, tp=tp, stage=stage, **options), mesh["pp"], split.schedule, count)
        return tp, lambda ids, sums: pipeline.step(ids, labels=ids)
    replica = model = build(job.config, tp=tp, **options)
    group, summing = mesh["dp"].get_group(), []
    if split.dp > 1:
        averaged = data_parallel if split.over_replicas else DistributedDataParallel
        replica = averaged(model, **{"dp" if split.over_replicas else "process_group": group})
        replica.register_comm_hook(group, lambda group, bucket: summed(group, bucket, summing[-1]))

    def step(ids, sums):
        summing.append(sums)
        for i, rows in enumerate(ids.chunk(count)):
            if split.dp > 1:
                replica.require_backward_grad_sync = i == count - 1
            replica(rows, labels=rows).loss.backward()

    return tp, step


def summed(group, bucket, sums):
    sums.append(bucket.buffer().nbytes)
    return allreduce_hook(group, bucket)


def sent(world, job, split):
    """Calls and bytes of this rank's messages in a step, by op and axis, and the bytes of gradients that replicas
    sum."""
    (tp, step), sums = parts_of(world, job, split), []
    ids = torch.arange(job.batch // split.dp * job.seq).reshape(-1, job.seq) % job.config.vocab_size
    for _ in range(2):  # warm-up: ranks compare their arguments, and DDP rebuilds its buckets
        step(ids, [])
    with Ledger() as ledger, routed(evenly):
        step(ids, sums)
    messages = Counter()
    for e in ledger.entries:
        axis = axis_of(e.group, tp)
        messages.update({(e.op, axis, "calls"): e.wire > 0, (e.op, axis, "bytes"): e.wire})
    return counted(messages), sum(sums)


def counted(messages):
    """(calls, bytes) by op, and the axis of what is not over tp or over replicas."""
    found = {}
    for (op, axis, _), size in messages.items():
        if size and not op.startswith(("send", "allreduce_")) and axis == "cp":
            found[op, "cp"] = messages[op, axis, "calls"], messages[op, axis, "bytes"]
        elif size:
            found[op] = messages[op, axis, "calls"], messages[op, axis, "bytes"]
    return found


def predicted(job, split, stage):
    """The same for a rank of a stage, by the plan's pieces."""
    runs, kinds, count = run_pieces(job, split), layer_kinds(job.config), micro_batches(job, split)
    begin = sum(split.layers[:stage])
    layers = range(begin, begin + split.layers[stage])
    pieces = [runs.embedding if stage == 0 else runs.border, *(runs.blocks[kinds[i]] for i in layers)]
    pieces += [runs.head] if stage == split.pp - 1 else []
    messages = Counter()
    for piece in pieces:
        for kind in "FB":
            for e, n in piece.passes[kind].items():
                key = e.op, e.group or "tp"
                messages.update({(*key, "calls"): n * count * (e.wire > 0), (*key, "bytes"): n * count * e.wire})
    by_op = counted(messages)
    if split.pp > 1:
        by_op["send"] = count, count * COSTS(job, split).hop_bytes
    parameters = sum(piece.parameters - piece.experts for piece in COSTS(job, split).stage(layers))
    return by_op, parameters * job.dtype.itemsize * (split.dp > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [Split(2, 2, micro_batch=2), Split(4, 1, saving="smallest"), Split(2, 1, full=True), Split(2, 1, 2, micro_batch=2)],
)
def test_ranks_with_experts_over_replicas_send_what_the_plan_says(ranks, split):
    """Rows go over dp x tp, and replicas sum no gradient of an expert; of MLPs and experts."""
    split = split._replace(over_replicas=True, layers=(4 // split.pp,) * split.pp)
    for rank, (messages, gradients) in enumerate(ranks(split.ranks, sent, UNLIKE, split)):
        predicted_messages, predicted_gradients = predicted(UNLIKE, split, rank // (split.ranks // split.pp))
        summed_by_gloo = messages.pop("allreduce_", (0, 0))[1]
        if split.pp > 1:  # with losses and counts of labels
            assert 0 <= summed_by_gloo - predicted_gradients < 100 and gradients == 0
            gradients = predicted_gradients
        assert messages == predicted_messages and gradients == predicted_gradients > 0
        assert "exchange_rows" in messages


@pytest.mark.slow
@pytest.mark.parametrize("split", PLANS, ids=lambda split: split.mesh)
@pytest.mark.parametrize("job", [JOB, MIXTURE, UNLIKE], ids=["dense", "experts", "both"])
def test_ranks_send_what_the_plan_says(ranks, job, split):
    """Of experts where all ranks' have as many rows."""
    split = split._replace(layers=(4 // split.pp,) * split.pp)
    for rank, (messages, gradients) in enumerate(ranks(split.ranks, sent, job, split)):
        predicted_messages, predicted_gradients = predicted(job, split, rank // (split.ranks // split.pp))
        summed_by_gloo = messages.pop("allreduce_", (0, 0))[1]
        assert messages == predicted_messages and gradients == predicted_gradients
        assert 0 <= summed_by_gloo - gradients < 100  # losses and counts of labels, which no plan has
        assert messages or gradients
        assert any("cp" in op for op in messages if isinstance(op, tuple)) == (split.cp > 1)
        assert ("exchange_rows" in messages) == (job is not JOB and split.tp > 1)


# ---- seconds ----

TWO = Cluster(COSTS.cluster.device, 64, (Level(8, 200e9, 1e-6), Level(64, 20e9, 1e-5)))
RING = ALL_REDUCE["ring"]


def test_over_tp():
    n, size = Split(tp=4), 10**8
    wire = size * 3 / 4  # of a gather, and of an exchange
    half = seconds(RING, 4, size, TWO.link(4, 1)) / 2
    assert over_tp("all_gather", wire, n, TWO) == over_tp("reduce_scatter", size, n, TWO) == half
    assert over_tp("all_reduce", size, n, TWO) == 2 * half
    assert over_tp("all_to_all", wire, n, TWO) == pytest.approx(half - 2e-6)  # one round in place of three
    assert over_tp("exchange_rows", wire, n, TWO) == over_tp("all_to_all", wire, n, TWO)
    assert over_tp("all_gather", wire, Split(), TWO) == 0
    # of experts over two replicas: one all-to-all among all their ranks
    assert over_tp("exchange_rows", 15e8, Split(2, 8), TWO, ranks=16) == over_tp(
        "exchange_rows", 15e8, Split(tp=16), TWO
    )
    # between nodes a ring of 16 has all eight cards of a node; of each rank's 15 messages 8 leave it by its own card
    assert over_tp("all_gather", 15e8, Split(tp=16), TWO) == pytest.approx(15e-5 + 15e8 / 160e9)
    assert over_tp("all_to_all", 15e8, Split(tp=16), TWO) == pytest.approx(1e-5 + 8e8 / 20e9)


def test_over_cp():
    """As over tp, between ranks that lie tp apart."""
    split, wire = Split(tp=4, cp=4), 10**8 * 3 / 4
    half = seconds(RING, 4, 10**8, TWO.link(4, 4)) / 2
    assert over_cp("all_gather", wire, split, TWO) == half > over_tp("all_gather", wire, split, TWO)
    assert over_cp("all_reduce", 10**8, split, TWO) == 2 * half
    assert over_cp("all_to_all", wire, split, TWO) == seconds(ALL_REDUCE["direct"], 4, 10**8, TWO.direct(4, 4)) / 2
    assert over_cp("all_gather", wire, Split(tp=4), TWO) == 0


def test_over_dp():
    """26 MiB of gradients are two buckets."""
    split, size = Split(dp=4, tp=8), 26 << 20
    ring = 2 * seconds(RING, 4, size / 2, TWO.link(4, 8))
    assert over_dp(size, split, TWO) == pytest.approx(ring)
    assert over_dp(size, split._replace(sharded=True), TWO) == pytest.approx(1.5 * ring)
    assert over_dp(1, split, TWO) == seconds(RING, 4, 1, TWO.link(4, 8))
    assert over_dp(size, Split(tp=8), TWO) == over_dp(0, split, TWO) == 0
    # of pieces: FSDP divides among dp x cp, and replicas stand further apart; of stages one gather is enough
    pieces = Split(dp=2, cp=2, tp=8, cp_kind="heads")
    assert over_dp(size, pieces._replace(sharded=True), TWO) == over_dp(size, split._replace(sharded=True), TWO)
    assert over_dp(1, pieces, TWO) == seconds(RING, 2, 1, TWO.link(2, 16))
    assert over_dp(size, split._replace(sharded=True, pp=2), TWO) == over_dp(size, split, TWO)


def test_between_stages():
    inside, outside = 1e-6 + 2e9 / 200e9, 1e-5 + 2e9 / 20e9
    assert between_stages(2e9, Split(pp=2, tp=4), TWO) == pytest.approx(np.array([[0, inside], [inside, 0]]))
    four = between_stages(2e9, Split(pp=4, tp=4), TWO)
    assert four[0] == pytest.approx([0, inside, outside, outside]) and (four == four.T).all()
    assert between_stages(2e9, Split(tp=4), TWO).tolist() == [[0]]
