"""A parameter that two ranks of a pipeline hold, and only one of them trains: an error on every rank, where the sum of
both gradients would wait for ever."""

from dataclasses import replace

import pytest
import torch

from tests.pipeline.common import GPT2, batches, made, said
from tpfuse import MainGrad
from tpfuse.pipeline import schedule

FROZEN = "two ranks of the pipeline hold embedding.weight, which is frozen on one of them and trained on the other"


def staged(world):
    mesh = world.stages(world.size, 1, 1)["pp"]
    model = made(replace(GPT2, num_layers=world.size), stage=(world.rank, world.size))
    (batch,) = batches(1)
    return model, lambda: schedule(model, mesh, "1f1b", 4), dict(zip(("input_ids", "labels"), batch, strict=True))


def train_tied(model, trained):
    """Freezes or trains the tied embedding, which a rank in the middle has not."""
    for name, p in model.named_parameters():
        p.requires_grad_(trained or name != "embedding.weight")


def in_a_step(world):
    """-> what is said where the last rank freezes, or rank 0 alone trains again; and whether other steps run"""
    model, scheduled, batch = staged(world)
    pipeline, losses, found = scheduled(), [], []
    losses.append(pipeline.step(**batch))
    for alone, both in ((world.rank < world.size - 1, False), (world.rank == 0, True)):
        train_tied(model, alone)
        found.append(said(lambda: pipeline.step(**batch)))
        train_tied(model, both)
        losses += [pipeline.step(**batch) for _ in range(2)]
    return found, torch.stack(losses).isfinite().all()


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_names_what_is_frozen_on_one_rank(ranks, size):
    for found, finite in ranks(size, in_a_step):
        assert finite and all(text.startswith(f"pipeline 1f1b: {FROZEN}") for text in found)


def in_a_main_grad(world):
    model, scheduled, batch = staged(world)
    train_tied(model, world.rank > 0)
    main, pipeline, found = MainGrad(model), scheduled(), []
    for trained in False, True:
        train_tied(model, trained)
        pipeline.step(**batch)
        found.append(said(main.reduce))
        main.zero()
    return found


def test_reduce_names_what_one_rank_alone_adds_up(ranks):
    for frozen, trained in ranks(2, in_a_main_grad):
        assert frozen.startswith(f"MainGrad.reduce: {FROZEN}")
        assert "are new or were made trainable since it was made: embedding.weight" in trained
