"""transformers' arguments of generate that become its own processors, its outputs and its sampled beams: its tokens and
its scores.

Spans: models/generation/processors.py, outputs.py, and beams.py where beams are sampled.
"""

import functools
import sys

import pytest
import torch
import transformers

from tests.common import error, make_tp
from tests.models.theirs import make
from tpfuse import parallelize
from tpfuse.models import GPT
from tpfuse.models.generation.processors import BORROWED
from tpfuse.models.generation.sampling import Noise

NEW, EOS = 7, 23
SCORES = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
GREEDY = {
    "default length": dict(max_new_tokens=None),
    "max_length": dict(max_new_tokens=None, max_length=12),
    "min_length": dict(min_length=13),
    "min_new_tokens": dict(min_new_tokens=6, repetition_penalty=1.3),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=1),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=1),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.7, repetition_penalty=1.2),
    "sequence_bias": dict(sequence_bias=[[[5], 4.0], [[5, 6], -9.0]], repetition_penalty=1.2),
    "bad_words_ids": dict(bad_words_ids=[[1], [2, 3], [EOS]]),
    "suppress": dict(suppress_tokens=[4, 9, 60], begin_suppress_tokens=[7, EOS]),
    "forced": dict(forced_eos_token_id=EOS, remove_invalid_values=True, renormalize_logits=True),
    "exponential_decay": dict(exponential_decay_length_penalty=(2, 1.4)),
    "prefix": dict(prefix_allowed_tokens_fn=lambda row, ids: [5 + row, 6, 7 + len(ids)]),
    "forced begin": dict(forced_bos_token_id=3),
    "max_time": dict(max_time=1000.0),
    "beams": dict(num_beams=3, num_return_sequences=2, no_repeat_ngram_size=2, min_new_tokens=3),
    "beams, prefix": dict(num_beams=2, prefix_allowed_tokens_fn=lambda row, ids: [5 + row, 6, 7 + len(ids), EOS]),
}
SAMPLED = {
    "all": dict(top_k=0),
    "typical_p": dict(typical_p=0.6, temperature=1.4),
    "cutoffs": dict(epsilon_cutoff=0.02, eta_cutoff=0.01, top_p=0.95),
    "top_h": dict(top_h=0.4, min_p=0.01),
    "several": dict(num_return_sequences=3, top_k=9, min_new_tokens=4),
    "beams": dict(num_beams=3, num_return_sequences=2, temperature=1.3),
    "beams, filtered": dict(num_beams=2, top_k=3, top_p=0.5, early_stopping=True),
}
EVERYDAY = "default length", "min_new_tokens", "sequence_bias", "beams", "typical_p", "beams, filtered"
spread = lambda cases: [pytest.param(n, marks=[pytest.mark.slow] * (n not in EVERYDAY)) for n in cases]


def prompts():
    ids = torch.randint(5, 97, (2, 6), generator=torch.Generator().manual_seed(4))
    ids[1, :2] = 0
    return dict(input_ids=ids, attention_mask=(ids != 0).long())


def call_of(options, **more):
    return prompts() | dict(max_new_tokens=NEW, eos_token_id=EOS, pad_token_id=0, do_sample=False) | options | more


def fields(out):
    """What both have, as tensors."""
    steps = {key: torch.stack(out[key]).float() for key in ("scores", "logits")}
    beams = {key: out[key].double() for key in ("sequences_scores", "beam_indices") if out.get(key) is not None}
    return dict(sequences=out.sequences) | steps | beams


def assert_same(got, want):
    assert got.keys() == want.keys() and torch.equal(got["sequences"], want["sequences"])
    for key, value in want.items():
        finite = value.isfinite()
        assert torch.equal(got[key].isfinite(), finite), key
        assert error(got[key][finite], value[finite]) < 1e-5, key


def by_ours(world, options):
    model = parallelize(make("llama", torch.float32), None if world is None else make_tp(world))
    return fields(model.generate(**call_of(options, **SCORES)))


@functools.cache
def plain():
    return make("llama", torch.float32).generate(**call_of({}, **SCORES))


@pytest.mark.parametrize("name", spread(GREEDY))
def test_greedy_tokens_and_scores_are_those_of_transformers(name):
    want = make("llama", torch.float32).generate(**call_of(GREEDY[name], **SCORES))
    assert_same(by_ours(None, GREEDY[name]), fields(want))
    same = torch.equal(want.sequences, plain().sequences) and torch.equal(want.scores[-1], plain().scores[-1])
    assert same == (name in ("forced begin", "max_time"))  # which change nothing here


def test_every_option_has_a_case():
    tried = {key for options in (*GREEDY.values(), *SAMPLED.values()) for key in options}
    assert BORROWED <= tried


def noisy(monkeypatch, options):
    """Lets transformers draw by the Philox noise of ours: the highest with Gumbel noise, of one row or of all beams."""
    calls, inputs = iter(range(1, 99)), prompts()
    noise, last = Noise(5, inputs["input_ids"]), inputs["attention_mask"].sum(1) - 1
    noise.repeat(options.get("num_beams", options.get("num_return_sequences", 1)))

    def multinomial(probs, num_samples):
        wide = probs.double().log().view(len(noise.sample), -1)
        drawn = noise.added(wide, last.repeat_interleave(len(wide) // 2) + next(calls))
        return drawn.view(len(probs), -1).topk(num_samples).indices

    monkeypatch.setattr(torch, "multinomial", multinomial)


@pytest.mark.parametrize("name", spread(SAMPLED))
def test_sampled_tokens_and_scores_are_those_of_transformers(monkeypatch, name):
    options = SAMPLED[name] | dict(do_sample=True)
    got = by_ours(None, options | dict(seed=5))
    noisy(monkeypatch, options)
    assert_same(got, fields(make("llama", torch.float32).generate(**call_of(options, **SCORES))))


def test_ranks_give_the_same(ranks):
    for options in (GREEDY["beams"], SAMPLED["beams, filtered"] | dict(do_sample=True)):
        want = by_ours(None, options)
        for got in ranks(2, by_ours, options):
            assert_same(got, want)


def test_gpt_takes_the_same_by_itself(tmp_path):
    theirs = make("llama", torch.float32)
    theirs.save_pretrained(tmp_path)
    config = transformers.GenerationConfig(no_repeat_ngram_size=2, max_length=14, eos_token_id=EOS, pad_token_id=0)
    want = theirs.generate(**prompts(), generation_config=config, do_sample=False)
    model = GPT.from_pretrained(tmp_path)
    assert torch.equal(model.generate(**prompts(), generation_config=config), want)
    assert torch.equal(model.generate(**prompts(), generation_config=config.to_dict(), do_sample=False), want)
    assert model.generate(prompts()["input_ids"][:1]).shape == (1, 26)
    with pytest.raises(ValueError, match="max_length=6 counts the prompt too, which has 6 tokens"):
        model.generate(**prompts(), max_length=6)
    with pytest.raises(ValueError, match="return_dict_in_generate or return_log_probs"):
        model.generate(**prompts(), return_dict_in_generate=True, return_log_probs=True)


def test_transition_scores_can_be_computed():
    """transformers' own function reads the outputs."""
    model = make("llama", torch.float32)
    for options in (GREEDY["beams"], {}):
        want = model.generate(**call_of(options, **SCORES))
        scores = lambda out: model.compute_transition_scores(
            out.sequences, out.scores, out.get("beam_indices"), normalize_logits=True
        )
        got = parallelize(make("llama", torch.float32)).generate(**call_of(options, **SCORES))
        assert error(scores(got).nan_to_num(neginf=0), scores(want).nan_to_num(neginf=0)) < 1e-5


@pytest.mark.parametrize("options", [dict(min_new_tokens=2, eos_token_id=EOS), dict(return_dict_in_generate=True)])
def test_without_transformers_the_argument_is_named(monkeypatch, options):
    model = parallelize(make("llama", torch.float32)).parallel
    monkeypatch.setitem(sys.modules, "transformers.generation", None)
    with pytest.raises(ImportError, match=f"generate: {next(iter(options))} is made by transformers' .*pip install"):
        model.generate(**prompts(), max_new_tokens=2, **options)
    assert model.generate(**prompts(), max_new_tokens=2, no_repeat_ngram_size=0).shape == (2, 8)
