"""What a plan says that its ranks send, and what gloo's ranks send when the plan runs."""

from collections import Counter

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tpfuse import TensorParallel
from tpfuse.models import GPTConfig
from tpfuse.pipeline import schedule
from tpfuse.pipeline.placement import Stage
from tpfuse.tools.ledger import Ledger
from tpfuse.tools.ledger.layer import build
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.pieces import LedgerCosts, counted
from tpfuse.tools.plan.split import Job, Split
from tpfuse.tools.plan.step import micro_batches

# Untied: plans leave out that the first and the last stage sum the gradients of a tied embedding.
SIZES = dict(vocab_size=96, max_positions=64, hidden_size=32, num_layers=4, num_heads=4, tie_embeddings=False)
JOB = Job(GPTConfig(**SIZES), 8, 16, torch.float32)
COSTS = LedgerCosts(preset("a100-80gb", 8))
PLANS = [Split(2, 1, 1), Split(1, 2, 1, saving="smallest"), Split(2, 2, 1, micro_batch=2), Split(1, 2, 2, full=True)]


def parts_of(world, split):
    """The model of a plan, and a function that runs a step's passes over rows of ids."""
    mesh = world.stages(split.pp, split.dp, split.tp)
    tp = TensorParallel(mesh["tp"], sequence_parallel=True, overlap="off")
    how = dict(
        saving=split.saving, full=split.full, dtype=JOB.dtype, device="cpu", dp=mesh["dp"] if split.dp > 1 else None
    )
    count = micro_batches(JOB, split)
    if split.pp > 1:
        stage = Stage(mesh["pp"].get_local_rank(), split.pp, split.schedule, layers=split.layers)
        pipeline = schedule(build(JOB.config, tp=tp, stage=stage, **how), mesh["pp"], split.schedule, count)
        return lambda ids, sums: pipeline.step(ids, labels=ids)
    replica = model = build(JOB.config, tp=tp, **how)
    group, summing = mesh["dp"].get_group(), []
    if split.dp > 1:
        replica = DistributedDataParallel(model, process_group=group)
        replica.register_comm_hook(group, lambda group, bucket: summed(group, bucket, summing[-1]))

    def step(ids, sums):
        summing.append(sums)
        for i, rows in enumerate(ids.chunk(count)):
            if split.dp > 1:
                replica.require_backward_grad_sync = i == count - 1
            replica(rows, labels=rows).loss.backward()

    return step


def summed(group, bucket, sums):
    sums.append(bucket.buffer().nbytes)
    return allreduce_hook(group, bucket)


def sent(world, split):
    """Calls and bytes of this rank's messages in a step, by op, and the bytes of gradients that replicas sum."""
    step, sums = parts_of(world, split), []
    ids = torch.arange(JOB.batch // split.dp * JOB.seq).reshape(-1, JOB.seq) % JOB.config.vocab_size
    for _ in range(2):  # which compare the ranks' arguments, and after which DDP makes its buckets anew
        step(ids, [])
    with Ledger() as ledger:
        step(ids, sums)
    messages = {e.op: ledger.total(op=e.op)[0::5] for e in ledger.entries if e.wire}
    return messages, sum(sums)


def said(split, stage):
    """The same of a rank of a stage, by the plan's pieces."""
    runs, config, count = counted(JOB, split), JOB.config, micro_batches(JOB, split)
    first = sum(split.layers[:stage])
    layers = range(first, first + split.layers[stage])
    held = [runs.embedding if stage == 0 else runs.border, *(runs.blocks[config.windows[i]] for i in layers)]
    held += [runs.head] if stage == split.pp - 1 else []
    messages = Counter()
    for piece in held:
        for kind in "FB":
            for e, n in piece.passes[kind].items():
                messages.update({(e.op, "calls"): n * count * (e.wire > 0), (e.op, "bytes"): n * count * e.wire})
    by_op = {op: (messages[op, "calls"], messages[op, "bytes"]) for op, _ in messages if messages[op, "bytes"]}
    if split.pp > 1:
        by_op["send"] = count, count * COSTS(JOB, split).rows
    parameters = sum(piece.parameters for piece in COSTS(JOB, split).stage(layers))
    return by_op, parameters * JOB.dtype.itemsize * (split.dp > 1)


@pytest.mark.parametrize("split", PLANS, ids=lambda split: f"dp{split.dp}-tp{split.tp}-pp{split.pp}")
def test_ranks_send_what_the_plan_says(ranks, split):
    split = split._replace(layers=(4 // split.pp,) * split.pp)
    for rank, (messages, gradients) in enumerate(ranks(split.ranks, sent, split)):
        predicted, summed_up = said(split, rank // (split.dp * split.tp))
        summed_by_gloo = messages.pop("allreduce_", (0, 0))[1]
        assert messages == predicted and gradients == summed_up
        assert 0 <= summed_by_gloo - gradients < 100  # losses and counts of labels beside, which no plan has
        assert messages or gradients
