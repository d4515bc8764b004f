"""Pieces of a model: those of any stage add up to what the stage runs, call by call and byte by byte."""

from collections import Counter

import pytest
import torch

from tpfuse.models import BertConfig, GPTConfig, config_from_hf
from tpfuse.parallel import TensorParallel
from tpfuse.pipeline.action import KINDS
from tpfuse.pipeline.placement import Stage
from tpfuse.tools.ledger import Plan, fake_world, load_config
from tpfuse.tools.ledger.layer import build
from tpfuse.tools.ledger.stages import run_stage
from tpfuse.tools.plan.cluster import preset
from tpfuse.tools.plan.pieces import bare, counted
from tpfuse.tools.plan.split import Job, Split

A100 = preset("a100-80gb", 64)
SIZES = dict(vocab_size=512, max_positions=256, hidden_size=128, num_layers=4, num_heads=8)
LLAMA = load_config("llama3-8b")
MODELS = {
    "gpt2": GPTConfig(**SIZES),
    "bert": BertConfig(**SIZES),
    "llama": config_from_hf(
        dict(model_type="llama", vocab_size=512, max_position_embeddings=256, hidden_size=128, num_hidden_layers=4)
        | dict(num_attention_heads=8, num_key_value_heads=4, intermediate_size=256, rms_norm_eps=1e-5)
        | dict(hidden_act="silu", rope_theta=1e4)
    ),
    "windows": GPTConfig(
        **SIZES, window=32, layer_types=("sliding_attention", "full_attention") * 2, tie_embeddings=False
    ),
}


def job_of(name, seq=128):
    return Job(MODELS[name], 64, seq)


def ran(job, split, layers):
    """The stages of the real model, run at the split's micro-batch."""
    plan = Plan(split.tp, seq=job.seq, micro_batch=split.micro_batch, saving=split.saving, full=split.full)
    with fake_world(split.tp) as mesh:
        stage = Stage(0, 1, "interleaved", len(layers), layers) if len(layers) > 1 else None
        how = dict(saving=split.saving, full=split.full, dtype=job.dtype, stage=stage)
        model = build(job.config, tp=TensorParallel(mesh["tp"], sequence_parallel=True), **how)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        later = split.schedule == "zbv"
        return [(chunk, run_stage(model, chunk, plan, split=later)) for chunk in model.chunks]


def summed(job, split, layers):
    """Calls, saved and held bytes of a stage, by its pieces."""
    runs = counted(job, split)
    of = [runs.embedding if layers[0] == 0 else runs.border, *(runs.blocks[job.config.windows[i]] for i in layers)]
    of += [runs.head] if layers[-1] == job.config.num_layers - 1 else []
    calls = {kind: Counter() for kind in KINDS}
    for piece in of:
        for kind in KINDS:
            calls[kind].update(piece.passes[kind])
    made = {kind: Counter({e: n for e, n in found.items() if n}) for kind, found in calls.items()}
    return made, sum(p.saved for p in of), sum(p.held for p in of), runs.rows


def costs_of(run):
    """The calls of a pass by all but their names: where one stage has both uses of a tied weight their gradients are
    summed by add, and by add_ where each is added to what is there."""
    return {kind: Counter(bare(e)._replace(op=e.op.rstrip("_")) for e in run.passes[kind]) for kind in KINDS}


CASES = [
    ("gpt2", Split(tp=1, micro_batch=1), (4,)),
    ("gpt2", Split(tp=2, micro_batch=5, saving="smallest"), (1, 2, 1)),
    ("gpt2", Split(tp=4, micro_batch=3, full=True), (2, 2)),
    ("gpt2", Split(tp=2, micro_batch=6, schedule="zbv", pp=2), (1, 1, 2)),
    ("bert", Split(tp=2, micro_batch=4), (1, 2, 1)),
    ("bert", Split(tp=1, micro_batch=3, full=True, schedule="zbv", pp=2), (2, 2)),
    ("llama", Split(tp=4, micro_batch=8, saving="smallest"), (3, 1)),
    ("llama", Split(tp=2, micro_batch=7, full=True, saving="smallest"), (1, 3)),
    ("windows", Split(tp=2, micro_batch=3), (1, 1, 2)),
]


@pytest.mark.parametrize("name, split, layers", CASES)
def test_pieces_add_up_to_any_stage(name, split, layers):
    job = job_of(name)
    for chunk, real in ran(job, split, layers):
        calls, saved, held, rows = summed(job, split, chunk.layers)
        named = {k: Counter() for k in KINDS}
        for kind in KINDS:
            for e, count in calls[kind].items():
                named[kind][e._replace(op=e.op.rstrip("_"))] += count
        assert named == costs_of(real)
        assert (saved, held, rows) == (real.saved, real.held, real.rows)
