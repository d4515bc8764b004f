"""Small models over pipeline stages, their batches, and their curves and gradients against one process's."""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.models.common import default_dtype
from tpfuse import add_lora, clip_grad_norm_, param_groups
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT, Bert, BertConfig, GPTConfig
from tpfuse.pipeline import schedule

F64 = torch.float64

ROWS, SEQ, VOCAB = 8, 12, 97
SHAPE = dict(vocab_size=VOCAB, max_positions=16, hidden_size=24, num_layers=4, num_heads=4)
DROP = dict(dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1)
GPT2 = GPTConfig(**SHAPE, **DROP)
LLAMA = dict(family="llama", norm="rms", gated=True, activation="silu", rope=dict(rope_theta=1e4), num_kv_heads=2)
PLAIN = dict(qkv_bias=False, out_bias=False, mlp_bias=False)
EXPERTS = dict(family="mixtral", num_experts=4, experts_per_token=2)
MODELS = {
    "gpt2": GPT2,
    "untied": replace(GPT2, tie_embeddings=False),
    "llama": GPTConfig(**SHAPE, **DROP, **LLAMA, **PLAIN, tie_embeddings=False),
    "mixtral": GPTConfig(**SHAPE, **DROP, **LLAMA | EXPERTS, **PLAIN, tie_embeddings=False),
    "parallel": replace(GPT2, parallel_residual=True),
    "branches": replace(GPT2, pre_norm=False, branch_norm=True),
    "bert": BertConfig(**SHAPE, **DROP),
}


def as_deep(config, ranks):
    """The config with layers for so many ranks of two stages each."""
    return replace(config, num_layers=max(config.num_layers, 2 * ranks))


def made(config, **options):
    if isinstance(config, BertConfig):
        return Bert(config, masked_lm=True, seed=3, **options).train()
    return GPT(config, seed=3, **options).train()


def batches(steps, rows=ROWS):
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(VOCAB, (rows, SEQ), generator=g)
        yield ids, ids.masked_fill(torch.rand(rows, SEQ, generator=g) < 0.2, -100)


def adapted(model, lora):
    if lora:
        add_lora(model, rank=2, alpha=4)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".lora.B" in name:
                    p.add_(0.01)
    return model


def mine(mesh):
    """The rows of a batch that this replica takes."""
    count = ROWS // mesh["dp"].size()
    return slice(mesh["dp"].get_local_rank() * count, (mesh["dp"].get_local_rank() + 1) * count)


def micro_batches(mesh):
    """Of this replica's rows: twice as many as ranks have stages, so that every schedule reaches its steady state."""
    return min(2 * mesh["pp"].size(), ROWS // mesh["dp"].size())


def place(mesh, name, over_replicas=False):
    """The options of a rank's stages."""
    stage = mesh["pp"].get_local_rank(), mesh["pp"].size(), name
    experts = dict(experts=mesh["dp", "tp"]) if over_replicas else {}
    return dict(dp=mesh["dp"] if mesh["dp"].size() > 1 else None, stage=stage) | experts


def errors(model, first, gradient=lambda p: p.grad):
    """The largest relative error of this rank's gradients against those of one process, by name."""
    worst = 0.0
    for name, p, spec, tp in named_specs(model):
        if p.requires_grad:
            grad, exact = gradient(p), first[name]
            grad, part = (grad.full_tensor(), exact) if isinstance(p, DTensor) else (grad, exact[spec.local(tp)])
            worst = max(worst, float((grad - part).abs().max() / exact.abs().max()))
    return worst


# ---- curves ----


class Curve(NamedTuple):
    losses: list[float]
    norms: list[float]
    first: Any  # one process: the first step's gradients by name; stages: the largest error of this rank's
    names: set[str]
    share: float = 1.0  # of the elements of this rank's parameters, those that it holds between steps


def one_process(world, config, lora, steps, per_step, **options):
    with default_dtype(F64):
        model = adapted(made(config, **options), lora)
        return _curve(model, None, lambda *call: model(call[0], labels=call[1]).loss, steps, per_step)


def over_stages(world, build, layout, name, config, options, steps, per_step, first):
    """``build(mesh, name, config, **options)`` returns the model of this rank's stages, and its MainGrad or None."""
    mesh = world.stages(*layout)
    with default_dtype(F64):
        model, main = build(mesh, name, config, **options)
        pipeline, rows = schedule(model, mesh["pp"], name, micro_batches(mesh)), mine(mesh)
        run = lambda ids, labels: pipeline.step(ids[rows], labels=labels[rows])
        curve = _curve(model, main, run, steps, per_step, first)
        assert len(pipeline.store) == 0
        local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
        return curve._replace(share=local / sum(p.numel() for p in model.parameters()))


def _curve(model, main, run, steps, per_step, first=None):
    """Steps of AdamW, after ``per_step`` batches each."""
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)
    losses, norms, gradients = [], [], None
    for n, (ids, labels) in enumerate(batches(steps * per_step), 1):
        loss = run(ids, labels)
        losses.append(loss.item())
        if first is None:
            loss.backward()
        if n % per_step:
            continue
        if main is not None:
            assert all(p.grad is None for p in model.parameters())
            main.reduce()
        if gradients is None and first is None:
            gradients = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        elif gradients is None:
            gradients = errors(model, first, (lambda p: p.grad) if main is None else (lambda p: p.main_grad))
        norms.append(clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad() if main is None else main.zero()
    return Curve(losses, norms, gradients, {name for name, _ in model.named_parameters()})


EXACT = {}  # curves of one process, which several tests compare with


def check_curve(ranks, build, layout, name, config=GPT2, steps=2, per_step=1, **options):
    """Losses, norms and first gradients of all ranks are those of one process; -> the ranks' curves."""
    config = as_deep(config, layout[0])
    lora, of_loss = options.get("lora", False), {key: options[key] for key in ("balance",) if key in options}
    key = repr((config, lora, steps, per_step, of_loss))
    if key not in EXACT:
        EXACT[key] = ranks(1, functools.partial(one_process, **of_loss), config, lora, steps, per_step)[0]
    exact, size = EXACT[key], math.prod(layout)
    curves = ranks(size, over_stages, build, layout, name, config, options, steps, per_step, exact.first)
    for curve in curves:
        assert curve.losses == pytest.approx(exact.losses, rel=1e-9)
        assert curve.norms == pytest.approx(exact.norms, rel=1e-9)
        assert curve.first < 1e-9
    assert set(exact.first) <= set().union(*(curve.names for curve in curves))
    return curves


def cases(daily, every):
    """Parameters (layout, schedule), slow unless daily."""
    return [
        pytest.param(layout, name, marks=[] if (layout, name) in daily else pytest.mark.slow, id=f"{layout}-{name}")
        for layout, name in every
    ]


# ---- what is refused ----


def said(attempt, kind=ValueError):
    with pytest.raises(kind) as caught:
        attempt()
    return str(caught.value)


def check_said(messages, words):
    """Every rank's messages, by key, hold the words."""
    for found in messages:
        assert {key for key, part in words.items() if part not in found[key]} == set()
