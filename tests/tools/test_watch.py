"""The first op that is not finite is found, wherever it is, and nothing else is taken for one."""

import contextlib
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.common import assert_equal, make_tp
from tests.models.common import GPT_CONFIG, MODELS, batch, results, whole
from tpfuse import watch
from tpfuse.models import GPT

NAN, INF = float("nan"), float("inf")


def weight(path, value):
    """One element of a parameter, at every split."""

    def inject(model):
        with torch.no_grad():
            model.get_parameter(path).view(-1)[0] = value

    return inject


def activation(value):
    def change(module, args, output):
        h, normed = output
        return h.index_fill(0, torch.tensor(1), value), normed

    return lambda model: model.blocks[0].register_forward_hook(change)


def gradient(value):
    """Of what leaves the first block: a tensor's hook, which runs in backward."""

    def change(module, args, output):
        output[0].register_hook(lambda g: g * value)

    return lambda model: model.blocks[0].register_forward_hook(change)


FAULTS = {
    "weight NaN": (
        weight("blocks.1.mlp.fc1.weight", NAN),
        r"(linear_fwd|gather_\w+) \(forward, blocks.1.mlp.fc1, {rank}\) is given, .* = blocks.1.mlp.fc1.weight with"
        r" 1 NaN and 0 infinite of \d+ elements; inputs: .*1 NaN",
    ),
    "weight inf": (weight("blocks.0.attention.qkv.weight", INF), r"blocks.0.attention.qkv, {rank}.* and 1 infinite"),
    "norm": (weight("blocks.0.mlp_norm.weight", NAN), r"\(forward, blocks.0.mlp_norm, {rank}\)"),
    "embedding": (
        weight("input_norm.bias", -INF),
        r"\(forward, input_norm, {rank}\).* = input_norm.bias with 0 NaN and 1",
    ),
    "overflow": (
        weight("blocks.1.mlp.fc1.weight", 3e38),
        r"linear_fwd \(forward, blocks.1.mlp.fc1, {rank}\) gives output \d with 0 NaN and \d+ infinite of \d+ elements;"
        r" inputs: x float32 \(2[12], 48\) in \[-\d.*\]; w .*3e\+38\]",
    ),
    "activation": (activation(NAN), r"aten::index_fill_? \(forward, blocks.0, {rank}\) gives output 0 with 48 NaN"),
    "gradient": (gradient(NAN), r"aten::mul \(backward, .*, {rank}\) gives output 0 with \d+ NaN"),
    "gradient overflow": (gradient(1e38), r"(aten::mul|\w+_bwd|linear_\w+) \(backward, blocks.0.*infinite"),
}


def found(world, name):
    model = GPT(GPT_CONFIG, tp=None if world is None else make_tp(world)).eval()
    FAULTS[name][0](model)
    call = batch(GPT_CONFIG)
    with pytest.raises(FloatingPointError) as caught, watch(model):
        (model(**call).loss * (1e8 if "overflow" in name else 1)).backward()
    return str(caught.value)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    message = found(None, name)
    assert re.search(FAULTS[name][1].replace("{rank}", "rank 0"), message), message


def test_every_rank_finds_its_own(ranks):
    """Each of the first elements of its slice; the message says which rank it was."""
    for name in ("overflow", "weight NaN"):
        for rank, message in enumerate(ranks(2, found, name)):
            assert re.search(FAULTS[name][1].replace("{rank}", f"rank {rank} of 2"), message), message


@pytest.mark.parametrize("saving", ["fastest", "smallest"])
@pytest.mark.parametrize("name", MODELS)
def test_a_finite_run_is_bitwise_the_same(name, saving):
    """Forward, backward and the optimizer; padding, dropout; and the hooks are gone."""
    cls, config, options = MODELS[name]
    every = []
    for watched in (False, True):
        model, call = cls(config, saving=saving, **options), batch(config, pad="right")
        optimizer = torch.optim.AdamW(model.parameters())
        with watch(model) if watched else contextlib.nullcontext():
            values = results(model, call)
            optimizer.step()
        every.append(values | {f"new {k}": v for k, v in whole(model).items()})
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert_equal(*every)


def masked(scores, seen):
    return scores.masked_fill(~seen, -INF).softmax(-1)


def uninitialised(x):
    out = torch.empty(2, 4).fill_(0)  # memory first, that anything may be in
    bad = torch.empty_strided((4,), (1,))
    bad[:2].copy_(x[0, :2])
    out[:, 1:].copy_(x[:, 1:])
    return out + torch.empty(0).sum() + torch.full((), INF).reciprocal()


SEEN = torch.arange(4) < torch.tensor([[1], [4]])
ADDED = torch.where(SEEN, 0.0, -INF)
QUIET = {
    "softmax over -inf": lambda x: masked(x, SEEN),
    "an additive mask": lambda x: (x + torch.zeros(2, 4).masked_fill(~SEEN, -INF)).softmax(-1),
    "a mask that was there": lambda x: (x + ADDED).softmax(-1),
    "torch's attention": lambda x: nn.functional.scaled_dot_product_attention(*[x.expand(1, 1, 2, 4)] * 3, SEEN[:, :2]),
    "a causal mask": lambda x: nn.functional.scaled_dot_product_attention(*[x.expand(1, 1, 2, 4)] * 3, is_causal=True),
    "memory": uninitialised,
    "the largest": lambda x: x.masked_fill(~SEEN, -INF).amax(1),
    "recomputed": lambda x: checkpoint(lambda x: masked(x, SEEN), x, use_reentrant=False),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_no_fault(name):
    x = torch.randn(2, 4, requires_grad=True)
    with watch(nn.Identity()):
        QUIET[name](x).sum().backward()


@pytest.mark.parametrize("saving", ["fastest", "smallest"])
def test_a_row_that_sees_nothing_and_generation_are_no_fault(saving):
    model, call = GPT(GPT_CONFIG, saving=saving), batch(GPT_CONFIG)
    with watch(model):
        model(**call, attention_mask=torch.zeros_like(call["input_ids"])).loss.backward()
        model.generate(call["input_ids"], max_new_tokens=2, do_sample=True, top_k=3, top_p=0.9)


def test_all_of_a_row_masked_is_a_fault():
    with pytest.raises(FloatingPointError, match=r"aten::_softmax \(forward, outside the model, rank 0\).*4 NaN"):
        with watch(nn.Identity()):
            masked(torch.randn(2, 4), SEEN & torch.tensor([[False], [True]]))


def test_recomputation_says_so():
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False).sum()
    with torch.no_grad():
        layer[0].weight.fill_(NAN)
    with pytest.raises(FloatingPointError, match=r"addmm \(forward, recomputed in backward, 0, rank 0\).* = 0.weight"):
        with watch(layer):
            y.backward()
