"""Where a sequence ends, and what the caller hears meanwhile: transformers' objects, on one rank and on several."""

import re

import pytest
import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

from tests.common import make_tp
from tests.models.common import GPT_CONFIG
from tests.models.generation.test_generate import prompts
from tests.models.tokenizers import byte_level
from tpfuse.models import GPT

transformers.utils.logging.disable_progress_bar()
IDS, MASK = prompts((8, 5, 1))
NEW = 9


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A model whose vocabulary is that of a byte-level tokenizer, and its directory."""
    torch.manual_seed(5)
    tokenizer = byte_level()
    sizes = dict(vocab_size=len(tokenizer), n_positions=32, n_embd=48, n_layer=2, n_head=12, initializer_range=0.3)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    path = tmp_path_factory.mktemp("words")
    model.save_pretrained(path)
    return model, tokenizer, str(path)


class Every(StoppingCriteria):
    """Ends a sequence at a token of an odd id, from a column on."""

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None
        return (input_ids[:, -1] % 2 == 1) & (input_ids.shape[1] > 9)


def continued(world, path, options):
    model = GPT.from_pretrained(path, tp=make_tp(world))
    return model.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, **options)


def endings(model, tokenizer):
    """Options that end the sequences at different columns."""
    free = model.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[:, 8:]
    pieces = [tokenizer.decode([row[2], row[3]]) for row in free[:2].tolist()]
    eos = int(free[2, 4])
    return {
        "strings": dict(stop_strings=pieces, tokenizer=tokenizer),
        "strings and eos": dict(stop_strings=pieces[0], tokenizer=tokenizer, eos_token_id=eos, pad_token_id=0),
        "criteria": dict(stopping_criteria=StoppingCriteriaList([Every()])),
        "criteria and eos": dict(stopping_criteria=[Every(), MaxLengthCriteria(14)], eos_token_id=eos, pad_token_id=1),
    }


@pytest.mark.parametrize("R", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_sequences_end_where_those_of_transformers_do(ranks, theirs, R):
    model, tokenizer, path = theirs
    lengths = set()
    for name, options in endings(model, tokenizer).items():
        want = model.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, **options)
        for got in ranks(R, continued, path, options):
            assert torch.equal(got[:, 8:], want[:, 8:]), name
        lengths.add(want.shape[1])
    assert len(lengths) > 1 and min(lengths) < 8 + NEW


def clocked(world):
    """A criterion of the last rank alone says it is time."""
    model, calls = GPT(GPT_CONFIG, tp=make_tp(world)), []
    late = lambda ids, scores: calls.append(0) or (world.rank == world.size - 1 and len(calls) == 3)
    return model.generate(IDS, max_new_tokens=NEW, stopping_criteria=late)


def test_a_criterion_of_one_rank_is_one_of_all(ranks):
    assert [tuple(out.shape) for out in ranks(2, clocked)] == [(3, 11)] * 2


# ---- streamers ----


class Heard:
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended += 1


def heard(world, options):
    """On the first rank alone."""
    streamer = Heard() if world.rank == 0 else None
    out = GPT(GPT_CONFIG, tp=make_tp(world)).generate(IDS, attention_mask=MASK, streamer=streamer, **options)
    return out, streamer and (streamer.values, streamer.ended)


@pytest.mark.parametrize("R", [1, 2])
def test_a_streamer_hears_the_prompt_and_every_column(ranks, R):
    for options in (dict(max_new_tokens=4), dict(max_new_tokens=3, do_sample=True, num_return_sequences=2)):
        (out, said), *others = ranks(R, heard, options)
        values, ended = said
        assert ended == 1 and all(v.device.type == "cpu" for v in values)
        assert torch.equal(values[0], out[:, :8]) and torch.equal(torch.stack(values[1:], 1), out[:, 8:])
        assert all(torch.equal(other, out) and none is None for other, none in others)


def test_those_of_transformers(theirs, capsys):
    model, tokenizer, path = theirs
    ours, call = GPT.from_pretrained(path), dict(max_new_tokens=NEW, do_sample=False)
    texts = []
    for each in (ours, model):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        out = each.generate(IDS[:1], streamer=streamer, **call)
        each.generate(IDS[:1], streamer=TextStreamer(tokenizer), **call)
        texts.append((out.tolist(), "".join(streamer), capsys.readouterr().out))
    assert texts[0] == texts[1] and len(texts[0][1]) > 3


def failing(world, what):
    def fails(*given):
        if world.rank == world.size - 1:
            raise KeyError("the listener")
        return given[1] if what == "logits_processor" else False

    streamer = Heard()
    streamer.put = fails
    given, beams = streamer if what == "streamer" else fails, {}
    if what == "beams":
        what, beams = "logits_processor", dict(num_beams=2, pad_token_id=0)
    try:
        GPT(GPT_CONFIG, tp=make_tp(world)).generate(IDS, max_new_tokens=3, **{what: given}, **beams)
    except (KeyError, RuntimeError) as error:
        torch.distributed.barrier()
        return str(error)


@pytest.mark.parametrize("what", ["streamer", "on_token", "stopping_criteria", "logits_processor", "beams"])
def test_an_error_of_one_rank_is_an_error_of_all(ranks, what):
    first, last = ranks(2, failing, what)
    assert "the listener" in first and "the listener" in last


# ---- what is refused ----

TWO = torch.ones(2, 3, dtype=torch.int64)
ERRORS = {
    "streamer": (dict(streamer=print), r"generate: streamer must have put\(tokens\) and end\(\)"),
    "on_token": (dict(on_token=3), r"generate: on_token must be callable"),
    "no tokenizer": (dict(stop_strings="a"), r"generate: stop_strings needs tokenizer="),
    "no string": (dict(stop_strings=[], tokenizer=print), r"generate: stop_strings must be a string or a list of"),
    "empty string": (
        dict(stop_strings=["a", ""], tokenizer=print),
        r"generate: stop_strings must .*none of them empty",
    ),
    "criteria": (dict(stopping_criteria=[3]), r"generate: stopping_criteria must be callables"),
    "criterion": (
        dict(stopping_criteria=lambda i, s: i),
        r"generate: stopping_criteria must return a bool, or bools \[",
    ),
    "processors": (dict(logits_processor=7), r"generate: logits_processor must be callables"),
    "processor": (dict(logits_processor=lambda i, s: i), r"generate: a logits_processor must return scores \(2, 97\)"),
    "min_p": (dict(min_p=1.5), r"generate: min_p must lie in \[0, 1\], got 1.5"),
    "seed": (dict(seed=None), r"generate: seed must be an integer, got None"),
    "sequences": (dict(num_return_sequences=0), r"generate: num_return_sequences must lie in 1 to 65535, got 0"),
    "greedy": (dict(num_return_sequences=2), r"generate: num_return_sequences=2 is more than num_beams=1"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    options, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        GPT(GPT_CONFIG).generate(TWO, max_new_tokens=2, **options)


def refused_on_one_rank(world, options):
    model = GPT(GPT_CONFIG, tp=make_tp(world))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        model.generate(TWO, max_new_tokens=2, **options if world.rank else {})
    torch.distributed.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(streamer=3), "generate: streamer must have"),
        (dict(generation_config=50), "generate: generation_config must be .* or a mapping, got 50"),
        (dict(token_healing=True), "generate: token_healing is not built"),
        (dict(inputs_embeds=TWO), "generate: inputs_embeds is not built"),
    ],
)
def test_what_one_rank_is_refused_is_an_error_of_all(ranks, options, message):
    assert all(re.search(message, error) for error in ranks(2, refused_on_one_rank, options))
