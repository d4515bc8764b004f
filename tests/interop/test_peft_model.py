"""parallelize takes a PeftModel: its module is split, its adapter is there, trainable as it was, nothing is lost."""

import tempfile

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.common import make_tp
from tests.interop.launched import small
from tests.interop.test_lora_config import NO_DROPOUT, config, ids
from tests.planted import planted
from tpfuse import parallelize

peft = pytest.importorskip("peft")


def wrapped(name="default", trainable=True, **options):
    """A PeftModel whose adapter does something."""
    torch.manual_seed(3)
    model = peft.get_peft_model(small(**NO_DROPOUT), config(**options), adapter_name=name)
    for key, p in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(p, std=0.1)
            p.requires_grad_(trainable)
    return model


def classifier():
    torch.manual_seed(3)
    sizes = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForSequenceClassification(LlamaConfig(**sizes, num_key_value_heads=1, num_labels=3, pad_token_id=0))


def losses(model, steps=2):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    result = []
    for _ in range(steps):
        loss = model(ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


def split(world, name):
    return losses(parallelize(wrapped(name), make_tp(world)).train())


@pytest.mark.parametrize("name", ["default", "mine"])
def test_it_trains_as_the_peft_model(ranks, name):
    exact = losses(wrapped(name))
    assert exact[0] != exact[1] and abs(exact[0] - small(**NO_DROPOUT)(ids(), labels=ids()).loss.item()) > 1e-3
    for found in ranks(2, split, name):
        assert found == pytest.approx(exact, abs=2e-6)


def test_it_is_saved_as_the_peft_model(tmp_path):
    exact = wrapped()(ids()).logits
    parallelize(wrapped()).save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(small(**NO_DROPOUT), tmp_path)
    torch.testing.assert_close(again(ids()).logits, exact, rtol=2e-6, atol=2e-6)


def test_a_frozen_adapter_stays_frozen():
    model = parallelize(wrapped(trainable=False))
    assert not any(p.requires_grad for p in model.parameters())
    exact = wrapped(trainable=False)(ids(), labels=ids()).loss
    assert torch.allclose(model(ids(), labels=ids()).loss, exact, atol=2e-6)


@pytest.mark.parametrize("trainable", [True, False])
def test_what_is_trained_beside_an_adapter_stays_so(trainable):
    def norms_trained():
        model = wrapped(trainable=trainable)
        for p in (p for name, p in model.named_parameters() if "ln_1" in name):
            p.requires_grad_(True)
        return model

    size = lambda model: sum(p.numel() for p in model.parameters() if p.requires_grad)
    split, exact = parallelize(norms_trained()), norms_trained()
    assert size(split) == size(exact)
    assert losses(split.train()) == pytest.approx(losses(exact), abs=2e-6)


def test_a_head_that_the_adapter_does_not_hold_stays_frozen():
    model = peft.get_peft_model(classifier(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert not parallelize(model).parallel.classifier.weight.requires_grad


def test_a_trained_head_comes_along():
    """PEFT keeps a classifier's head twice, as it was and as it is trained."""
    model = peft.get_peft_model(classifier(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]))
    for name, p in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(p, std=0.1)
    exact = model(ids()).logits
    split = parallelize(model)
    torch.testing.assert_close(split(ids()).logits, exact, rtol=2e-6, atol=2e-6)
    trained = {name.split(".")[-2] for name, p in split.named_parameters() if p.requires_grad}
    assert trained == {"lora", "classifier"}


def several():
    model = wrapped()
    model.add_adapter("second", config())
    return model


def merged():
    model = wrapped()
    model.merge_adapter()
    return model


def disabled():
    model = wrapped()
    model.disable_adapter_layers()
    return model


def half_frozen():
    model = wrapped()
    for name, p in model.named_parameters():
        p.requires_grad_("lora_B" in name)
    return model


def scaled():
    model = wrapped()
    for layer in (m for m in model.modules() if hasattr(m, "scale_layer")):
        layer.scale_layer(3)
    return model


def by_transformers():
    model = small(**NO_DROPOUT)
    model.add_adapter(config())
    return model


LOST = "GPT2LMHeadModel has adapters of PEFT, which would be lost, in transformer.h.0.attn.c_attn"
REFUSED = {
    "disabled": (disabled, r"adapters must not be disabled, got .*; call enable_adapter_layers\(\)"),
    "half frozen": (half_frozen, "an adapter must be frozen as a whole or not at all"),
    "scaled": (scaled, "an adapter must be scaled as its config says"),
    "by transformers": (by_transformers, LOST),
    "its inside": (lambda: wrapped().get_base_model(), LOST),
    "several": (several, "a PeftModel must have one adapter, got default, second"),
    "merged": (merged, r"adapters must not be merged, got .*; call unmerge_adapter\(\)"),
    "an option": (lambda: wrapped(use_dora=True), "use_dora=True .*is not built"),
    "dropout": (lambda: wrapped(lora_dropout=0.1), "lora_dropout=0.1 .* is not built, to train with"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_left_as_it_was(case):
    make, words = REFUSED[case]
    model = make().eval()
    before = model(ids()).logits
    with pytest.raises(ValueError, match=words):
        parallelize(model)
    assert torch.equal(model(ids()).logits, before)


def of_no_family():
    torch.manual_seed(3)
    return peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"]))


def heads_that_ranks_do_not_divide():
    return peft.get_peft_model(small(**NO_DROPOUT, n_head=3, n_embd=24), config())


def refused(world, make, folder):
    """What parallelize says, whether the PeftModel computes what it did, and what is left in the temporary folder."""
    folder = folder / str(world.rank)
    folder.mkdir()
    tempfile.tempdir = str(folder)
    model = make().eval()
    run = lambda: model(torch.ones(2, 4)) if make is of_no_family else model(ids()).logits
    before = run()
    try:
        with pytest.raises(ValueError) as caught:
            parallelize(model, make_tp(world))
    finally:
        tempfile.tempdir = None
    return str(caught.value), torch.equal(run(), before), list(folder.iterdir())


LATE = {of_no_family: "parallelize: module must be transformers' own", heads_that_ranks_do_not_divide: "num_heads=3"}


@pytest.mark.parametrize("make", LATE)
def test_a_module_that_is_refused_keeps_its_adapter(ranks, tmp_path, make):
    for said, same, left in ranks(2, refused, make, tmp_path):
        assert LATE[make] in said and same and left == []


def test_an_adapter_outlives_a_failure(tmp_path, monkeypatch):
    """Here of a disk, in the middle: the PeftModel is what it was, and nothing is left in the temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = wrapped()
    exact = model(ids()).logits
    with planted("tpfuse.interop.peft_model.load_adapter", lambda right, *args, **options: 1 / 0):
        with pytest.raises(ZeroDivisionError):
            parallelize(model)
    assert torch.equal(model(ids()).logits, exact) and not list(tmp_path.iterdir())
