"""One curve: the same losses, step for step, however a training run is laid out over ranks and micro-batches.

Spans: models/, training/: whole training runs.
"""

import functools

import pytest
import torch

from tests.models.common import MAX_NORM, Training, whole

STEPS = 4
F64 = torch.float64
# ranks, dp, sequence parallel, saving, kind, micro-batches.  With DDP and micro-batches: no_sync, but for the last
LAYOUTS = [
    (2, 1, True, "fastest", "ddp", 1),
    (2, 2, False, "fastest", "fsdp", 1),
    (2, 1, True, "fastest", "pieces", 1),
]
MORE = [
    (1, 1, False, "fastest", "ddp", 2),
    (2, 2, False, "fastest", "ddp", 3),
    (4, 2, True, "fastest", "fsdp", 1),
    (4, 1, True, "smallest", "ddp", 1),
    (4, 2, True, "fastest", "ddp", 1),
    (2, 1, False, "smallest", "ddp", 2),
    (4, 1, False, "fastest", "ddp", 1),
    (4, 2, True, "smallest", "ddp", 3),
    (3, 3, False, "fastest", "ddp", 2),
    (2, 1, True, "fastest", "dtensor", 1),
    (4, 1, True, "smallest", "pieces", 2),
    (4, 2, False, "fastest", "pieces", 3),
]


def curve(world, dp, sp, saving, kind, micro, dtype):
    """-> (loss, norm of the gradient) of each step, and the weights in the end"""
    training = Training(world, dp, sp, kind, dtype, seed=3, saving=saving)
    return training.steps(0, STEPS, micro), whole(training.model)


@pytest.fixture(scope="module")
def reference(ranks):
    """One process, one batch."""
    return functools.cache(lambda dtype: ranks(1, curve, 1, False, "fastest", "ddp", 1, dtype)[0])


@pytest.mark.parametrize(
    "R, dp, sp, saving, kind, micro", LAYOUTS + [pytest.param(*c, marks=pytest.mark.slow) for c in MORE]
)
def test_every_layout_gives_the_one_curve(ranks, reference, R, dp, sp, saving, kind, micro):
    exact, weights = reference(F64)
    assert all(norm > MAX_NORM for _, norm in exact)  # clipping acts
    for got, final in ranks(R, curve, dp, sp, saving, kind, micro, F64):
        assert (torch.tensor(got, dtype=F64) - torch.tensor(exact, dtype=F64)).abs().max() < 1e-9
        for name in weights:
            assert (final[name] - weights[name]).abs().max() < 1e-9, name
    exact, _ = reference(torch.float32)
    for got, _ in ranks(R, curve, dp, sp, saving, kind, micro, torch.float32):
        loss, want = (torch.tensor(run, dtype=F64)[:, 0] for run in (got, exact))
        assert ((loss - want) / want).abs().max() < 1e-5


def other_masks(world):
    """The same weights and batch; the second's samples are numbered from 0 in every micro-batch."""
    one, two = (Training(world, 1, False, seed=3) for _ in range(2))
    forward = two.model.forward
    two.model.forward = lambda *args, first_sample, **kwargs: forward(*args, first_sample=0, **kwargs)
    return [(t.backward(0, 2) - t.backward(0, 1)).abs().item() for t in (one, two)]


def test_samples_numbered_wrongly_would_show(ranks):
    right, wrong = ranks(1, other_masks)[0]
    assert right < 1e-9 and wrong > 1e-4
