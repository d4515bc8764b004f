"""Gradients that are one step late over stages, against one process with the same delay: losses, gradients, weights, in
fp64 with dropout on; bits; what is refused."""

import functools

import pytest
import torch

from tests.models.common import default_dtype
from tests.pipeline.common import F64, GPT2, MODELS, ROWS, adapted, batches, errors, made, mine, place
from tpfuse import TensorParallel, clip_grad_norm_, param_groups
from tpfuse.layers import ExpertBalance
from tpfuse.pipeline import schedule

STEPS = 4


def delayed_in_one_process(world, config, lora, **options):
    """The definition, without the library's: weights change by the gradient of the batch before."""
    with default_dtype(F64):
        model = adapted(made(config, **options), lora)
        optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-2)
        losses, waiting, history = [], {}, []
        for ids, labels in batches(STEPS):
            loss = model(ids, labels=labels).loss
            loss.backward()
            losses.append(loss.item())
            gradients = {p: p.grad for p in model.parameters()}
            history.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            for p in model.parameters():
                p.grad = waiting.get(p)
            waiting = gradients
            clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return losses, history, {name: p.detach() for name, p in model.named_parameters()}


def over_stages(world, layout, config, lora, exact, sequence_parallel=False, **options):
    mesh = world.stages(*layout)
    losses, history, weights = exact
    with default_dtype(F64):
        tp = TensorParallel(mesh["tp"], sequence_parallel=sequence_parallel)
        model = adapted(made(config, tp=tp, **place(mesh, "2bw"), **options), lora)
        pipeline, rows = schedule(model, mesh["pp"], "2bw", ROWS // mesh["dp"].size()), mine(mesh)
        optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-2)
        found, worst = [], 0.0
        for t, (ids, labels) in enumerate(batches(STEPS)):
            found.append(pipeline.step(ids[rows], labels=labels[rows]))
            if t == 0:
                assert all(p.grad is None for p in model.parameters())
            else:
                worst = max(worst, errors(model, history[t - 1]))
            clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(pipeline.drain())
        worst = max(worst, errors(model, history[-1]), errors(model, weights, lambda p: p.detach()))
        assert found[0] is None
        return [x.item() for x in found[1:]], worst


EXACT = {}


def check(ranks, layout, config=GPT2, lora=False, **options):
    balance = {key: options[key] for key in ("balance",) if key in options}
    key = repr((config, lora, balance))
    if key not in EXACT:
        EXACT[key] = ranks(1, functools.partial(delayed_in_one_process, **balance), config, lora)[0]
    pp, dp, tp = layout
    for losses, worst in ranks(
        pp * dp * tp, functools.partial(over_stages, **options), layout, config, lora, EXACT[key]
    ):
        assert losses == pytest.approx(EXACT[key][0], rel=1e-9)
        assert worst < 1e-9


LAYOUTS = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout(ranks, layout):
    check(ranks, layout)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "bert", "untied"])
def test_every_kind_of_model(ranks, kind):
    check(ranks, (2, 1, 1), MODELS[kind])


def test_beside_other_features(ranks):
    check(ranks, (2, 1, 2), MODELS["llama"], lora=True, sequence_parallel=True)


def test_recompute(ranks):
    check(ranks, (2, 1, 1), MODELS["llama"], recompute="full")


def test_losses_of_balance(ranks):
    check(ranks, (2, 1, 1), MODELS["mixtral"], balance=ExpertBalance("sequence", 0.5, 0.1))
