"""Pieces of a model: those of any stage add up to what the stage runs, call by call and byte by byte."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tpfuse.models import BertConfig, GPTConfig, config_from_hf
from tpfuse.pipeline.action import KINDS
from tpfuse.pipeline.placement import Stage
from tpfuse.tools.ledger import fake_world
from tpfuse.tools.ledger.dryrun import planned_model
from tpfuse.tools.ledger.layer import layer_kinds
from tpfuse.tools.ledger.stages import run_stage
from tpfuse.tools.plan.cluster import Cluster, preset
from tpfuse.tools.plan.devices import Device
from tpfuse.tools.plan.pieces import LedgerCosts, bare, run_pieces
from tpfuse.tools.plan.split import Job, Split

COSTS = LedgerCosts(preset("a100-80gb", 8))
SIZES = dict(vocab_size=512, max_positions=256, hidden_size=128, num_layers=4, num_heads=8)
MODELS = {
    "gpt2": GPTConfig(**SIZES),
    "bert": BertConfig(**SIZES),
    "llama": config_from_hf(
        dict(model_type="llama", vocab_size=512, max_position_embeddings=256, hidden_size=128, num_hidden_layers=4)
        | dict(num_attention_heads=8, num_key_value_heads=4, intermediate_size=256, rms_norm_eps=1e-5)
        | dict(hidden_act="silu", rope_theta=1e4)
    ),
    "mixtral": GPTConfig(
        **SIZES,
        family="mixtral",
        gated=True,
        activation="silu",
        mlp_bias=False,
        ffn_size=64,
        num_experts=8,
        experts_per_token=2,
        shared_size=96,
        shared_gate=True,
        tie_embeddings=False,
    ),  # fmt: skip
    "mixed": GPTConfig(
        **SIZES,
        family="qwen2_moe",
        gated=True,
        activation="silu",
        mlp_bias=False,
        ffn_size=96,
        expert_size=64,
        num_experts=8,
        experts_per_token=2,
        mlp_layers=(0, 2),
        tie_embeddings=False,
    ),
    "windows": GPTConfig(
        **SIZES, window=32, layer_types=("sliding_attention", "full_attention") * 2, tie_embeddings=False
    ),
}


def job_of(name, seq=128):
    return Job(MODELS[name], 64, seq)


def ran(job, split, layers):
    """The stages of the real model, run at the split's micro-batch."""
    plan = split.plan(job)
    with fake_world(split.tp, split.expert_replicas, cp=split.cp) as mesh:
        stage = Stage(0, 1, "interleaved", len(layers), layers) if len(layers) > 1 else None
        model = planned_model(job.config, plan, mesh, stage)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        chunks = model.stages.chunks
        return [(chunk, run_stage(model, chunk, plan, split=split.schedule == "zbv")) for chunk in chunks]


def summed(job, split, layers):
    """Calls, saved and held bytes of a stage, by its pieces."""
    runs, kinds = run_pieces(job, split), layer_kinds(job.config)
    pieces = [runs.embedding if layers[0] == 0 else runs.border, *(runs.blocks[kinds[i]] for i in layers)]
    pieces += [runs.head] if layers[-1] == job.config.num_layers - 1 else []
    calls = {kind: Counter() for kind in KINDS}
    for piece in pieces:
        for kind in KINDS:
            calls[kind].update(piece.passes[kind])
    nonzero = {kind: Counter({e: n for e, n in entries.items() if n}) for kind, entries in calls.items()}
    return nonzero, sum(p.saved for p in pieces), sum(p.held for p in pieces), runs.hop_bytes


def without_underscores(calls):
    """Calls by all but a trailing underscore of their names: where one stage has both uses of a tied weight add sums
    their gradients, and add_ where each is added to what is there."""
    counts = Counter()
    for e, count in calls.items():
        counts[bare(e)._replace(op=e.op.rstrip("_"))] += count
    return counts


CASES = [
    ("gpt2", Split(tp=1, micro_batch=1), (4,)),
    ("gpt2", Split(tp=2, micro_batch=5, saving="smallest"), (1, 2, 1)),
    ("gpt2", Split(tp=4, micro_batch=3, full=True), (2, 2)),
    ("gpt2", Split(tp=2, micro_batch=6, schedule="zbv", pp=2), (1, 1, 2)),
    ("mixtral", Split(tp=4, micro_batch=2, schedule="zbv", pp=2), (1, 1, 2)),
    ("mixtral", Split(tp=2, micro_batch=3, saving="smallest"), (2, 2)),
    ("mixtral", Split(2, 2, micro_batch=3, over_replicas=True), (4,)),
    ("mixtral", Split(4, 1, micro_batch=2, schedule="zbv", pp=2, over_replicas=True), (1, 1, 2)),
    ("bert", Split(tp=2, micro_batch=4), (1, 2, 1)),
    ("bert", Split(tp=1, micro_batch=3, full=True, schedule="zbv", pp=2), (2, 2)),
    ("llama", Split(tp=4, micro_batch=8, saving="smallest"), (3, 1)),
    ("llama", Split(tp=2, micro_batch=7, full=True, saving="smallest"), (1, 3)),
    ("windows", Split(tp=2, micro_batch=3), (1, 1, 2)),
    ("llama", Split(tp=2, cp=2, cp_kind="heads"), (1, 2, 1)),
    ("llama", Split(tp=2, cp=4, cp_kind="keys", full=True, schedule="zbv", pp=2), (2, 2)),
]


@pytest.mark.parametrize("name, split, layers", CASES)
def test_pieces_add_up_to_any_stage(name, split, layers):
    job = job_of(name)
    for chunk, real in ran(job, split, layers):
        calls, saved, held, rows = summed(job, split, chunk.layers)
        for kind in KINDS:
            assert without_underscores(calls[kind]) == without_underscores(Counter(real.passes[kind])), kind
        assert (saved, held, rows) == (real.saved, real.held, real.rows)
        assert {e.ranks for e in calls["F"] if e.op == "exchange_rows"} <= {split.expert_replicas * split.tp}


def by_op(calls):
    """What all calls of an op count: calls, bytes, flops and so on."""
    sums = {}
    for e, count in calls.items():
        row = (1, e.read, e.written, e.least, e.flops, e.wire, e.scores)
        old = sums.get(key := (e.op.rstrip("_"), e.kind, e.drops, e.ranks), (0,) * len(row))
        sums[key] = tuple(a + count * b for a, b in zip(old, row, strict=True))
    return {key: row for key, row in sums.items() if any(row)}


MIXED = [
    ({}, Split(tp=4, micro_batch=2, schedule="zbv", pp=2), (1, 1, 2)),
    (dict(norm="rms", branch_norm=True), Split(tp=2, micro_batch=3, saving="smallest"), (3, 1)),
    (dict(parallel_residual=True), Split(tp=2, micro_batch=3, full=True), (4,)),
    ({}, Split(4, 2, 2, micro_batch=2, full=True, over_replicas=True), (2, 2)),
    ({}, Split(2, 2, micro_batch=3, over_replicas=True), (4,)),
]


@pytest.mark.parametrize("change, split, layers", MIXED)
def test_pieces_of_mlps_and_experts_add_up_op_by_op(change, split, layers):
    """A stage has the layers that it really holds: (1, 1, 2) are an MLP, experts, and one of each."""
    mixed = job_of("mixed")
    job = mixed._replace(config=replace(mixed.config, **change))
    for chunk, real in ran(job, split, layers):
        calls, saved, held, rows = summed(job, split, chunk.layers)
        for kind in KINDS:
            assert by_op(calls[kind]) == by_op(Counter(real.passes[kind])), kind
        assert (saved, held, rows) == (real.saved, real.held, real.rows)


def test_costs_are_cached_and_follow_the_device():
    job, split = job_of("gpt2"), Split(tp=2, micro_batch=2)
    pieces = COSTS(job, split)
    assert COSTS(job, split._replace(dp=4)).blocks is pieces.blocks
    block, two_passes = pieces.blocks[0], COSTS(job, split._replace(pp=2, chunks=2, schedule="zbv")).blocks[0]
    assert block.seconds("W") == 0 and block.seconds("B") == block.seconds("I") > block.seconds("F")
    assert two_passes.seconds("I") + two_passes.seconds("W") == pytest.approx(two_passes.seconds("B"))
    assert min(two_passes.seconds("W"), two_passes.held, block.transient) > 0
    assert COSTS(job, split._replace(full=True)).blocks[0].seconds("B") > block.seconds("B")
    assert block._replace(sizes={}).share(4) == block.share(4)  # an even cut
    # twice as fast a device takes half of the time, except for messages
    fast = Device("fast", {"bfloat16": 624e12}, 4.078e12, 80e9, launch=1.5e-6, arch="sm_80", multiprocessors=108)
    faster = LedgerCosts(Cluster(fast, 8, COSTS.cluster.levels))(job, split).blocks[0]
    ratios = {k: seconds / faster.passes["B"][k] for k, seconds in block.passes["B"].items() if seconds}
    assert ratios == pytest.approx({"GEMM": 2, "attention": 2, "memory-bound": 2, "tp": 1})


def test_refused():
    job = job_of("gpt2")
    with pytest.raises(ValueError, match="plan: 4 layers cannot be cut into 6 stages"):
        COSTS(job, Split(pp=3, schedule="interleaved", chunks=2))
    with pytest.raises(ValueError, match="num_heads=8 is not divisible by tensor-parallel size 3"):
        COSTS(job, Split(tp=3))
    with pytest.raises(ValueError, match="a100-80gb has no peak for float64"):
        COSTS(job._replace(dtype=torch.float64), Split())
