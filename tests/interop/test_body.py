"""What a foreign trainer reads off a parallelized module, against what it reads off the same module before: the model
below the head, the head's weight, the number of parameters."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.common import assert_close, error, make_tp
from tests.models.common import batch, whole
from tests.models.theirs import NAMES, make
from tpfuse import parallelize
from tpfuse.models.files.source import written

F64 = torch.float64
COUNTS = [dict(exclude_embeddings=a, only_trainable=b) for a in (False, True) for b in (False, True)]


def read(model, call):
    """The last hidden state and what kind of object holds it, the numbers of parameters, and those below the head."""
    model.get_input_embeddings().requires_grad_(False)
    body = model.base_model
    call = {key: value for key, value in call.items() if key != "labels"}
    out = body(**call)
    counts = [model.num_parameters(**options) for options in COUNTS]
    shared = sum(p.numel() for p in body.parameters())
    return out.last_hidden_state[call["attention_mask"].bool()].detach(), type(out).__name__, counts, shared


def read_of_ours(world, name, call, options):
    return read(parallelize(make(name, **options), make_tp(world)), call)


CASES = [(name, 1, {}) for name in NAMES] + [("llama", 2, {}), ("bert-mlm", 2, {})]
CASES += [("llama", 4, dict(tie_word_embeddings=True)), ("gpt2", 2, {}), ("qwen3_moe-mixed", 2, {})]


@pytest.mark.parametrize("name, R, options", CASES)
def test_the_model_below_the_head(ranks, name, R, options):
    """Over four ranks two kv heads are copied, and counted once."""
    model = make(name, **options)
    call = batch(model.config, pad="right")
    hidden, kind, counts, below = read(model, call)
    for got, got_kind, got_counts, got_below in ranks(R, read_of_ours, name, call, options):
        assert error(got, hidden) < 1e-10 and got_kind == kind and got_counts == counts
        assert R > 1 or got_below == below


def fused(model, call, weight):
    """A loss as trainers make it that multiply hidden states by the head's weight themselves, and its gradients."""
    hidden = model.base_model(call["input_ids"], attention_mask=call["attention_mask"], use_cache=False)
    head = model.get_output_embeddings()
    logits = hidden.last_hidden_state[:, :-1] @ weight(head.weight).T
    loss = F.cross_entropy(logits.flatten(0, 1), call["labels"][:, 1:].flatten())
    loss.backward()
    return loss.detach(), tuple(head.weight.shape), tuple(model.get_input_embeddings().weight.shape)


def fused_of_ours(world, tied):
    model = parallelize(make("llama", tie_word_embeddings=tied), make_tp(world))
    call = batch(model.config, pad="right")
    full = lambda x: x.full_tensor() if isinstance(x, DTensor) else x
    if world.size > 1:
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            fused(model, call, lambda x: x)
    loss, *shapes = fused(model, call, full)
    sources = model.parallel.files.sources()
    grads = dict(written((sources[key], g) for key, g in whole(model.parallel, grad=True).items()))
    return loss, shapes, {model.parallel.files.hf_name(key): g for key, g in grads.items()}


@pytest.mark.parametrize("R, tied", [(1, False), (2, True), (4, False)])
def test_the_weight_of_the_head_is_the_whole_one(ranks, R, tied):
    """97 rows over the ranks; a plain product with a DTensor is torch's error, not a part of the logits."""
    model = make("llama", tie_word_embeddings=tied)
    loss, *shapes = fused(model, batch(model.config, pad="right"), lambda x: x)
    want = {name: p.grad for name, p in model.named_parameters()}
    for got, got_shapes, grads in ranks(R, fused_of_ours, tied):
        assert error(got, loss) < 1e-10 and got_shapes == shapes == [(97, 48)] * 2
        assert_close({key: grads[key] for key in want}, want, F64)


def test_parts_that_are_no_more():
    model = make("llama")
    names = list(model._modules)
    parallelize(model)
    for name in names:
        with pytest.raises(AttributeError, match=f"LlamaForCausalLM.{name} is not there after tpfuse.parallelize"):
            getattr(model, name)
    assert not hasattr(model, "lm_head") and not hasattr(model, "never_heard_of")
    base = parallelize(make("llama").base_model)
    assert base.base_model is base and list(model.base_model._modules) == ["embedding", "input_norm", "blocks"]


def test_what_is_frozen_below_the_head_is_frozen_in_the_model():
    model = parallelize(make("llama"))
    model.base_model.requires_grad_(False)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["parallel.head.weight"]


# ---- hooks that are there before ----


def test_hooks_on_the_embedding_stay_and_others_are_named():
    model, seen = make("gpt2"), []
    handle = model.get_input_embeddings().register_forward_hook(lambda *_: seen.append("rows"))
    model.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize(model)
    call = batch(model.config)
    model.requires_grad_(False)
    assert model(**call).logits.requires_grad and seen == ["rows"]
    handle.remove()
    model.disable_input_require_grads()
    assert not model(**call).logits.requires_grad and seen == ["rows"]
    other = make("gpt2")
    other.transformer.h[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"hooks on transformer.h.1.mlp are gone with these parts; register them"):
        parallelize(other)
