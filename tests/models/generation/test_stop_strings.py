"""Stop strings against transformers' StopStringCriteria: tokens cut them anywhere, in the middle of characters
too."""

import pytest
import torch
from transformers import StopStringCriteria

from tests.models.tokenizers import MADE
from tpfuse.models.generation.stop_strings import StopStrings

STRINGS = {
    "one": ["stop"],
    "several": ["stop", " fox", "e", "ü"],
    "one letter": ["s"],
    "long": ["the quick brown", "é日"],
}


@pytest.fixture(scope="module", params=MADE)
def tokenizer(request):
    return MADE[request.param]()


def sequences(tokenizer, strings):
    """Random tokens of those that the strings are made of and of all others, so that many of them match."""
    g = torch.Generator().manual_seed(0)
    parts = [i for s in strings for i in tokenizer(s + s[1:] + "s", add_special_tokens=False)["input_ids"]]
    likely = torch.tensor(parts)[torch.randint(len(parts), (400, 9), generator=g)]
    any_ = torch.randint(len(tokenizer) + 2, (400, 9), generator=g)  # some beyond the vocabulary
    whole = [tokenizer("a" + s, add_special_tokens=False)["input_ids"][-9:] for s in strings]
    rows = torch.where(torch.rand(400, 9, generator=g) < 0.85, likely, any_)
    for i, ids in enumerate(whole):
        rows[i, 9 - len(ids) :] = torch.tensor(ids)
    return rows


@pytest.mark.parametrize("strings", STRINGS.values(), ids=STRINGS)
def test_what_ends_is_what_transformers_says(tokenizer, strings):
    ids = sequences(tokenizer, strings)
    ours = StopStrings(tokenizer, strings)
    try:
        theirs = StopStringCriteria(tokenizer, strings)
    except ValueError:  # no token of the vocabulary could end one of them
        assert not any(ours(ids))
        return
    for length in (1, 2, 5, 9):
        want = theirs(ids[:, :length], None).tolist()
        assert ours(ids[:, :length]) == want and (length < 9 or (any(want) and not all(want)))


def test_the_examples(tokenizer):
    if "▁st" not in tokenizer.get_vocab():
        return
    ids = lambda *tokens: torch.tensor([tokenizer.convert_tokens_to_ids(list(tokens))])
    stop = StopStrings(tokenizer, ["stop"])
    assert [stop(ids(*tokens))[0] for tokens in (("st", "op"), ("▁st", "opper"), ("s", "t", "o", "pper"))] == [True] * 3
    assert [stop(ids(*tokens))[0] for tokens in (("st", "op", "s"), ("op", "st"), ("op",))] == [False] * 3
