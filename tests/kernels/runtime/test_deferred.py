"""Gradients of weights handed over: nothing of them before they are run, then what autograd gives, bit for bit."""

from dataclasses import replace

import pytest
import torch

from tests.models.common import GPT_CONFIG, batch
from tpfuse import MainGrad, add_lora
from tpfuse.models import GPT
from tpfuse.pipeline import WeightGradients

LINEAR = "qkv.weight", "qkv.bias", "out.weight", "fc1.weight", "fc1.bias", "fc2.weight"


def model_and_call(saving="fastest", dtype=torch.float64, config=GPT_CONFIG, **options):
    model = GPT(config, seed=3, saving=saving, **options).to(dtype).train()
    return model, dict(batch(GPT_CONFIG), step=0, first_sample=0)


def handed_over(model, call):
    store = WeightGradients()
    with store.deferring():
        loss = model(**call).loss
    loss.backward()
    return store


@pytest.mark.parametrize("options", [dict(), dict(saving="smallest"), dict(recompute="full")], ids=str)
def test_gradients_are_those_of_autograd(options):
    exact, call = model_and_call(**options)
    exact(**call).loss.backward()
    model, _ = model_and_call(**options)
    store = handed_over(model, call)
    missing = {name for name, p in model.named_parameters() if p.grad is None}
    assert missing == {name for name, _ in model.named_parameters() if name.endswith(LINEAR)}
    assert len(store) > 0
    run = store.take()
    assert len(store) == 0
    run()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    before = [p.grad.clone() for p in model.parameters()]
    run()  # is over
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_hooks_of_a_parameter_fire_once_when_it_is_run():
    model, call = model_and_call()
    weight, fired = model.blocks[0].mlp.fc1.weight, []
    weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad is not None))
    run = handed_over(model, call).take()
    assert fired == []
    run()
    assert fired == [True]


def test_under_autocast_gradients_go_through_the_cast():
    exact, call = model_and_call(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        exact(**call).loss.backward()
    model, _ = model_and_call(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        store = handed_over(model, call)
    store.take()()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_a_main_grad_is_added_to_when_it_is_run():
    untied = replace(GPT_CONFIG, tie_embeddings=False)  # a shared matrix adds its two gradients in another order
    exact, call = model_and_call(dtype=torch.bfloat16, config=untied)
    main = MainGrad(exact)
    model, _ = model_and_call(dtype=torch.bfloat16, config=untied)
    later = MainGrad(model)
    for _ in range(2):
        exact(**call).loss.backward()
        run = handed_over(model, call).take()
        run()
    main.reduce()
    later.reduce()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert p.main_grad.dtype == torch.float32
        assert torch.equal(p.main_grad, q.main_grad), name


def test_what_is_frozen_stays_so():
    exact, call = model_and_call()
    model, _ = model_and_call()
    for m in (exact, model):
        add_lora(m, rank=2, alpha=4)
        m.blocks[1].mlp.fc1.bias.requires_grad_(True)  # a bias alone
    exact(**call).loss.backward()
    handed_over(model, call).take()()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (not p.requires_grad), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_what_waits_is_held_until_it_is_taken():
    """Of each linear layer its input and the gradient of its output; of a weight nothing."""
    model, call = model_and_call(saving="smallest")
    store = handed_over(model, call)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert store.held() and not own & {x.untyped_storage().data_ptr() for x in store.held()}
    store.take()()
    assert store.held() == []
