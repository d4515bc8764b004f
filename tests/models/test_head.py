"""The models' losses: label smoothing, z-loss and the loss of each token, against torch's dense cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from tests.common import assert_close, make_tp
from tests.models.common import BERT_CONFIG, GPT_CONFIG, batch, default_dtype, whole
from tpfuse.models import GPT, Bert

F64 = torch.float64
CONFIGS = {GPT: GPT_CONFIG, Bert: BERT_CONFIG}
OPTIONS = dict(label_smoothing=0.1, z_loss=1e-2)


def weights(labels):
    """What each label counts: rows of a loss that is weighted, as in reinforcement learning."""
    return torch.rand(labels.shape, generator=torch.Generator().manual_seed(3), dtype=F64)


def call_of(cls):
    return batch(CONFIGS[cls], pad="right")


def model_of(cls, world, saving):
    with default_dtype(F64):
        tp = None if world is None else make_tp(world)
        return cls(CONFIGS[cls], tp=tp, saving=saving, **({"masked_lm": True} if cls is Bert else {})).eval()


def step(world, cls, reduction, saving="fastest"):
    model, call = model_of(cls, world, saving), call_of(cls)
    loss = model(**call, reduction=reduction, **OPTIONS).loss
    (loss * weights(call["labels"])).sum().backward() if loss.dim() else loss.backward()
    return dict(loss=loss.detach()) | whole(model, grad=True)


def dense(cls, reduction):
    """From whole logits, by torch: each label's loss at the label's place."""
    model, call = model_of(cls, None, "fastest"), call_of(cls)
    logits, labels = model(**{k: v for k, v in call.items() if k != "labels"}).logits, call["labels"]
    if cls is GPT:
        logits = F.pad(logits[:, :-1], (0, 0, 1, 0))  # position s - 1 predicts label s
        labels = labels.clone()
        labels[:, 0] = -100
    flat, valid = logits.flatten(0, 1), labels.flatten() != -100
    rows = F.cross_entropy(flat, labels.flatten(), label_smoothing=0.1, reduction="none")
    rows = rows + torch.where(valid, flat.logsumexp(-1) ** 2, 0) * 1e-2
    loss = {"none": rows.view(labels.shape), "sum": rows.sum(), "mean": rows.sum() / valid.sum()}[reduction]
    (loss * weights(labels)).sum().backward() if loss.dim() else loss.backward()
    return dict(loss=loss.detach()) | whole(model, grad=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("cls", [GPT, Bert])
def test_against_torchs_dense_loss(cls, reduction):
    assert_close(step(None, cls, reduction), dense(cls, reduction), F64)


@pytest.mark.parametrize("saving", ["fastest", "smallest"])
@pytest.mark.parametrize("cls", [GPT, Bert])
@pytest.mark.parametrize("R", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_is_whole(ranks, R, cls, saving):
    exact = step(None, cls, "none")
    assert exact["loss"].shape == (3, 7) and (exact["loss"] == 0).any()
    assert_close(ranks(R, step, cls, "none", saving)[0], exact, F64)


def test_a_document_s_first_token_has_no_loss():
    model, ids = model_of(GPT, None, "fastest"), batch(GPT_CONFIG, 1, 12)["input_ids"]
    bounds = torch.tensor([0, 5, 10], dtype=torch.int32)
    loss = model(ids, labels=ids, cu_seqlens=bounds, reduction="none").loss
    assert ((loss == 0) == torch.tensor([[s in (0, 5, 10, 11) for s in range(12)]])).all()


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(label_smoothing=1.0), r"GPT: label_smoothing must lie in \[0, 1\), got 1.0"),
        (dict(z_loss=-1.0), "GPT: z_loss must be at least 0 and finite, got -1.0"),
        (dict(reduction="all"), "GPT: reduction must be one of mean, sum, none, got 'all'"),
        (dict(reduction="none", loss_normalizer=3.0), "GPT: loss_normalizer goes with reduction='mean'"),
    ],
)
def test_what_is_refused(options, words):
    model, call = model_of(GPT, None, "fastest"), call_of(GPT)
    with pytest.raises(ValueError, match=words):
        model(**call, **options)
