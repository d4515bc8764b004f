"""GPT: its shapes, its initial weights, its loss, and the decoder without a head."""

from dataclasses import replace

import pytest
import torch
import transformers

from tests.common import assert_close, error, make_tp
from tests.models import theirs
from tests.models.common import BERT_CONFIG, GPT_CONFIG, MORE_SHAPES, SHAPES, batch, default_dtype, narrow, run, whole
from tests.models.test_embed import IDS
from tpfuse.models import GPT, Bert

F64 = torch.float64


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
@pytest.mark.parametrize(
    "vocab, size, seq, tied", SHAPES + [pytest.param(*s, marks=pytest.mark.slow) for s in MORE_SHAPES]
)
def test_sizes_that_do_not_divide(ranks, vocab, size, seq, tied, sp):
    config = narrow(GPT_CONFIG, vocab_size=vocab, tie_embeddings=tied)
    call = batch(config, size, seq, seed=3)
    call["labels"][0, -1] = 5  # something to learn, where a sequence of one leaves GPT nothing
    exact = run(None, GPT, config, call)
    assert_close(ranks(4, run, GPT, config, call, sp)[0], exact, F64)


def test_weights_start_as_transformers_starts_them():
    config = replace(GPT_CONFIG, hidden_size=96, vocab_size=997)
    for name, p in GPT(config).named_parameters():
        residual = name.endswith(("attention.out.weight", "mlp.fc2.weight"))
        if p.dim() > 1 and name.endswith("weight"):
            assert p.std().item() == pytest.approx(0.02 / 2 if residual else 0.02, rel=0.05), name  # 2 layers: sqrt(4)


def normalized(world, labels, normalizer):
    with default_dtype(F64):
        model = GPT(GPT_CONFIG, tp=make_tp(world)).eval()
    ids = batch(GPT_CONFIG)["input_ids"]
    out = model(ids, labels=labels, loss_normalizer=normalizer)
    out.loss.backward()
    return out.loss.item(), model.input_norm.weight.grad


def test_the_loss_is_the_sum_over_valid_labels_over_the_normalizer(ranks):
    labels = batch(GPT_CONFIG)["labels"]
    count = int((labels[:, 1:] != -100).sum())
    assert 0 < count < labels[:, 1:].numel()
    (mean, grad), *_ = ranks(2, normalized, labels, None)
    for normalizer in (7.0, torch.tensor(7)):
        loss, dw = ranks(2, normalized, labels, normalizer)[0]
        assert loss == pytest.approx(mean * count / 7, rel=1e-12)
        torch.testing.assert_close(dw, grad * count / 7, rtol=1e-10, atol=1e-14)
    loss, dw = ranks(2, normalized, torch.full_like(labels, -100), None)[0]
    assert loss == 0 and dw.count_nonzero() == 0


def _loss_alone(world, cls, config, call, saving):
    with default_dtype(torch.float64):
        model = cls(config, tp=make_tp(world, True), saving=saving, **({"masked_lm": True} if cls is Bert else {}))
    out = model.train()(**call, step=1, first_sample=0)
    assert out.logits is None
    out.loss.backward()
    return dict(loss=out.loss.detach()) | whole(model, grad=True)


@pytest.mark.parametrize("cls, config", [(GPT, GPT_CONFIG), (Bert, BERT_CONFIG)], ids=["gpt", "bert"])
@pytest.mark.parametrize("R", [1, 4])
def test_the_loss_without_logits_is_the_same(ranks, cls, config, R):
    """The smallest mode makes them in chunks, twice; the fastest keeps them."""
    kept, made = (ranks(R, _loss_alone, cls, config, batch(config), saving) for saving in ("fastest", "smallest"))
    for a, b in zip(made, kept, strict=True):
        assert_close(a, b, torch.float64)


# ---- without a head ----

MORE = "mistral", "qwen2", "qwen3", "gpt_neox", "phi3", "starcoder2", "gemma2", "gemma3", "olmo2"
NAMES = "gpt2", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)
FINAL_NORM = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm"}  # the last norm, where it is not called norm


def _base(world, folder, sp, saved, given):
    model = GPT.from_pretrained(folder, tp=None if world is None else make_tp(world, sp), dtype=torch.float64, **given)
    assert model.head is None
    out = model(IDS)
    assert out.loss is None and out.logits is None
    out.last_hidden_state.sin().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    if saved is not None:
        model.save_pretrained(saved)
    gain = model.blocks[-1].mlp_norm.weight.grad
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
def test_decoders_without_a_head_are_transformers(files, ranks, tmp_path, name):
    folder, base = files(name)
    given = dict(lm_head=False) if base.config.tie_word_embeddings else {}
    theirs_out = base(IDS).last_hidden_state
    base.zero_grad()
    theirs_out.sin().sum().backward()
    gain = getattr(base, FINAL_NORM.get(name, "norm")).weight.grad
    saved = tmp_path / "saved"
    for got in (_base(None, folder, False, None, given), *ranks(2, _base, folder, True, saved, given)):
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
