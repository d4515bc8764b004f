"""Models over context-parallel ranks against one process, in fp64 with dropout: loss, hidden states, every gradient.

The kinds are those whose bits are compared elsewhere: every family, adapters, hooks, experts, odd sizes.
"""

import functools

import pytest
import torch

from bench.bits.kinds import ADAPTED_KINDS, ALL_KINDS, MakeKind
from tests.common import error
from tests.models.common import gradients, whole, whole_logits
from tests.planted import Mistaken
from tpfuse import TensorParallel
from tpfuse.models import BertConfig

NOISE = 1e-15  # gradients of key biases, which softmax does not see, are rounding alone
MASK = torch.arange(13)[None] >= torch.tensor([[0], [3], [6]])
FORMS = {
    "odd": dict(shape=(3, 13)),  # pieces of 7 and 6, or 4, 4, 4 and 1 positions
    "key mask": dict(shape=(3, 13), attention_mask=MASK),
    "packed": dict(shape=(1, 31), cu_seqlens=torch.tensor([0, 10, 17, 29], dtype=torch.int32)),  # across pieces
}
LAYOUTS = {"1x2": (1, 2, True), "2x2": (2, 2, True), "2x2 no sp": (2, 2, False), "1x4": (1, 4, True)}
DAILY = [
    ("gpt2 odd", "packed", "1x2"),
    ("qwen3 odd", "odd", "2x2"),
    ("gemma odd", "odd", "1x4"),
    ("qwen2 moe odd lora", "odd", "2x2"),
    ("bert odd", "key mask", "2x2 no sp"),
]
UNPACKED = [kind for kind, config in ALL_KINDS.items() if isinstance(config, BertConfig) and config.rope is None]


def results(kind, form, saving, tp):
    model = MakeKind(kind, torch.float64, saving)(tp).train()
    call = dict(FORMS[form])
    shape = call.pop("shape")
    ids = torch.randint(90, shape, generator=torch.Generator().manual_seed(0))
    out = model(ids, labels=ids, step=3, first_sample=2, return_logits=True, output_hidden_states=True, **call)
    out.loss.backward()
    named = whole(model, grad=True) if kind in ADAPTED_KINDS else gradients(model)
    states = {f"hidden_states.{i}": h.detach() for i, h in enumerate(out.hidden_states)}
    logits = whole_logits(out.logits, model.config.vocab_size, tp)
    return dict(loss=out.loss.detach(), logits=logits) | states | named


def on_ranks(world, kind, form, saving, layout):
    tensor, context, sp = LAYOUTS[layout]
    mesh = world.pieces(1, context, tensor)
    return results(kind, form, saving, TensorParallel(mesh["tp"], sequence_parallel=sp, cp=mesh["cp"]))


@functools.cache
def one(kind, form, saving):
    return results(kind, form, saving, TensorParallel())


def compare(ranks, kind, form, layout, saving="fastest", function=on_ranks):
    tensor, context, _ = LAYOUTS[layout]
    exact = one(kind, form, saving)
    for got in ranks(tensor * context, function, kind, form, saving, layout):
        assert got.keys() == exact.keys()
        errors = {name: error(got[name], exact[name]) for name in exact if exact[name].abs().max() > NOISE}
        wrong = {name: e for name, e in errors.items() if not e <= 1e-10}
        assert len(errors) > len(exact) - 5 and not wrong, wrong


@pytest.mark.parametrize("kind, form, layout", DAILY)
def test_one_process(ranks, kind, form, layout):
    compare(ranks, kind, form, layout)


def every():
    for kind in ALL_KINDS:
        for i, layout in enumerate(LAYOUTS):
            forms = [form for form in FORMS if form != "packed" or kind not in UNPACKED]
            yield kind, forms[i % len(forms)], layout, ("fastest", "smallest")[i % 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind, form, layout, saving", [*every()])
def test_every_kind(ranks, kind, form, layout, saving):
    compare(ranks, kind, form, layout, saving)


def not_summed(right, x, tp):
    """Weights as they are: their gradients stay sums over one piece."""
    return x


@pytest.mark.parametrize("target", ["tpfuse.layers.linear.on_pieces", "tpfuse.layers.embedding.on_pieces"])
def test_gradients_of_pieces_are_seen(ranks, target):
    with pytest.raises(AssertionError, match="weight"):
        compare(ranks, "gpt2 odd", "odd", "1x2", function=Mistaken(on_ranks, target, not_summed))
