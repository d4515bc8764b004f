"""Decoders without a head: transformers' files and forward, at every split."""

import pytest
import torch
import transformers

from tests.common import error, make_tp
from tests.models import theirs
from tests.models.test_embeds import IDS
from tpfuse.models import GPT

MORE = "mistral", "qwen2", "qwen3", "gpt_neox", "phi3", "starcoder2", "gemma2", "gemma3", "olmo2"
NAMES = "gpt2", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)
LAST = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm"}  # the last norm, where it is not called norm


def _run(world, folder, sp, saved, given):
    model = GPT.from_pretrained(folder, tp=None if world is None else make_tp(world, sp), dtype=torch.float64, **given)
    assert model.head is None
    out = model(IDS)
    assert out.loss is None and out.logits is None
    out.last_hidden_state.sin().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    if saved is not None:
        model.save_pretrained(saved)
    gain = model.blocks[-1].norm_mlp.weight.grad
    return out.last_hidden_state.detach(), gain


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    made = {}

    def of(name):
        if name not in made:
            base = theirs.make(name).base_model
            base.save_pretrained(folder := tmp_path_factory.mktemp(name))
            made[name] = folder, base
        return made[name]

    return of


@pytest.mark.parametrize("name", NAMES)
def test_as_transformers(files, ranks, tmp_path, name):
    folder, base = files(name)
    given = dict(lm_head=False) if base.config.tie_word_embeddings else {}
    theirs_out = base(IDS).last_hidden_state
    base.zero_grad()
    theirs_out.sin().sum().backward()
    gain = getattr(base, LAST.get(name, "norm")).weight.grad
    saved = tmp_path / "saved"
    for got in (_run(None, folder, False, None, given), *ranks(2, _run, folder, True, saved, given)):
        assert error(got[0], theirs_out.detach()) < 1e-10 and error(got[1], gain) < 1e-10
    again = transformers.AutoModel.from_pretrained(saved, dtype=torch.float64).state_dict()
    assert type(base).__name__ in (saved / "config.json").read_text()
    assert all(torch.equal(again[key], value) for key, value in base.state_dict().items())


def test_a_head_that_is_tied_is_there_whatever_the_class(files):
    assert GPT.from_pretrained(files("gpt2")[0]).head is not None


def test_what_needs_a_head(files):
    model = GPT.from_pretrained(files("gpt2")[0], lm_head=False)
    for call in dict(labels=IDS), dict(return_logits=True):
        with pytest.raises(ValueError, match="GPT: labels and return_logits need the language-model head"):
            model(IDS, **call)
    with pytest.raises(ValueError, match="generate: the model has no language-model head"):
        model.generate(IDS, max_new_tokens=1)
