"""What is GPT's own: its shapes, its initial weights, its loss."""

from dataclasses import replace

import pytest
import torch

from tests.common import assert_close, make_tp
from tests.models.common import BERT_CONFIG, GPT_CONFIG, MORE_SHAPES, batch, default_dtype, run, whole
from tpfuse.models import GPT, Bert

F64 = torch.float64


def small(**changes):
    return replace(GPT_CONFIG, max_positions=128, hidden_size=16, num_heads=4, num_layers=1, ffn_size=20, **changes)


# vocabulary, batch, sequence, tied.  Rows: 1, 21 and 127 leave ranks of four with padding only, or some of it.
SHAPES = [
    (997, 1, 1, True),  # 997 = 250 + 250 + 250 + 247
    (997, 3, 7, False),
    (50257, 3, 7, True),  # GPT-2's own: no multiple of anything
]


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
@pytest.mark.parametrize(
    "vocab, size, seq, tied", SHAPES + [pytest.param(*s, marks=pytest.mark.slow) for s in MORE_SHAPES]
)
def test_sizes_that_do_not_divide(ranks, vocab, size, seq, tied, sp):
    config = small(vocab_size=vocab, tie_embeddings=tied)
    call = batch(config, size, seq, seed=3)
    call["labels"][0, -1] = 5  # something to learn, where a sequence of one leaves GPT nothing
    exact = run(None, GPT, config, call)
    assert_close(ranks(4, run, GPT, config, call, sp)[0], exact, F64)


def test_weights_start_as_transformers_starts_them():
    config = replace(GPT_CONFIG, hidden_size=96, vocab_size=997)
    std = {
        name: p.std().item() for name, p in GPT(config).named_parameters() if p.dim() > 1 and name.endswith("weight")
    }
    for name, got in std.items():
        residual = name.endswith(("attention.out.weight", "mlp.fc2.weight"))
        assert got == pytest.approx(0.02 / 2 if residual else 0.02, rel=0.05), name  # 2 layers: sqrt(4)


def normalized(world, labels, normalizer):
    with default_dtype(F64):
        model = GPT(GPT_CONFIG, tp=make_tp(world)).eval()
    ids = batch(GPT_CONFIG)["input_ids"]
    out = model(ids, labels=labels, loss_normalizer=normalizer)
    out.loss.backward()
    return out.loss.item(), model.norm_in.weight.grad


def test_the_loss_is_the_sum_over_valid_labels_over_the_normalizer(ranks):
    labels = batch(GPT_CONFIG)["labels"]
    count = int((labels[:, 1:] != -100).sum())
    assert 0 < count < labels[:, 1:].numel()
    (mean, grad), *_ = ranks(2, normalized, labels, None)
    for normalizer in (7.0, torch.tensor(7)):
        loss, dw = ranks(2, normalized, labels, normalizer)[0]
        assert loss == pytest.approx(mean * count / 7, rel=1e-12)
        torch.testing.assert_close(dw, grad * count / 7, rtol=1e-10, atol=1e-14)
    loss, dw = ranks(2, normalized, torch.full_like(labels, -100), None)[0]
    assert loss == 0 and dw.count_nonzero() == 0


def _loss_alone(world, cls, config, call, saving):
    with default_dtype(torch.float64):
        model = cls(config, tp=make_tp(world, True), saving=saving, **({"masked_lm": True} if cls is Bert else {}))
    out = model.train()(**call, step=1, first_sample=0)
    assert out.logits is None
    out.loss.backward()
    return dict(loss=out.loss.detach()) | whole(model, grad=True)


@pytest.mark.parametrize("cls, config", [(GPT, GPT_CONFIG), (Bert, BERT_CONFIG)], ids=["gpt", "bert"])
@pytest.mark.parametrize("R", [1, 4])
def test_the_loss_without_logits_is_the_same(ranks, cls, config, R):
    """The smallest mode makes them in chunks, twice; the fastest keeps them."""
    kept, made = (ranks(R, _loss_alone, cls, config, batch(config), saving) for saving in ("fastest", "smallest"))
    for a, b in zip(made, kept, strict=True):
        assert_close(a, b, torch.float64)
