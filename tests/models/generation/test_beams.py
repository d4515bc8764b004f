"""Beam search: transformers' sequences, padded prompts, ends in the middle, on one rank and on several."""

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, NoRepeatNGramLogitsProcessor

from tests.common import make_tp
from tests.models.common import GPT_CONFIG
from tests.models.families.test_llama_like import oracle, their_config
from tests.models.generation.test_generate import prompts
from tpfuse.models import GPT

transformers.utils.logging.disable_progress_bar()
NEW = 8


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def theirs(request, tmp_path_factory):
    """A model of transformers, in fp32 and in fp64, and its directory."""
    torch.manual_seed(2)
    sizes = dict(vocab_size=97, n_positions=32, n_embd=48, n_layer=2, n_head=12, initializer_range=0.25)
    if request.param == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    else:
        model = oracle(their_config("llama", 2))
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return model, str(path)


def frequent(model):
    """Tokens that beams come by early and late."""
    ids, mask = prompts((8, 5, 1))
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, num_beams=4, num_return_sequences=4, pad_token_id=1
    )
    new = out[:, 8:]
    return int(new[:, 1].mode().values), int(new[:, 4].mode().values), int(new[:, 6].mode().values)


SEARCHES = {
    "plain": dict(num_beams=3),
    "all": dict(num_beams=4, num_return_sequences=4),
    "short": dict(num_beams=4, num_return_sequences=2, length_penalty=-1.0),
    "long": dict(num_beams=2, length_penalty=2.0),
    "early": dict(num_beams=3, num_return_sequences=3, early_stopping=True),
    "never": dict(num_beams=3, num_return_sequences=2, early_stopping="never", length_penalty=1.5),
    "never, none": dict(num_beams=3, early_stopping="never", length_penalty=0.0),
    "penalty": dict(num_beams=3, num_return_sequences=2, repetition_penalty=1.4),
}


def searched(world, path, calls, dtype):
    model = GPT.from_pretrained(path, tp=make_tp(world), dtype=dtype)
    return [model.generate(**call) for call in calls]


def calls_of(model, names=SEARCHES):
    """Without an end, and with one and several, of one prompt and of several."""
    eos = frequent(model)
    for name in names:
        for lengths, end in (((8, 5, 1), None), ((8, 5, 1), [*eos]), ((8,), eos[1])):
            ids, mask = prompts(lengths)
            call = dict(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=1, **SEARCHES[name])
            yield call | ({} if end is None else dict(eos_token_id=end))


def same(got, want):
    return got.shape == want.shape and torch.equal(got[:, 8:], want[:, 8:])


def test_the_sequences_are_those_of_transformers(theirs):
    model, path = theirs
    calls = list(calls_of(model))
    want = [model.generate(**call, do_sample=False) for call in calls]
    got = [GPT.from_pretrained(path, dtype=model.dtype).generate(**call) for call in calls]
    assert all(map(same, got, want))
    assert any((out[:, -1] == 1).any() for out in want)  # some ended before others
    assert "Llama" in type(model).__name__ or len({out.shape[1] for out in want}) > 3  # at once, late, and never
    plain = GPT.from_pretrained(path, dtype=model.dtype).generate(
        **calls[0] | dict(num_beams=1, num_return_sequences=1)
    )
    assert not torch.equal(plain, got[0])


@pytest.mark.parametrize("R", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_split_finds_the_same(ranks, theirs, R):
    model, path = theirs
    calls = list(calls_of(model, ["all", "penalty"]))
    want = [model.generate(**call, do_sample=False) for call in calls]
    for got in ranks(R, searched, path, calls, model.dtype):
        assert all(map(same, got, want))


def test_processors_and_criteria(theirs):
    model, path = theirs
    ids, mask = prompts((8, 5))
    eos, *_ = frequent(model)
    call = dict(attention_mask=mask, max_new_tokens=NEW, num_beams=3, num_return_sequences=3, eos_token_id=eos)
    call |= dict(pad_token_id=1, logits_processor=[NoRepeatNGramLogitsProcessor(2)])
    call["stopping_criteria"] = [lambda ids, scores, **_: (ids[:, -1] % 5 == 0) & (ids[:, -2] % 2 == 0)]
    want = model.generate(ids, do_sample=False, **call)
    assert same(GPT.from_pretrained(path, dtype=model.dtype).generate(ids, **call), want)
    assert not same(model.generate(ids, do_sample=False, **call | dict(stopping_criteria=[])), want)


@pytest.mark.parametrize("every", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_whether_there_can_be_better_may_be_asked_late(theirs, monkeypatch, every):
    model, path = theirs
    ours, calls = GPT.from_pretrained(path, dtype=model.dtype), list(calls_of(model, ["all", "early", "never"]))
    want = [ours.generate(**call) for call in calls]
    monkeypatch.setattr("tpfuse.models.generation.generate._tokens_between", lambda device: every)
    assert all(map(same, [ours.generate(**call) for call in calls], want))


TWO = torch.ones(2, 3, dtype=torch.int64)
ERRORS = {
    "none": (dict(num_beams=0), "generate: num_beams must be at least 1, got 0"),
    "penalty": (dict(num_beams=2, length_penalty="a"), "generate: length_penalty must be a number, got 'a'"),
    "early": (dict(num_beams=2, early_stopping="soon"), "generate: early_stopping must be True, False or 'never', got"),
    "many": (dict(num_beams=2, num_return_sequences=3), "num_return_sequences=3 is more than num_beams=2"),
    "on_token": (
        dict(num_beams=2, on_token=print),
        "streamer, on_token and on_prompt hear one sequence .* num_beams=2",
    ),
    "padding": (dict(num_beams=2, stopping_criteria=print), "stop_strings and stopping_criteria need pad_token_id or"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    options, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        GPT(GPT_CONFIG).generate(TWO, max_new_tokens=2, **options)
