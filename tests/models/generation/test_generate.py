"""Greedy generation: transformers' tokens at every tensor-parallel size, prompts of any length, the cache against no
cache."""

import importlib
import re
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from tests.common import make_tp
from tests.models.common import GPT_CONFIG, default_dtype
from tests.models.families.test_llama_like import FAMILIES, config_of, oracle, their_config
from tpfuse.models import GPT, GPTConfig

transformers.utils.logging.disable_progress_bar()
NEW = 9
generation = importlib.import_module("tpfuse.models.generation.generate")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=97,
        n_positions=32,
        n_embd=48,
        n_layer=2,
        n_head=12,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).eval()
    path = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(path)
    return model, str(path)


def prompts(lengths, side="left", seq=8):
    """-> ids, mask; the padding is a token like any other"""
    ids = torch.full((len(lengths), seq), 3)
    mask = torch.zeros(len(lengths), seq, dtype=torch.long)
    for i, n in enumerate(lengths):
        where = slice(seq - n, seq) if side == "left" else slice(0, n)
        ids[i, where], mask[i, where] = torch.randint(97, (n,), generator=torch.Generator().manual_seed(i)), 1
    return ids, mask


def continued(world, path, ids, mask, sp=True, **options):
    model = GPT.from_pretrained(path, tp=make_tp(world, sp))
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)


def sample(world, path, ids, mask, sp, options):
    return continued(world, path, ids, mask, sp, **options)


def their_tokens(theirs, ids, mask, **options):
    return theirs.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **{"pad_token_id": 0} | options
    )


LENGTHS = [(8, 5, 1), (3,), (8, 8, 8, 2, 6)]  # a batch of one leaves three of four ranks with padding rows only


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("R, sp", [(1, False), (2, True), (4, True), (4, False)])
def test_the_tokens_are_those_of_transformers(ranks, theirs, reached, R, sp, lengths):
    model, path = theirs
    ids, mask = prompts(lengths)
    want = their_tokens(model, ids, mask)[:, 8:]
    assert len(want.unique()) > 3  # not one token for ever
    for got in ranks(R, sample, path, ids, mask, sp, dict(pad_token_id=0)):
        assert torch.equal(got[:, 8:], want)
        assert torch.equal(
            got[:, :8], torch.where(mask.bool(), ids, 0)
        )  # padded with the pad token, whatever was there
    reached(GPT_CONFIG, R, {"generated tokens": 0.0})


# windows shorter than a prompt, and longer than it but not than what it becomes
# (phi3's longrope goes by the longest prompt of a batch: tests/models/config/test_rotary.py)
LLAMAS = {name: (name, {}) for name in FAMILIES if name != "phi3"} | {
    # Rows of its embedding are large: a tied head would say every token again.
    "gemma2": ("gemma2", dict(tie_word_embeddings=False)),
    "mistral, window 10": ("mistral", dict(sliding_window=10)),
    "qwen3, window 10": ("qwen3", dict(use_sliding_window=True, sliding_window=10, max_window_layers=1)),
}


SLOW = "gpt_neox-serial", "phi3-windowed", "starcoder2", "starcoder2-unbiased", "gemma2", "gemma3", "olmo2"


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LLAMAS])
def llama(request, tmp_path_factory):
    """A model of transformers in fp64, and its directory."""
    name, options = LLAMAS[request.param]
    model, path = oracle(their_config(name, 2, **options)), tmp_path_factory.mktemp(name)
    model.save_pretrained(path)
    return model, str(path)


def continued_in_fp64(world, path, ids, mask, sp):
    model = GPT.from_pretrained(path, tp=make_tp(world, sp), dtype=torch.float64)
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW)[:, -NEW:]


def test_the_tokens_of_the_llama_family(ranks, llama, reached):
    """Each prompt alone and without a cache there, as one batch here; kv heads more than ranks, as many, and fewer."""
    model, path = llama
    ids, mask = prompts((8, 5, 1))
    alone = [
        model.generate(i[None, m.bool()], max_new_tokens=NEW, do_sample=False, use_cache=False)[0, -NEW:]
        for i, m in zip(ids, mask)
    ]
    want = torch.stack(alone)
    assert len(want.unique()) > 3
    for R, sp in ((1, False), (2, False), (4, True)):
        for got in ranks(R, continued_in_fp64, path, ids, mask, sp):
            assert torch.equal(got, want)
        reached(GPTConfig.from_hf(model.config.to_dict()), R, {"generated tokens": 0.0})


def test_prompts_padded_on_the_right_give_the_same(ranks, theirs):
    model, path = theirs
    (left, left_mask), (right, right_mask) = (prompts((8, 5, 1), side) for side in ("left", "right"))
    assert not torch.equal(left, right)
    want = ranks(1, sample, path, left, left_mask, False, {})[0]
    for R in (1, 2):
        assert torch.equal(ranks(R, sample, path, right, right_mask, True, {})[0], want)
    for dtype in (torch.bool, torch.int32):  # bool or any integer, nonzero is seen
        assert torch.equal(ranks(1, sample, path, right, right_mask.to(dtype) * 2, False, {})[0], want)


def test_padding_comes_back_as_it_was_given(theirs):
    """But for numbers that are no tokens, whose embedding is looked up; a pad token is said by its argument."""
    _, path = theirs
    model = GPT.from_pretrained(path)
    ids, mask = prompts((5, 3))
    ids[1, :2] = torch.tensor([7, -100])
    width = ids.shape[1]
    call = lambda **options: model.generate(ids, attention_mask=mask, max_new_tokens=2, **options)[1]
    assert not mask[1, :2].any() and call()[:2].tolist() == [7, 0]
    assert torch.equal(call()[2:width], ids[1, 2:])
    assert call(pad_token_id=3)[:2].tolist() == [3, 3] and torch.equal(call()[width:], call(pad_token_id=3)[width:])


def test_eos_ends_a_sequence_and_padding_follows(ranks, theirs):
    model, path = theirs
    ids, mask = prompts((8, 5, 1))
    free = their_tokens(model, ids, mask)[:, 8:]
    eos = int(free[0, 2])  # the first sequence ends early
    want = their_tokens(model, ids, mask, eos_token_id=eos, pad_token_id=0)[:, 8:]
    assert (want[0] == 0).any() and want.shape[1] > 3
    for R in (1, 2, 4):
        assert torch.equal(
            ranks(R, sample, path, ids, mask, True, dict(eos_token_id=eos, pad_token_id=0))[0][:, 8:], want
        )
    # one sequence alone: all have ended, and generation stops; without a pad token eos is the padding
    alone = ranks(2, sample, path, ids[:1], mask[:1], True, dict(eos_token_id=eos))[0][:, 8:]
    end = int((free[0] == eos).nonzero()[0]) + 1
    assert torch.equal(alone, free[:1, :end])
    out = ranks(2, sample, path, ids, mask, True, dict(eos_token_id=eos, pad_token_id=-1))[
        0
    ]  # a pad token may be no token at all
    assert (free != 0).all() and torch.equal(out[:, 8:], torch.where(want == 0, -1, want))


def tied_logits(world):
    """-> tokens where three words that follow each other always have one logit, and where all words have.

    A GEMM promises no equal bits for equal rows of a weight, so the logits are made equal where the head gives them.
    """
    model = GPT(GPT_CONFIG, tp=make_tp(world)).eval()
    generator, (first, last) = torch.Generator().manual_seed(1), (model.head.first, model.head.last)
    triples = lambda z: torch.randn(33, generator=generator).repeat_interleave(3)[first:last].expand_as(z)
    found = []
    for capped in triples, torch.zeros_like:
        model.head.capped = capped
        found.append(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5)[0, 3:].tolist())
    return found


def test_ties_go_to_the_lowest_id(ranks):
    """At R = 4 ranks hold 25 words each, so that a triple lies on two ranks: 24 25 26, 48 49 50, 75 76 77."""
    generator = torch.Generator().manual_seed(1)
    want = [3 * int(torch.randn(33, generator=generator).argmax()) for _ in range(5)]
    for R in (1, 2, 4):
        assert ranks(R, tied_logits) == [[want, [0] * 5]] * R


def without_cache(world, ids, mask):
    with default_dtype(torch.float64):
        model = GPT(replace(GPT_CONFIG, init_std=0.3), tp=make_tp(world))
    assert model.training  # and stays so; dropout is off all the same
    cached = model.generate(ids, attention_mask=mask, max_new_tokens=NEW)
    assert model.training and model.step == 0
    model.eval()
    for _ in range(NEW):
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:, -1]
        every = [torch.empty(0)] * world.size
        torch.distributed.all_gather_object(every, logits, group=world.group)
        ids = torch.cat([ids, torch.cat(every, 1).argmax(1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return cached[:, -NEW:], ids[:, -NEW:]


@pytest.mark.parametrize("R", [1, 2, 4])
def test_the_cache_gives_what_recomputing_everything_gives(ranks, R):
    for cached, recomputed in ranks(R, without_cache, *prompts((8, 5, 1))):
        assert torch.equal(cached, recomputed) and len(cached.unique()) > 3


def test_generation_takes_no_gradient_and_all_positions():
    model = GPT(GPT_CONFIG)
    out = model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=30)
    assert out.shape == (1, 32) and not out.requires_grad  # the last position of the model is used


def after_inference_mode(world):
    """Generation, and evaluation, under inference_mode; then both outside, and training -> their tokens"""
    model = GPT(replace(config_of("llama", 2), dropout=0.0), tp=make_tp(world))
    ids, mask = prompts((8, 5, 1))

    def tokens():
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), labels=ids)
        model(ids, labels=ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=3)

    with torch.inference_mode():
        first = tokens()
    then = tokens()
    model(ids, labels=ids).loss.backward()
    model(ids, position_ids=(mask.cumsum(1) - 1).clamp(min=0), labels=ids).loss.backward()
    return first, then


@pytest.mark.parametrize("R", [1, 2])
def test_inference_mode_leaves_nothing_behind_that_others_cannot_use(ranks, R):
    """Tables of rotary positions, which backward saves, and the memory that ranks share, which each token writes."""
    for first, then in ranks(R, after_inference_mode):
        assert torch.equal(first, then)


def test_a_model_that_is_frozen_in_part_stays_so():
    """By the modules' own modes, whatever the whole model's is."""
    for training in (True, False):
        model = GPT(GPT_CONFIG).train(training)
        model.blocks[0].train(not training)
        modes = [module.training for module in model.modules()]
        model.generate(two, max_new_tokens=2)
        assert [module.training for module in model.modules()] == modes


two = torch.ones(2, 3, dtype=torch.long)
ERRORS = {
    "too long": (dict(max_new_tokens=30), r"generate: 3 \+ 30 tokens are more than the model's max_positions=32"),
    "none": (dict(max_new_tokens=0), r"generate: max_new_tokens must be at least 1, got 0"),
    "empty": (dict(input_ids=two[:, :0]), r"generate: the prompt is empty"),
    "all padding": (dict(attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]])), r"generate: a prompt has no token"),
    "mask": (dict(attention_mask=two[:1]), r"GPT: attention_mask must be .*\(2, 3\)"),
    "one row": (dict(input_ids=two[0]), r"GPT: input_ids must be int64 \[B, S\], got torch.int64 \(3,\)"),
    "id": (dict(input_ids=two * 97), r"generate: input_ids must lie in 0 to 96, got \[97\]"),
    "id below": (dict(input_ids=-two), r"generate: input_ids must lie in 0 to 96, got \[-1\]"),
}


def refused(world, name):
    with pytest.raises(ValueError) as caught:
        GPT(GPT_CONFIG, tp=make_tp(world)).generate(**dict(input_ids=two, max_new_tokens=2) | ERRORS[name][0])
    torch.distributed.barrier()
    return str(caught.value)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_named_and_the_same_on_every_rank(ranks, name):
    first, second = ranks(2, refused, name)
    assert first == second and re.search(ERRORS[name][1], first), first


@pytest.mark.parametrize("every", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 100))])
def test_whether_all_have_ended_may_be_asked_late(monkeypatch, every):
    """The tokens are those of asking after each, whatever ends them; ``on_token`` is given none that comes too late."""
    model = GPT(replace(GPT_CONFIG, init_std=0.3))
    ids, mask = prompts((8, 5, 1))
    free = model.generate(ids, attention_mask=mask, max_new_tokens=NEW)[:, 8:]
    ends = [[int(token)] for token in free.unique()] + free.t().tolist()

    def continuations(batch, **options):
        call = dict(attention_mask=mask[:batch], max_new_tokens=NEW, pad_token_id=0)
        return [model.generate(ids[:batch], eos_token_id=end, **call, **options) for end in ends]

    want = [continuations(batch) for batch in (1, 3)]
    lengths = {out.shape[1] - 8 for outs in want for out in outs}
    assert {1, NEW} < lengths and len(lengths) > 5  # ended at once, late, and never
    monkeypatch.setattr(generation, "_tokens_between", lambda device: every)
    for batch, outs in zip((1, 3), want):
        for late, out in zip(continuations(batch), outs, strict=True):
            assert torch.equal(late, out)
        columns = []
        told = continuations(batch, on_token=columns.append)
        assert torch.equal(torch.stack(columns), torch.cat([out[:, 8:].t() for out in outs]))
        assert all(torch.equal(late, out) for late, out in zip(told, outs, strict=True))
