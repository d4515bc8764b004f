"""Log-probabilities of generated tokens, against transformers' logits, and what follows an end token.

Spans: tpfuse/models/generation/request.py and generate.py.
"""

import copy

import pytest
import torch

from tests.common import make_tp
from tests.models.generation.test_generate import NEW, prompts, theirs  # noqa: F401
from tpfuse import parallelize
from tpfuse.models import GPT


def generated(world, path, ids, mask, options):
    model = GPT.from_pretrained(path, tp=None if world is None else make_tp(world))
    options = dict(max_new_tokens=NEW, return_log_probs=True) | options
    return tuple(model.generate(ids, attention_mask=mask, **options))


def log_probs_of(model, ids, mask, sequences):
    """log softmax of transformers' logits at the new tokens, [B, new]."""
    new = sequences.shape[1] - ids.shape[1]
    whole = torch.cat([mask, torch.ones(len(ids), new, dtype=mask.dtype)], 1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(sequences, attention_mask=whole, position_ids=positions).logits.double()
    chosen = logits.log_softmax(-1)[:, :-1].gather(2, sequences[:, 1:, None])[..., 0]
    return chosen[:, -new:]


@pytest.mark.parametrize("size", [1, 2])
def test_of_the_model_whatever_the_sampling(size, theirs, ranks):  # noqa: F811
    model, path = theirs
    ids, mask = prompts([8, 3, 5])
    for options in ({}, dict(do_sample=True, temperature=0.5, top_k=5, repetition_penalty=1.3, seed=4)):
        results = ranks(size, generated, path, ids, mask, options)
        for sequences, log_probs in results:
            assert log_probs.dtype == torch.float32 and log_probs.shape == (3, NEW)
            torch.testing.assert_close(log_probs.double(), log_probs_of(model, ids, mask, sequences), rtol=0, atol=2e-4)


def test_behind_the_end_they_are_zero(theirs):  # noqa: F811
    """The end token has its own; what follows it is no token."""
    model, path = theirs
    ids, mask = prompts([8, 3, 5])
    free, _ = generated(None, path, ids, mask, {})
    end = int(free[0, ids.shape[1] + 2])
    sequences, log_probs = generated(None, path, ids, mask, dict(eos_token_id=end, pad_token_id=96))
    right = log_probs_of(model, ids, mask, sequences)
    for row, tokens in enumerate(sequences[:, ids.shape[1] :].tolist()):
        length = tokens.index(end) + 1 if end in tokens else len(tokens)
        torch.testing.assert_close(log_probs[row, :length].double(), right[row, :length], rtol=0, atol=2e-4)
        assert log_probs[row, length:].eq(0).all()
    assert log_probs.eq(0).any()


def test_beams_have_none(theirs):  # noqa: F811
    _, path = theirs
    ids, mask = prompts([8])
    with pytest.raises(ValueError, match="return_log_probs is of sampled or greedy tokens, got num_beams=2"):
        generated(None, path, ids, mask, dict(num_beams=2))
    with pytest.raises(ValueError, match="return_log_probs must be True or False"):
        generated(None, path, ids, mask, dict(return_log_probs="yes"))


def test_a_parallelized_module_gives_the_same(theirs):  # noqa: F811
    model, path = theirs
    ids, mask = prompts([8, 3])
    call = dict(attention_mask=mask, max_new_tokens=NEW, return_log_probs=True)
    got = parallelize(copy.deepcopy(model)).generate(ids, **call)
    for ours, want in zip(got, GPT.from_pretrained(path).generate(ids, **call), strict=True):
        assert torch.equal(ours, want)
