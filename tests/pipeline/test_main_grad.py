"""MainGrad over pipeline stages against one process's: losses, norms, gradients; fp32 sums of 16-bit models.

Spans: tpfuse/pipeline/step.py and tpfuse/training/main_grad.py: both take part in a step.
"""

import pytest
import torch

from tests.pipeline.common import GPT2, MODELS, ROWS, batches, cases, check_curve, check_said, made, place, said
from tpfuse import MainGrad, TensorParallel, clip_grad_norm_
from tpfuse.pipeline import SCHEDULES, schedule


def staged(mesh, name, config, over_replicas=False):
    model = made(config, tp=TensorParallel(mesh["tp"]), **place(mesh, name, over_replicas))
    return model, MainGrad(model, mesh["dp"])


EVERY = [*(((2, 2, 1), name) for name in SCHEDULES), ((2, 1, 2), "zbv"), ((4, 1, 1), "chimera")]
DAILY = {((2, 2, 1), "chimera")}


@pytest.mark.parametrize("layout, name", cases(DAILY, EVERY))
def test_every_schedule_gives_one_processs_curve(ranks, layout, name):
    check_curve(ranks, staged, layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("layout, name", [((2, 2, 1), "1f1b"), ((2, 2, 1), "zbv")], ids=["1f1b", "zbv"])
def test_several_steps_of_one_reduction(ranks, layout, name):
    check_curve(ranks, staged, layout, name, per_step=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bert", "mixtral"])
def test_every_kind_of_model(ranks, kind):
    check_curve(ranks, staged, (2, 1, 1), "zbv", MODELS[kind])


@pytest.mark.slow
def test_experts_over_replicas_and_ranks(ranks):
    check_curve(ranks, staged, (2, 2, 2), "zbv", MODELS["mixtral"], over_replicas=True)


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
    options = dict(stage=(pp.get_local_rank(), 2))
    found["no replicas"] = said(lambda: MainGrad(made(GPT2, dp=dp, **options)))
    found["replicas"] = said(lambda: MainGrad(made(GPT2, **options), dp))
    model = made(GPT2, dp=dp, **options)
    main = MainGrad(model, dp)
    found["no schedule"] = said(main.reduce)
    pipeline = schedule(model, pp, "1f1b", 2)
    (ids, labels), *_ = batches(1)
    ids, labels = ids[:4], labels[:4]
    pipeline.step(ids, labels=labels)
    found["clip"] = said(lambda: clip_grad_norm_(model, 1.0), RuntimeError)
    main.reduce()
    before = [p.main_grad.clone() for p in model.parameters()]
    found["step"] = said(lambda: pipeline.step(ids, labels=labels), RuntimeError)
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


@pytest.mark.slow
def test_what_is_refused_says_why_on_every_rank(ranks):
    check_said(ranks(4, refusals), WORDS)
