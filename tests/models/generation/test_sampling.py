"""Sampled generation: the same tokens however the model is split, transformers' filters, and the distribution it
claims."""

import pytest
import torch
import transformers
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.common import make_tp
from tests.models.common import GPT_CONFIG, default_dtype
from tests.models.families.test_llama_like import config_of
from tests.models.generation.test_generate import prompts
from tpfuse.kernels.runtime.philox import make_rng, philox_numpy, uniform, uniform_of
from tpfuse.models import GPT
from tpfuse.models.generation.sampling import Chooser, Noise, Sampling, keep_likely

transformers.utils.logging.disable_progress_bar()
CONFIGS = {"gpt2": GPT_CONFIG, **{name: config_of(name, 2) for name in ("llama", "mistral", "qwen2", "qwen3")}}
CONFIGS |= {name: config_of(name, 2) for name in ("gpt_neox", "phi3", "starcoder2", "gemma2", "gemma3", "olmo2")}
OPTIONS = dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.3)


def sampled(world, name, lengths, sp, seed=4):
    with default_dtype(torch.float32):
        model = GPT(CONFIGS[name], tp=None if world is None else make_tp(world, sp), seed=1)
    ids, mask = prompts(lengths)
    return model.generate(ids, attention_mask=mask, max_new_tokens=9, seed=seed, **OPTIONS)[:, 8:]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gpt2", "qwen3"))) for name in CONFIGS]
)
def test_the_split_does_not_show(ranks, reached, name):
    one = sampled(None, name, (8, 5, 1), False)
    assert len(one.unique()) > 5
    for R, sp in ((2, True), (4, True), (4, False)):
        for got in ranks(R, sampled, name, (8, 5, 1), sp):
            assert torch.equal(got, one)
        reached(CONFIGS[name], R, {"sampled tokens": 0.0})


def test_the_seed_the_place_and_the_prompt_matter_and_nothing_else_does():
    one = sampled(None, "gpt2", (8, 5), False)
    assert not torch.equal(sampled(None, "gpt2", (8, 5), False, seed=5), one)
    assert torch.equal(sampled(None, "gpt2", (8, 5), False), one)
    assert torch.equal(sampled(None, "gpt2", (8, 5, 3), False)[:2], one)  # the batch does not matter
    ids, mask = prompts((5, 5))
    ids[1] = ids[0]
    model = GPT(GPT_CONFIG, seed=1)
    two = model.generate(ids, attention_mask=mask, max_new_tokens=9, **OPTIONS)
    assert not torch.equal(two[0], two[1])  # equal prompts are different samples


def test_uniform_numbers_are_the_format():
    rng = make_rng(seed=1, step=0, first_sample=3)
    got = uniform(rng, torch.tensor([5, 9]), torch.tensor([0, 4]), 97)
    k0, k1 = 0xF422B57B, 0x780E92B0  # the golden key of this seed and step
    for i, (place, sample) in enumerate(((5, 3), (9, 7))):
        for token in (0, 1, 2, 3, 4, 50, 96):
            word = philox_numpy((place, 65535 << 16, token // 4, sample), (k0, k1))[token % 4]
            assert got[i, token] == (float(word) + 0.5) / 2**32
    row, token, draw = torch.tensor([0, 1, 1, 1]), torch.tensor([3, 0, 50, 96]), torch.tensor([0, 0, 0, 0])
    where = torch.tensor([5, 9])[row], torch.tensor([0, 4])[row], token
    assert torch.equal(uniform_of(rng, *where, draw=draw), got[row, token])
    draw = torch.tensor([0, 0, 2, 0])
    other = uniform(rng, torch.tensor([9]), torch.tensor([4]), 97, draw=torch.tensor([2]))
    assert uniform_of(rng, *where, draw=draw)[2] == other[0, 50] != got[1, 50]


@pytest.mark.parametrize("count", [3, 40])
def test_what_may_not_be_drawn_needs_no_number(count):
    """Few of a vocabulary or most of it: the scores that may be chosen have the same noise."""
    scores = torch.randn(4, 97)
    likely = scores.masked_fill(scores < scores.topk(count).values[:, -1:], -torch.inf)
    likely[2, 5] = torch.nan
    noise, position = Noise(3, torch.zeros(4, 1)), torch.tensor([7, 7, 8, 2])
    whole, some = noise.added(scores, position), noise.added(likely, position)
    is_likely = likely.isfinite()
    torch.testing.assert_close(some[is_likely], whole[is_likely], rtol=1e-14, atol=0)
    assert (
        some[2, 5].isnan() and (some[~is_likely & ~likely.isnan()] == -torch.inf).all() and some.dtype == torch.float64
    )


def test_the_frequencies_are_the_probabilities():
    """20000 draws of 7 tokens at temperature 2: within four standard deviations."""
    model = GPT(GPT_CONFIG, seed=1)
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 3.0, -4.0]])
    n = 20000
    model.config = type("Config", (), dict(vocab_size=7))
    ids, mask = torch.zeros(n, 1, dtype=torch.int64), torch.zeros(n, 1, dtype=torch.bool)
    choose = Chooser(model, ids, mask, Sampling(do_sample=True, temperature=2.0))
    counts = torch.bincount(choose(logits.expand(n, -1), torch.full((n,), 3)), minlength=7)
    p = torch.softmax(logits[0] / 2, -1)
    assert ((counts - n * p).abs() < 4 * (n * p * (1 - p)).sqrt()).all()


@pytest.mark.parametrize("top_k, top_p", [(5, None), (None, 0.7), (10, 0.5), (1, 0.01), (500, 1.0), (None, 1e-9)])
def test_filters_keep_what_those_of_transformers_keep(top_k, top_p):
    scores = torch.randn(6, 97, dtype=torch.float64) * 3
    want = scores
    if top_k is not None:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p is not None and top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    assert torch.equal(keep_likely(scores, top_k, top_p), want)


def test_where_nothing_may_be_drawn_nothing_stays():
    scores = torch.full((2, 97), -torch.inf)
    assert torch.equal(keep_likely(scores, None, 0.9), scores)


def test_the_penalty_is_that_of_transformers():
    ids, logits = torch.tensor([[3, 5, 7], [9, 9, 11]]), torch.randn(2, 97)
    logits[:, [3, 9]] = 4.0  # the most likely were there before
    want = RepetitionPenaltyLogitsProcessor(3.0)(ids, logits).argmax(-1)
    seen = torch.ones_like(ids, dtype=torch.bool)
    choose = Chooser(GPT(GPT_CONFIG), ids, seen, Sampling(repetition_penalty=3.0))
    assert torch.equal(choose(logits, torch.tensor([3, 3])), want) and not torch.equal(want, logits.argmax(-1))
    again = RepetitionPenaltyLogitsProcessor(3.0)(torch.cat([ids, want[:, None]], 1), logits).argmax(-1)
    assert torch.equal(choose(logits, torch.tensor([4, 4])), again)  # what it chose itself counts too


def test_every_column_is_streamed_and_true_stops():
    model, (ids, mask) = GPT(GPT_CONFIG, seed=1), prompts((8, 5))
    columns = []
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, on_token=lambda t: columns.append(t) or len(columns) == 4
    )
    assert out.shape == (2, 12) and torch.equal(torch.stack(columns, 1), out[:, 8:])


def test_any_of_several_ends():
    model, (ids, mask) = GPT(GPT_CONFIG, seed=1), prompts((8,))
    options = dict(max_new_tokens=9, attention_mask=mask, do_sample=True)
    whole = model.generate(ids, **options)[0, 8:]
    first = next(i for i, t in enumerate(whole) if t != whole[0])
    out = model.generate(ids, **options, eos_token_id=[int(whole[first]), 1000])
    assert out.shape[1] == 8 + first + 1


@pytest.mark.parametrize(
    "option, value",
    [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("repetition_penalty", 0.0)],
)
def test_errors(option, value):
    with pytest.raises(ValueError, match=f"generate: {option} must .*, got {value}"):
        GPT(GPT_CONFIG).generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2, **{option: value})


def test_a_temperature_of_0_is_greedy_and_no_sampling():
    model, ids = GPT(GPT_CONFIG), torch.ones(1, 3, dtype=torch.int64)
    want = model.generate(ids, max_new_tokens=4)
    assert torch.equal(model.generate(ids, max_new_tokens=4, temperature=0.0, do_sample=False), want)
    with pytest.raises(ValueError, match="generate: temperature must .*, got 0.0"):
        model.generate(ids, max_new_tokens=4, temperature=0.0, do_sample=True)


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_that_of_transformers_keeps(min_p):
    scores = torch.randn(6, 97, dtype=torch.float64) * 3
    want = MinPLogitsWarper(min_p)(None, TopKLogitsWarper(30)(None, scores))
    assert torch.equal(keep_likely(scores, 30, None, min_p), want) and (min_p == 0) == torch.equal(
        want, TopKLogitsWarper(30)(None, scores)
    )


# ---- processors, and several sequences of a prompt ----


class Longing:
    """Wants the id that is the number of columns, and the last token again; keeps what it was given."""

    def __init__(self):
        self.given = []

    def __call__(self, ids, scores):
        self.given.append((ids.clone(), scores.dtype))
        scores = scores.clone()
        scores[:, ids.shape[1]] += 2
        return scores.scatter_add(1, ids[:, -1:], torch.full((len(ids), 1), 1.5, dtype=scores.dtype))


def processed(world, options):
    model = GPT(GPT_CONFIG, tp=None if world is None else make_tp(world), seed=1)
    ids, mask = prompts((8, 5, 1))
    return model.generate(ids, attention_mask=mask, max_new_tokens=6, **options)


def test_processors_are_those_of_transformers(ranks, tmp_path):
    """Greedily, behind the penalty, one after the other."""
    torch.manual_seed(3)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=2, n_head=12, initializer_range=0.3)
    ).eval()
    theirs.save_pretrained(tmp_path)
    ids, mask = prompts((8, 5, 1))
    for options in (dict(), dict(repetition_penalty=1.5)):
        made = lambda: LogitsProcessorList([Longing(), NoRepeatNGramLogitsProcessor(2)])  # noqa: B023
        call = dict(attention_mask=mask, max_new_tokens=9, pad_token_id=0, **options)
        want = theirs.generate(ids, do_sample=False, logits_processor=made(), **call)[:, 8:]
        plain = theirs.generate(ids, do_sample=False, **call)[:, 8:]
        got = GPT.from_pretrained(tmp_path).generate(ids, logits_processor=made(), **call)[:, 8:]
        assert torch.equal(got, want) and not torch.equal(want, plain)
    longing = Longing()
    out = GPT.from_pretrained(tmp_path).generate(ids, logits_processor=longing, **call)
    assert all(torch.equal(given, out[:, : 8 + i]) for i, (given, _) in enumerate(longing.given))
    assert {dtype for _, dtype in longing.given} == {torch.float32} and len(longing.given) == 9


FEATURES = {
    "processed": dict(logits_processor=[Longing()]),
    "drawn": dict(logits_processor=Longing(), **OPTIONS, min_p=0.01, seed=4),
    "several": dict(num_return_sequences=3, **OPTIONS, seed=4),
}


@pytest.mark.parametrize("R", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FEATURES)
def test_the_split_shows_in_no_feature(ranks, name, R):
    one = processed(None, FEATURES[name])
    assert all(torch.equal(got, one) for got in ranks(R, processed, FEATURES[name]))


def test_a_prompts_sequences_depend_on_nothing_else():
    model, (ids, mask) = GPT(GPT_CONFIG, seed=1), prompts((8, 5))
    made = lambda n, rows=2: model.generate(
        ids[:rows], attention_mask=mask[:rows], max_new_tokens=9, num_return_sequences=n, **OPTIONS
    )
    one, three, five = made(1), made(3), made(5)
    assert three.shape == (6, 17) and torch.equal(three[::3], one)  # the first of each is what it was alone
    assert torch.equal(five.view(2, 5, 17)[:, :3], three.view(2, 3, 17))
    assert torch.equal(made(3, rows=1), three[:3])
    assert len({tuple(row.tolist()) for row in five}) == 10


def rival(world):
    """Processors that want different tokens on every rank."""
    wants = lambda ids, scores: scores + 100 * (torch.arange(97) == 7 + world.rank)
    return processed(world, dict(logits_processor=wants))


def test_the_first_ranks_processors_count(ranks):
    for out in ranks(2, rival):
        assert (out[:, 8:] == 7).all()


def nothing_left(world, spoilt, options):
    """-> what is said where the processor of the rank ``spoilt`` (-1: of every rank) leaves no token to draw."""
    spoils = spoilt in (world.rank, -1)
    leaves = lambda ids, scores: torch.full_like(scores, options["of"]) if spoils else scores
    arguments = dict(do_sample=True, logits_processor=leaves) | {k: v for k, v in options.items() if k != "of"}
    try:
        return processed(world, arguments)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("of", [-torch.inf, torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("more", [{}, dict(top_p=0.9), dict(num_beams=2)], ids=["plain", "top_p", "beams"])
def test_nothing_is_drawn_where_nothing_is_left(ranks, of, more):
    """An error on every rank, where it is the first one's processor; another's does not count."""
    for R, spoilt in ((1, 0), (2, 0)):
        said = ranks(R, nothing_left, spoilt, dict(of=of) | more)
        assert all("generate: no token can be drawn: behind processors" in text for text in said)
    first, second = ranks(2, nothing_left, 1, dict(of=of) | more)
    assert torch.equal(first, second)


@pytest.mark.parametrize("top_p", [0.9, None])
def test_logits_that_are_nan_are_named(ranks, top_p):
    assert all("the model's logits are NaN" in text for text in ranks(2, of_nan, top_p))


def of_nan(world, top_p):
    model = GPT(GPT_CONFIG, tp=make_tp(world)).eval()
    torch.nn.init.constant_(model.embedding.weight, torch.nan)
    try:
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=True, top_p=top_p)
    except RuntimeError as error:
        return str(error)
