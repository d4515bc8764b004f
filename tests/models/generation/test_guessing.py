"""Guessed tokens: those of generation without guesses, and of transformers' own assisted generation, in fewer passes.

Spans: models/generation/guessing.py, and what it asks of passes.py, direct.py and generate.py.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from tests.common import make_tp
from tests.models.common import default_dtype
from tests.models.generation.test_direct import CONFIGS, perturbed
from tests.models.theirs import make
from tpfuse import parallelize
from tpfuse.models import GPT, GPTConfig
from tpfuse.models.generation import passes
from tpfuse.models.generation.guessing import Guessing, PromptLookup
from tpfuse.models.generation.request import Length, checked
from tpfuse.models.generation.sampling import Sampling

WORDS, NEW = 19, 30
LOOKUP = dict(prompt_lookup_num_tokens=4)


def chant(name, dtype, near=0.0):
    """A model that soon repeats itself, but not always; or one ``near`` it, which guesses some of its tokens."""
    model = make(
        name, dtype, vocab_size=WORDS, **(dict(tie_word_embeddings=False, n_positions=64) if name == "gpt2" else {})
    )
    with torch.no_grad():
        model.get_input_embeddings().weight *= 4
        torch.manual_seed(5)
        for p in model.parameters():
            p += near * torch.randn_like(p)
    model.generation_config.eos_token_id = None
    model.generation_config.num_assistant_tokens = 3
    model.generation_config.assistant_confidence_threshold = 0.1
    return model


def prompts(rows=1):
    """Of 2 tokens, and of fewer."""
    mask = torch.tensor([[1, 1], [0, 1]])[:rows]
    return dict(input_ids=torch.tensor([[5, 6], [0, 7]])[:rows], attention_mask=mask)


@contextmanager
def passes_counted():
    """The columns of every pass over tokens."""
    columns, run = [], passes.Pass.verify
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes.Pass, "verify", lambda self, ids, at: columns.append(ids.shape[1]) or run(self, ids, at))
        yield columns


def ours(world, name, dtype, near=0.0):
    return parallelize(chant(name, dtype, near), None if world is None else make_tp(world))


# ---- the tokens of transformers ----


def guessed(world, name, dtype, alone):
    """The tokens by prompt lookup, and how many passes they took; by an assistant, ``alone``: another on each rank."""
    model = ours(world, name, dtype)
    small = ours(None, name, dtype, 0.02 * world.rank) if alone else ours(world, name, dtype, 0.02)
    call = prompts() | dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    with passes_counted() as columns:
        looked_up = model.generate(**call, **LOOKUP)
    count = len(columns)
    return looked_up, count, model.generate(**call, assistant_model=small)


@pytest.mark.parametrize("name, dtype", [("llama", torch.float64), ("gpt2", torch.float32)])
@pytest.mark.parametrize("R, alone", [(1, False), (2, False), (2, True)])
def test_greedy_tokens_are_those_of_transformers(ranks, R, alone, name, dtype):
    theirs, small = chant(name, dtype), chant(name, dtype, 0.02)
    small.generation_config.assistant_confidence_threshold = 0.0
    call = prompts() | dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    want = theirs.generate(**call)
    assert torch.equal(theirs.generate(**call, **LOOKUP), want)
    assert torch.equal(theirs.generate(**call, assistant_model=small), want)
    for looked_up, count, assisted in ranks(R, guessed, name, dtype, alone):
        assert torch.equal(looked_up, want) and torch.equal(assisted, want)
        assert count < NEW - 5


def test_lookups_are_those_of_transformers():
    generator = torch.Generator().manual_seed(3)
    model = GPT(GPTConfig(vocab_size=4, max_positions=32, hidden_size=8, num_layers=1, num_heads=1, ffn_size=8))
    for length in (1, 2, 5, 12, 12, 12):
        for size in (1, 2, 3):
            row = torch.randint(4, (1, length), generator=generator)
            request = checked(model, (row, None), Sampling(), 1, Length(9))
            lookup = PromptLookup(Guessing(prompt_lookup_num_tokens=3, max_matching_ngram_size=size), request)
            want, _ = PromptLookupCandidateGenerator(
                num_output_tokens=3, max_matching_ngram_size=size, max_length=length + 9
            ).get_candidates(row)
            got = lookup(row, 9, torch.zeros(1, dtype=torch.bool))
            assert torch.equal(torch.cat([row, got], 1), want)


# ---- what a call gives beside tokens, and every way to choose them, as without guesses ----

CASES = {
    "padded rows": dict(),
    "sampled": dict(do_sample=True, num_return_sequences=2, top_k=5, temperature=0.7, seed=4),
    "log-probabilities": dict(return_log_probs=True, eos_token_id=3, pad_token_id=0),
    "scores": dict(return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.05),
    "processors": dict(no_repeat_ngram_size=6, bad_words_ids=[[2, 3]], min_new_tokens=20, eos_token_id=[3, 9]),
    "sampled, processors": dict(do_sample=True, typical_p=0.7, seed=2, eos_token_id=1),
    "one token": dict(max_new_tokens=1),
    "max_length": dict(max_new_tokens=None, max_length=11),
}


class Heard:
    """A streamer, a processor and a criterion that write down what they get."""

    def __init__(self, ends_at=NEW):
        self.columns, self.prefixes, self.ends_at = [], [], ends_at

    def put(self, ids):
        self.columns.append(ids.tolist())

    def end(self):
        self.columns.append("end")

    def __call__(self, ids, scores):
        self.prefixes.append(ids.tolist())
        return ids.shape[1] >= self.ends_at if scores is None else scores


def of_all_cases(world, name, guesses):
    """What comes of each case, without guesses and with some."""
    model = ours(world, name, torch.float64).parallel
    more = LOOKUP if guesses == "lookup" else dict(assistant_model=ours(world, name, torch.float64, 0.02))
    results, seen = {}, 0
    for case, options in CASES.items():
        call = prompts(2) | dict(max_new_tokens=NEW, do_sample=False) | options
        with passes_counted() as columns:
            results[case] = [_with_ears(model, call), _with_ears(model, call | more)]
        seen = max(seen, *columns, 0)
    assert seen > 2
    return results


def _with_ears(model, call):
    heard = Heard(ends_at=14)
    out = model.generate(**call, streamer=heard, logits_processor=[heard], stopping_criteria=[heard])
    tensors = [out] if isinstance(out, torch.Tensor) else list(out.values() if hasattr(out, "values") else out)
    return [torch.stack(x) if isinstance(x, tuple) else x for x in tensors], heard.columns, heard.prefixes


@pytest.mark.parametrize("guesses", ["lookup", "assistant"])
@pytest.mark.parametrize("R", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_all_is_as_without_guesses(ranks, R, guesses):
    for results in ranks(R, of_all_cases, "llama", guesses):
        for case, ((want, *heard), (got, *heard_by_guesses)) in results.items():
            assert heard == heard_by_guesses, case
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# ---- every kind of layers, and both passes ----


def by_both(world, name, own, length):
    """Tokens and log-probabilities, without guesses and with some."""
    with default_dtype(torch.float64), pytest.MonkeyPatch.context() as patch:
        if not own:
            patch.setattr(passes, "applies", lambda model, ids: False)
        tp = make_tp(world)
        model = perturbed(replace(CONFIGS[name], init_std=0.3), tp, torch.float64)
        ids = torch.randint(97, (2, length), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        call = dict(attention_mask=mask, max_new_tokens=12, return_log_probs=True)
        near = perturbed(replace(CONFIGS[name], init_std=0.3), tp, torch.float64)
        with torch.no_grad():
            near.blocks[1].mlp.fc2.weight *= 0.8
        want = model.generate(ids, **call)
        with passes_counted() as columns:
            got = model.generate(ids, **call, assistant_model=near, **DRAFT)
        assert max(columns) == 6
    return [tuple(want), tuple(got)]


DRAFT = dict(num_assistant_tokens=5, assistant_confidence_threshold=0.0)
KINDS = [("gpt2", 4), ("windows", 9), ("gemma 2", 4), ("gemma 3", 9), ("olmo 2", 4), ("longrope", 9)]


EVERYDAY = {("windows", 9, False, 1), ("longrope", 9, True, 1), ("gemma 2", 4, True, 2)}
LAYERS = [(*kind, own, R) for kind in KINDS for own in (True, False) for R in (1, 2)]


@pytest.mark.parametrize(
    "name, length, own, R", [pytest.param(*case, marks=[pytest.mark.slow] * (case not in EVERYDAY)) for case in LAYERS]
)
def test_every_kind_of_layers(ranks, name, length, own, R):
    for want, got in ranks(R, by_both, name, own, length):
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], rtol=0, atol=1e-11)


# ---- who guesses, and what is refused ----


def test_an_assistant_guesses_until_it_is_unsure():
    """By the call's arguments, then by the generation config of a module, then by transformers' defaults."""
    model, small = ours(None, "llama", torch.float64), ours(None, "llama", torch.float64)
    call = prompts() | dict(max_new_tokens=NEW, assistant_model=small)

    def longest(**options):
        with passes_counted() as columns:
            model.generate(**call, **options)
        return max(columns)

    assert longest() == 4 and longest(num_assistant_tokens=6) == 7
    assert longest(assistant_confidence_threshold=1.0) == 2
    small.generation_config.num_assistant_tokens = model.generation_config.num_assistant_tokens = None
    assert longest(assistant_confidence_threshold=0.0) == 21


def test_beams_guess_nothing():
    model = ours(None, "llama", torch.float64)
    call = prompts() | dict(max_new_tokens=5, num_beams=2, pad_token_id=0)
    with pytest.warns(UserWarning, match="nothing is guessed with num_beams=2"):
        got = model.generate(**call, **LOOKUP)
    assert torch.equal(got, model.generate(**call))


def test_training_goes_on_as_it_was():
    model, small = ours(None, "gpt2", torch.float64), ours(None, "gpt2", torch.float64).parallel
    small.train()
    model.generate(**prompts(), max_new_tokens=3, assistant_model=small)
    assert small.training and not model.training


def test_what_nobody_guesses_by_is_named():
    model = GPT(CONFIGS["llama"])
    short, other = (GPT(replace(CONFIGS["llama"], **change)) for change in (dict(max_positions=8), dict(vocab_size=96)))
    gpt2 = GPT(replace(CONFIGS["gpt2"], max_positions=8))
    ids = torch.ones(1, 4, dtype=torch.int64)
    stretched = {name: GPT(CONFIGS[name]) for name in ("longrope", "dynamic rope")}
    for options, message in (
        (dict(prompt_lookup_num_tokens=0), "prompt_lookup_num_tokens must be at least 1"),
        (LOOKUP | dict(max_matching_ngram_size=0), "max_matching_ngram_size must be at least 1"),
        (LOOKUP | dict(assistant_model=model), "give assistant_model or prompt_lookup_num_tokens, both came"),
        (dict(assistant_model=model, num_assistant_tokens=2.5), "num_assistant_tokens must be"),
        (dict(assistant_model=model, assistant_confidence_threshold=1.5), "threshold must lie in"),
        (
            dict(assistant_model=make("llama")),
            "must be a GPT, or a module that tpfuse.parallelize was given, got a L",
        ),
        (dict(assistant_model=GPT(CONFIGS["llama"], lm_head=False)), "assistant_model has no language-model head"),
        (dict(assistant_model=other), "must have the model's vocabulary of 97 tokens, got 96"),
        (dict(assistant_model=gpt2), "assistant_model has max_positions=8, fewer than the 12 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(ids, max_new_tokens=8, **options)
    with pytest.raises(NotImplementedError, match="num_assistant_tokens_schedule 'constant' is built, got 'heuristic'"):
        model.generate(ids, assistant_model=short, num_assistant_tokens_schedule="heuristic")
    for name, limit in ("longrope", 5), ("dynamic rope", 8):
        with pytest.raises(NotImplementedError, match=f"positions of the model change on the way: past {limit} tokens"):
            stretched[name].generate(ids, max_new_tokens=8, **LOOKUP)
        with pytest.raises(NotImplementedError, match="positions of assistant_model change on the way"):
            model.generate(ids, max_new_tokens=8, assistant_model=stretched[name])
        assert stretched[name].generate(ids, max_new_tokens=limit - 4, **LOOKUP).shape == (1, limit)


def split_over_others(world):
    """An assistant over more ranks than the model, and one on the first rank alone."""
    model, other = GPT(CONFIGS["llama"]), GPT(CONFIGS["llama"], tp=make_tp(world))
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must be split over the model's ranks \[\] or over none, got \[0, 1\]"):
        model.generate(ids, assistant_model=other)
    with pytest.raises(ValueError, match="assistant_model"):
        other.generate(ids, assistant_model=model if world.rank == 0 else None)


def test_an_assistant_is_split_as_the_model_or_not_at_all(ranks):
    ranks(2, split_over_others)
