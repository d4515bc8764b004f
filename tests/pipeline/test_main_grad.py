"""MainGrad over pipeline stages against one process's: losses, norms, gradients; fp32 sums of 16-bit models."""

import pytest
import torch

from tests.models.common import default_dtype
from tests.pipeline.common import GPT2, MODELS, ROWS, batches, errors, made
from tpfuse import MainGrad, TensorParallel, clip_grad_norm_, param_groups
from tpfuse.pipeline import SCHEDULES, schedule

F64 = torch.float64


def total(p):
    return p.main_grad


def staged(world, layout, name, config=GPT2, micro_batches=ROWS, dtype=F64):
    """-> the pipeline of this rank's stages, their MainGrad, and this replica's rows of a batch."""
    mesh = world.stages(*layout)
    pp, dp = mesh["pp"], mesh["dp"]
    with default_dtype(dtype):
        options = dict(tp=TensorParallel(mesh["tp"]), dp=dp, stage=(pp.get_local_rank(), pp.size(), name))
        model = made(config, **options)
    main = MainGrad(model, dp)
    rows = ROWS // dp.size()
    mine = slice(dp.get_local_rank() * rows, (dp.get_local_rank() + 1) * rows)
    return schedule(model, pp, name, micro_batches // dp.size()), main, mine


def curve(world, config, per_step):
    """One process with a MainGrad: the losses, the norms, and the first gradients by name."""
    with default_dtype(F64):
        model = made(config)
    main, (losses, norms, first) = MainGrad(model), ([], [], {})
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)
    every = list(batches(2 * per_step))
    for step in range(2):
        for ids, labels in every[step * per_step : (step + 1) * per_step]:
            loss = model(ids, labels=labels).loss
            loss.backward()
            losses.append(loss.item())
        main.reduce()
        first = first or {name: p.main_grad.clone() for name, p in model.named_parameters()}
        norms.append(clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        main.zero()
    return losses, norms, first


def staged_curve(world, layout, name, config, per_step, first):
    pipeline, main, mine = staged(world, layout, name, config)
    model, losses, norms, worst = pipeline.model, [], [], None
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)
    every = list(batches(2 * per_step))
    for step in range(2):
        for ids, labels in every[step * per_step : (step + 1) * per_step]:
            losses.append(pipeline.step(ids[mine], labels=labels[mine]).item())
        assert all(p.grad is None for p in model.parameters())
        main.reduce()
        worst = errors(model, first, total) if worst is None else worst
        norms.append(clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        main.zero()
    return losses, norms, worst


EVERY = [*(((2, 2, 1), name) for name in SCHEDULES), ((2, 1, 2), "zbv"), ((4, 1, 1), "chimera")]
DAILY = {((2, 2, 1), "chimera")}


def check(ranks, layout, name, config=GPT2, per_step=1):
    losses, norms, first = ranks(1, curve, config, per_step)[0]
    for theirs in ranks(layout[0] * layout[1] * layout[2], staged_curve, layout, name, config, per_step, first):
        assert theirs[0] == pytest.approx(losses, rel=1e-9)
        assert theirs[1] == pytest.approx(norms, rel=1e-9)
        assert theirs[2] < 1e-9


@pytest.mark.parametrize(
    "layout, name",
    [
        pytest.param(layout, name, marks=[] if (layout, name) in DAILY else pytest.mark.slow, id=f"{layout}-{name}")
        for layout, name in EVERY
    ],
)
def test_every_schedule_gives_one_processs_curve(ranks, layout, name):
    check(ranks, layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("layout, name", [((2, 2, 1), "1f1b"), ((2, 2, 1), "zbv")], ids=["1f1b", "zbv"])
def test_several_steps_of_one_reduction(ranks, layout, name):
    check(ranks, layout, name, per_step=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "gpt2"])
def test_every_kind_of_model(ranks, kind):
    check(ranks, (2, 1, 1), "zbv", MODELS[kind])


def rounded(world, name, autocast):
    """16-bit weights or activations: of how many weights of the last stage, which no border rounds, the gradients have
    the bits of one process with the same micro-batches: with a MainGrad, and without; and of how many there are."""
    mesh = world.stages(2, 1, 1)
    (ids, labels), *_ = batches(1)
    dtype, config = torch.float32 if autocast else torch.bfloat16, MODELS["untied"]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        whole = made(config).to(dtype)
        MainGrad(whole)
        count = float((labels[:, 1:] != -100).sum())
        for m in range(ROWS):
            given = dict(labels=labels[m : m + 1], loss_normalizer=count, step=0, first_sample=m)
            whole(ids[m : m + 1], **given).loss.backward()
        exact, found = {key: p.main_grad for key, p in whole.named_parameters()}, []
        for with_main in (True, False):
            model = made(config, stage=(mesh["pp"].get_local_rank(), 2, name)).to(dtype)
            main = MainGrad(model) if with_main else None
            schedule(model, mesh["pp"], name, ROWS).step(ids, labels=labels, step=0)
            if main is not None:
                main.reduce()
            gradients = {key: p.main_grad if with_main else p.grad.float() for key, p in model.named_parameters()}
            last = [f"blocks.{layer}." for chunk in model.stages.chunks if chunk.is_last for layer in chunk.layers]
            weights = [key for key in gradients if key.startswith((*last, "head.")) and gradients[key].dim() == 2]
            assert all(gradients[key].dtype == torch.float32 for key in weights)
            found.append(sum(torch.equal(gradients[key], exact[key]) for key in weights))
        return *found, len(weights)


@pytest.mark.parametrize(
    "name, autocast", [("zbv", False), pytest.param("1f1b", True, marks=pytest.mark.slow)], ids=["bf16", "autocast"]
)
def test_micro_batches_are_added_in_fp32(ranks, name, autocast):
    every = ranks(2, rounded, name, autocast)
    assert sum(count for *_, count in every)
    for with_main, without, count in every:
        assert with_main == count and (not count or autocast or without == 0)


def refusals(world):
    mesh = world.stages(2, 2, 1)
    pp, dp, found = mesh["pp"], mesh["dp"], {}

    def said(kind, attempt):
        with pytest.raises(kind) as caught:
            attempt()
        return str(caught.value)

    options = dict(stage=(pp.get_local_rank(), 2))
    found["no replicas"] = said(ValueError, lambda: MainGrad(made(GPT2, dp=dp, **options)))
    found["replicas"] = said(ValueError, lambda: MainGrad(made(GPT2, **options), dp))
    model = made(GPT2, dp=dp, **options)
    main = MainGrad(model, dp)
    found["no schedule"] = said(ValueError, main.reduce)
    pipeline = schedule(model, pp, "1f1b", 2)
    (ids, labels), *_ = batches(1)
    ids, labels = ids[:4], labels[:4]
    pipeline.step(ids, labels=labels)
    found["clip"] = said(RuntimeError, lambda: clip_grad_norm_(model, 1.0))
    main.reduce()
    before = [p.main_grad.clone() for p in model.parameters()]
    found["step"] = said(RuntimeError, lambda: pipeline.step(ids, labels=labels))
    assert all(torch.equal(p.main_grad, g) for p, g in zip(model.parameters(), before, strict=True))
    main.zero()
    assert torch.isfinite(pipeline.step(ids, labels=labels))
    return found


WORDS = {
    "no replicas": "give both the same: GPT(..., dp=mesh['dp']) and MainGrad(model, mesh['dp'])",
    "replicas": "give both the same",
    "no schedule": "the others are not known before tpfuse.pipeline.schedule",
    "clip": "was not reduced; call main.reduce()",
    "step": "call main.zero() first",
}


def test_what_is_refused_says_why_on_every_rank(ranks):
    for found in ranks(4, refusals):
        assert {key for key, words in WORDS.items() if words not in found[key]} == set()
