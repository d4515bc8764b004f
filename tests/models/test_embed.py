"""Rows in place of tokens, and the hidden states: as transformers has them, at every split."""

import pytest
import torch

from tests.common import error, make_tp
from tests.models import theirs
from tests.models.common import default_dtype
from tpfuse.models import GPT, Bert

SLOW = "llama", "qwen3", "bert-mlm", "gemma2", "olmo2"
NAMES = "gpt2", "bert", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)
IDS = torch.randint(1, 97, (3, 7), generator=torch.Generator().manual_seed(0))
MASKS = {"right": torch.arange(7) < torch.tensor([[7], [5], [3]]), "none": None}


def load(folder, name, tp=None, **options):
    return (Bert if name.startswith("bert") else GPT).from_pretrained(folder, tp=tp, dtype=torch.float64, **options)


def loss_of(states, mask):
    keep = 1.0 if mask is None else mask[..., None].double()
    return sum((state * keep).sin().sum() * (i + 1) for i, state in enumerate(states))


def run(model, embeds, mask):
    """hidden states, and the gradient of what is given."""
    embeds = embeds.clone().requires_grad_()
    given = {} if mask is None else dict(attention_mask=mask.long())
    states = model(inputs_embeds=embeds, output_hidden_states=True, **given).hidden_states
    loss_of(states, mask).backward()
    return [state.detach() for state in states], embeds.grad


def _split(world, folder, name, sp, options, embeds, mask):
    with default_dtype(torch.float64):
        model = load(folder, name, None if world is None else make_tp(world, sp), **options)
    from_ids = model(IDS, output_hidden_states=True).hidden_states
    rows = model.input_embeddings(IDS)
    again = model(inputs_embeds=rows, output_hidden_states=True).hidden_states
    same = all(torch.equal(a, b) for a, b in zip(from_ids, again, strict=True))
    loss_of(again, None).backward()
    return *run(model, embeds, mask), same, rows.shape, model.embedding.weight.grad is not None


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = theirs.make(name)
            model.save_pretrained(folder)
            made[name] = folder, model
        return made[name]

    return of


def check(got, want, mask):
    (states, gradient, same, shape, trained), (their_states, their_gradient) = got, want
    keep = 1.0 if mask is None else mask[..., None].double()
    assert len(states) == len(their_states) and same and shape == gradient.shape and trained
    assert max(error(a * keep, b * keep) for a, b in zip(states, their_states, strict=True)) < 1e-10
    assert error(gradient, their_gradient) < 1e-10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", MASKS)
def test_as_transformers_has_them(oracle, ranks, name, padded):
    (folder, model), mask = oracle(name), MASKS[padded]
    embeds = torch.randn(3, 7, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = run(model, embeds, mask)
    check(_split(None, folder, name, False, {}, embeds, mask), want, mask)
    if padded == "right":
        for options in dict(), dict(recompute="full"):
            for got in ranks(2, _split, folder, name, options == {}, options, embeds, mask):
                check(got, want, mask)


def test_what_is_refused(oracle):
    model, embeds = load(oracle("gpt2")[0], "gpt2"), torch.zeros(3, 7, 48)
    for given, message in (
        ({}, "give input_ids or inputs_embeds, none came"),
        (dict(input_ids=IDS, inputs_embeds=embeds), "give input_ids or inputs_embeds, both came"),
        (dict(inputs_embeds=embeds[..., 1:]), r"inputs_embeds must be floating \[B, S, 48\], got .*\(3, 7, 47\)"),
        (dict(inputs_embeds=IDS), r"inputs_embeds must be floating \[B, S, 48\]"),
        (dict(inputs_embeds=embeds, labels=IDS[:1]), r"labels must be int64 \(3, 7\) as inputs_embeds"),
        (dict(input_ids=IDS, output_hidden_states=2), "output_hidden_states must be True, False or None"),
    ):
        with pytest.raises(ValueError, match=f"GPT: {message}"):
            model(**given)
    with pytest.raises(ValueError, match="generate: inputs_embeds is not built; a prompt is input_ids"):
        model.generate(inputs_embeds=embeds, max_new_tokens=1)
