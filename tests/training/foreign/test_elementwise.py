"""Optimizers that look at whole tensors are refused on slices of them; the others are not."""

import warnings

import pytest
import torch
import transformers

from tests.common import make_tp
from tests.models.common import STEP_CONFIG
from tpfuse import MainGrad, WholeMatrices, param_groups
from tpfuse.models import GPT
from tpfuse.training.foreign.elementwise import ELEMENTWISE, _tried

OTHERS = {name: cls for name, cls in vars(torch.optim).items() if isinstance(cls, type) and name != "Optimizer"}


class Lion(torch.optim.Optimizer):
    """Element by element, and none of torch's."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, dict(lr=lr))

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad.sign()


class Trust(Lion):
    """As LARS and LAMB scale: by a norm of the whole parameter."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data -= self.defaults["lr"] * p.data.norm() * p.grad


class NeedsMore(Lion):
    def __init__(self, params, model):
        super().__init__(params)


def made(world):
    """What becomes of each optimizer: "", a warning, or an error."""
    model = GPT(STEP_CONFIG, tp=make_tp(world))
    makers = {name: lambda ps, cls=cls: cls(ps) for name, cls in (OTHERS | dict(Lion=Lion, Trust=Trust)).items()}
    makers |= dict(theirs=lambda ps: transformers.Adafactor(ps, lr=1e-3, relative_step=False))
    makers |= dict(NeedsMore=lambda ps: NeedsMore(ps, model))
    outcomes = {}
    for name, make in makers.items():
        matrices = [p for p in model.parameters() if p.dim() == 2]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                make(matrices)
                outcomes[name] = "".join(str(w.message) for w in caught if "tpfuse" in str(w.message))
            except ValueError as error:
                outcomes[name] = str(error)
    torch.optim.Muon(WholeMatrices(model.blocks).parameters())
    torch.optim.Adafactor([torch.nn.Parameter(torch.ones(2, 2))])  # split over no ranks
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="Trust"):
        Trust(torch.nn.Linear(2, 2).parameters()).add_param_group(dict(params=[model.embedding.weight]))
    return outcomes, len(adam.param_groups)


@pytest.mark.slow
def test_an_optimizer_is_taken_as_it_works(ranks):
    for outcomes, _ in ranks(2, made):
        refused = {name for name, text in outcomes.items() if "is not the slice of its update" in text}
        assert refused == {"Adafactor", "Muon", "LBFGS", "Trust", "theirs"}
        assert {name for name, text in outcomes.items() if "cannot tell" in text} == {"NeedsMore"}
        assert all(text == "" for name, text in outcomes.items() if name not in refused | {"NeedsMore"})


def test_every_optimizer_of_the_installed_torch_is_known():
    """A release that adds one fails here; those that a plain step can try are as the table says."""
    assert OTHERS.keys() == ELEMENTWISE.keys()
    for name, cls in OTHERS.items():
        tried = _tried(cls([torch.nn.Parameter(torch.ones(2, 2))]))
        assert tried in (None, ELEMENTWISE[name]), name


def with_main_grad(world):
    model = GPT(STEP_CONFIG, tp=make_tp(world)).bfloat16()
    MainGrad(model)
    with pytest.raises(ValueError, match="is not the slice of its update"):
        torch.optim.Adafactor(param_groups(model, 0.0))
    return True


def test_fp32_weights_beside_16_bits_are_slices_too(ranks):
    assert all(ranks(2, with_main_grad))
