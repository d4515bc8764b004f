"""DelayedGradients in one process, against gradients that are exchanged by hand."""

import pytest
import torch

from tests.pipeline.common import GPT2, batches, made
from tpfuse import DelayedGradients, MainGrad

STEPS = 3


def trained(exchange):
    """Steps of SGD; ``exchange(model, loss)`` returns the loss whose gradients it has put into .grad."""
    model = made(GPT2)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for ids, labels in batches(STEPS):
        loss = model(ids, labels=labels).loss
        loss.backward()
        losses.append(exchange(model, loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()]


def test_each_gradient_is_that_of_the_batch_before():
    waiting, delays = [None], []

    def by_hand(model, loss):
        before, waiting[0] = waiting[0], (loss.detach(), [p.grad for p in model.parameters()])
        for i, p in enumerate(model.parameters()):
            p.grad = None if before is None else before[1][i]
        return None if before is None else before[0]

    def swap(model, loss):
        delays.extend([] if delays else [DelayedGradients(model)])
        return delays[0].swap(loss)

    (exact, weights), (losses, found) = trained(by_hand), trained(swap)
    assert losses == exact and losses[0] is None
    assert all(map(torch.equal, found, weights))
    (loss, gradients), model = waiting[0], delays[0]._model
    assert delays[0].drain() == loss and delays[0].drain() is None
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_beside_main_grad_is_refused():
    model = made(GPT2).to(torch.bfloat16)
    main = MainGrad(model, None)
    with pytest.raises(ValueError, match="use it without a MainGrad"):
        DelayedGradients(model)
    main.zero()


def test_gradients_that_wait_are_not_lost_to_a_second_one():
    """One that has none to lose may be made anew, as by a notebook's cell that runs again."""
    model = made(GPT2)
    DelayedGradients(model)
    delayed = DelayedGradients(model)
    ids, labels = next(batches(1))
    loss = model(ids, labels=labels).loss
    loss.backward()
    delayed.swap(loss)
    with pytest.raises(ValueError, match="wait in a DelayedGradients; call its drain"):
        DelayedGradients(model)
    assert torch.equal(delayed.drain(), loss)
    DelayedGradients(model)
