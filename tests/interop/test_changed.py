"""A module that is not what its config describes is refused, and nothing happens to it."""

import peft
import pytest
import torch
from torch import nn

from tests.interop.test_parallelize import batch, make
from tpfuse import parallelize


def replaced(model):
    model.transformer.h[1].mlp.act = nn.ReLU()


def without_dropout(model):  # as trl's disable_dropout does
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0


def another_eps(model):
    model.transformer.ln_f.eps = 1e-3


def more(model):
    model.transformer.h[0].adapter = nn.Linear(2, 2).double()


def forward(model):
    model.transformer.h[0].attn.forward = model.transformer.h[0].attn.forward


def own_forward(model):
    model.forward = model.forward


def another_config(model):
    model.config.resid_pdrop = 0.5


CHANGES = {
    replaced: r"transformer.h.1.mlp.act must be a NewGELUActivation, as its config says, got a"
    r" torch.nn.modules.activation.ReLU",
    without_dropout: r"transformer.drop has p 0, and 0.1 by its config; change the config before the module is made",
    another_eps: "transformer.ln_f has eps 0.001, and 1e-05 by its config",
    more: r"transformer.h.0 has parts that its config does not describe: adapter",
    forward: "transformer.h.0.attn has a forward of its own beside its class's",
    own_forward: "GPT2LMHeadModel has a forward of its own beside its class's",
    another_config: r"transformer.h.0.attn.resid_dropout has p 0.1, and 0.5 by its config",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_named(change):
    model = make("gpt2", embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1).eval()
    call = batch(model.config)
    change(model)
    before = model(**call).logits
    with pytest.raises(ValueError, match=f"parallelize: {CHANGES[change]}"):
        parallelize(model)
    assert torch.equal(model(**call).logits, before)


def test_what_is_no_change():
    """Sizes, dtype, checkpointing, and layers that PEFT has wrapped; nothing is drawn from torch's generator."""
    model = make("llama").float()
    model.resize_token_embeddings(model.config.vocab_size + 5, mean_resizing=False)
    model.gradient_checkpointing_enable()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    state = torch.get_rng_state()
    parallelize(wrapped)
    assert torch.equal(torch.get_rng_state(), state)
