"""parallelize takes a PeftModel: its module is split, its adapter is there, trainable as it was, nothing is lost."""

from pathlib import Path

import pytest
import torch

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


def test_a_frozen_adapter_stays_frozen():
    model = parallelize(wrapped(trainable=False))
    assert not any(p.requires_grad for p in model.parameters())
    exact = wrapped(trainable=False)(ids(), labels=ids()).loss
    assert torch.allclose(model(ids(), labels=ids()).loss, exact, atol=2e-6)


def several():
    model = wrapped()
    model.add_adapter("second", config())
    return model


def merged():
    model = wrapped()
    model.merge_adapter()
    return model


REFUSED = {
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


def test_an_adapter_outlives_a_failure():
    """Here of the module, after PEFT's layers are gone: the error names the folder that has it."""
    exact = wrapped()(ids()).logits
    with planted("tpfuse.interop.peft_model.load_adapter", lambda right, *args, **options: 1 / 0):
        with pytest.raises(ZeroDivisionError) as caught:
            parallelize(wrapped())
    (note,) = caught.value.__notes__
    folder = Path(note.removeprefix("parallelize: the adapter is kept in ").partition(";")[0])
    again = peft.PeftModel.from_pretrained(small(**NO_DROPOUT), folder)
    assert torch.allclose(again(ids()).logits, exact, atol=2e-6)
