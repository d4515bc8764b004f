"""Bert: its shapes, token types, padding, pooler and head."""

import pytest
import torch

from tests.common import assert_close, assert_equal
from tests.models.common import BERT_CONFIG, MORE_SHAPES, SHAPES, batch, default_dtype, narrow, run
from tpfuse.models import Bert

F64 = torch.float64


@pytest.mark.parametrize("masked_lm", [True, False])
@pytest.mark.parametrize(
    "vocab, size, seq, tied", SHAPES + [pytest.param(*s, marks=pytest.mark.slow) for s in MORE_SHAPES]
)
def test_sizes_that_do_not_divide(ranks, vocab, size, seq, tied, masked_lm):
    config = narrow(BERT_CONFIG, vocab_size=vocab, tie_embeddings=tied, type_vocab_size=3)
    call = batch(config, size, seq) | dict(token_type_ids=(torch.arange(size * seq).view(size, seq) + 1) % 3)
    call["labels"][0, -1] = 5
    options = dict(masked_lm=masked_lm)
    exact = run(None, Bert, config, call, options=options)
    for sp in (True, False):
        assert_close(ranks(4, run, Bert, config, call, sp, F64, options)[0], exact, F64)
    del call["token_type_ids"]  # they are all zero then, and it shows
    with pytest.raises(AssertionError):
        assert_close(run(None, Bert, config, call, options=options), exact, F64)


def test_what_stands_in_padding_does_not_show():
    with default_dtype(F64):
        model = Bert(BERT_CONFIG).eval()
    call = batch(BERT_CONFIG, pad="right")
    ids, mask = call["input_ids"], call["attention_mask"]
    seen = mask.bool()
    hidden = model(ids, attention_mask=mask).last_hidden_state
    assert torch.equal(model(ids + (1 - mask) * 50, attention_mask=mask).last_hidden_state[seen], hidden[seen])
    assert not torch.equal(model(ids + (1 - mask) * 50).last_hidden_state[seen], hidden[seen])
    for i, n in enumerate(mask.sum(1).tolist()):
        alone = model(ids[i : i + 1, :n])
        torch.testing.assert_close(alone.last_hidden_state[0], hidden[i, :n], rtol=1e-12, atol=1e-12)


def test_pooler_or_head():
    body, head = Bert(BERT_CONFIG), Bert(BERT_CONFIG, masked_lm=True)
    assert body.pooler is not None and body.head is None
    assert (
        head.pooler is None and head.head is not None
    )  # which has no use for a pooler: DDP would wait for its gradient
    shared = body.state_dict().keys() - {"pooler.weight", "pooler.bias"}
    assert_equal({k: head.state_dict()[k] for k in shared}, {k: body.state_dict()[k] for k in shared})
    call = batch(BERT_CONFIG)
    loss = head(**call).loss
    loss.backward()
    assert all(p.grad is not None for p in head.parameters())
    out = head.eval()(call["input_ids"])
    assert out.logits.shape == (3, 7, 97) and out.loss is None and head(**call).logits is None
    bare = Bert(BERT_CONFIG, pooler=False)(call["input_ids"])
    assert bare.pooler_output is None and bare.last_hidden_state.shape == (3, 7, 48)


def calls(**changes):
    return lambda model, call: model(**(call | {k: f(call["input_ids"]) for k, f in changes.items()}))


ERRORS = {
    "labels": (
        calls(labels=lambda ids: ids),
        r"Bert: labels and return_logits need the masked-LM head; make the model with masked_lm=True",
    ),
    "types": (calls(token_type_ids=lambda ids: ids * 0 + 2), r"Bert: token_type_ids must lie in 0 to 1, got \[2\]"),
    "shape of types": (calls(token_type_ids=lambda ids: ids[:1]), r"Bert: token_type_ids must be int64 \(3, 7\)"),
    "positions": (calls(position_ids=lambda ids: ids * 0 + 32), r"Bert: position_ids must lie in 0 to 31, got \[32\]"),
    "ids": (calls(input_ids=lambda ids: ids + 97), r"Bert: input_ids must lie in 0 to 96"),
    "packed": (calls(max_seqlen=lambda ids: 7), r"Bert: packed sequences .* not built"),
    "length": (
        calls(input_ids=lambda ids: ids.repeat(1, 5)),
        r"Bert: 35 positions are more than the model's max_positions=32",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_named(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call(Bert(BERT_CONFIG), dict(input_ids=batch(BERT_CONFIG)["input_ids"]))
