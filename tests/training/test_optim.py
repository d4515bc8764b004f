"""The norm of the whole gradient and the groups of an optimizer, against torch's own on one process."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.common import assert_close, error, make_tp
from tests.models.common import BERT_CONFIG, GPT_CONFIG, Training, batch, whole
from tests.no_sync import no_sync
from tpfuse import TensorParallel, clip_grad_norm_, param_groups
from tpfuse.layers import RMSNorm
from tpfuse.models import GPT, Bert
from tpfuse.pipeline import schedule
from tpfuse.tools.ledger.dryrun import fake_world
from tpfuse.training.foreign import norm as norms

F64, F32 = torch.float64, torch.float32


def clipped(world, dp, sp, kind, dtype, max_norm, theirs=False):
    """-> the norm, and the full gradients after clipping"""
    training = Training(world, dp, sp, kind, dtype)
    training.backward(0)
    parameters = training.model.parameters()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm) if theirs else clip_grad_norm_(training.replica, max_norm)
    return norm, whole(training.model, grad=True)


LAYOUTS = [  # the limit, ranks, dp, kind, sequence parallel
    (0.5, 1, 1, "ddp", False),
    (0.5, 2, 1, "ddp", True),
    (0.5, 4, 1, "ddp", False),
    (0.5, 4, 2, "ddp", True),
    (0.5, 2, 1, "dtensor", True),
    (0.5, 4, 2, "fsdp", True),
    (0.5, 2, 2, "fsdp", False),
    (100.0, 1, 1, "ddp", False),  # nothing is scaled
    pytest.param(100.0, 4, 2, "fsdp", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("max_norm, R, dp, kind, sp", LAYOUTS)
def test_the_norm_is_torchs_on_one_process(ranks, R, dp, kind, sp, max_norm):
    for dtype in (F64, F32) if max_norm < 1 else (F64,):
        norm, exact = ranks(1, clipped, 1, False, "ddp", dtype, max_norm, True)[0]
        every = ranks(R, clipped, dp, sp, kind, dtype, max_norm)
        for got, grads in every:
            assert (
                got.dim() == 0 and got.dtype == dtype and torch.equal(got, every[0][0])
            )  # the same bits on every rank
            assert error(got, norm) < (1e-12 if dtype == F64 else 1e-6)
            assert_close(grads, exact, dtype)


def local_norm(world):
    """What torch's own gives on tensors that are nobody's shards, and what counting replicated parameters on every rank
    would."""
    model = GPT(GPT_CONFIG, tp=make_tp(world)).double()
    model(**batch(GPT_CONFIG)).loss.backward()
    squares = [p.grad.square().sum() for p in model.parameters()]
    every = [torch.zeros((), dtype=F64) for _ in range(world.size)]
    torch.distributed.all_gather(every, sum(squares))
    return (
        nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()]),
        sum(every).sqrt(),
        clip_grad_norm_(model, 1e9),
    )


def test_a_replicated_parameter_is_counted_once(ranks):
    alone, _, right = ranks(1, local_norm)[0]
    assert error(right, alone) < 1e-12
    for local, twice, norm in ranks(2, local_norm):
        assert error(norm, right) < 1e-12 and error(local, right) > 1e-2 and error(twice, right) > 1e-2


def test_no_gradients_and_some():
    model = GPT(GPT_CONFIG)
    assert clip_grad_norm_(model, 1.0) == 0
    model.embedding.weight.grad = torch.full_like(model.embedding.weight, 2.0)
    norm = clip_grad_norm_(model, 1.0)
    assert norm == pytest.approx(2 * model.embedding.weight.numel() ** 0.5)
    assert model.embedding.weight.grad.norm() == pytest.approx(1.0, rel=1e-5)
    model.embedding.weight.grad.fill_(float("nan"))
    assert clip_grad_norm_(model, 1.0).isnan()


BAD = (
    "blocks.0.mlp.fc1.weight",
    "blocks.1.mlp_norm.bias",
    "embedding.weight",
    "blocks.0.attention.qkv.bias",
    "input_norm.weight",
)


def nonfinite(world, bad, value):
    """-> the error of a rank whose first element of each of ``bad`` is ``value`` (on the last rank alone, where the
    parameter is split), and whether gradients stayed"""
    model = GPT(GPT_CONFIG, tp=make_tp(world) if world else None)
    model(**batch(GPT_CONFIG)).loss.backward()
    for name in bad:
        grad = model.get_parameter(name).grad.view(-1)
        if world is None or world.rank == world.size - 1 or "norm" in name:
            grad[0] = value
    before = whole(model, grad=True)
    with pytest.raises(RuntimeError) as caught:
        clip_grad_norm_(model, 1e-3, error_if_nonfinite=True)
    after = whole(model, grad=True)
    return str(caught.value), all(torch.equal(before[name].nan_to_num(7), after[name].nan_to_num(7)) for name in before)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_gradients_that_are_not_finite_are_named(count, value):
    bad = [name for name in dict(GPT(GPT_CONFIG).named_parameters()) if name in BAD][:count]
    message, kept = nonfinite(None, bad, value)
    assert kept and f"that of {', '.join(bad[:4])}{' and 1 more' * (count > 4)} is not finite" in message


def test_every_rank_names_the_same_gradients(ranks):
    bad = [name for name in dict(GPT(GPT_CONFIG).named_parameters()) if name in BAD]
    (first, kept), *others = ranks(2, nonfinite, bad, float("inf"))
    assert kept and others == [(first, True)] and f"{', '.join(bad[:4])}" in first


def test_finite_gradients_whose_norm_is_not():
    model = nn.Linear(2, 2)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e38) * 3
    with pytest.raises(RuntimeError, match="norm of the gradients is inf: each is finite"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert all((p.grad == torch.full_like(p, 1e38) * 3).all() for p in model.parameters())
    model.bias.grad, model.weight.grad = torch.ones(2), torch.ones(2, 2)
    assert clip_grad_norm_(model, 1.0, error_if_nonfinite=True) == pytest.approx(6**0.5)


@pytest.mark.parametrize("max_norm", [float("nan"), -1.0, "1", True, torch.tensor([1.0])])
def test_a_limit_that_is_none(max_norm):
    with pytest.raises(ValueError, match="clip_grad_norm_: max_norm must be"):
        clip_grad_norm_(nn.Linear(2, 2), max_norm)


def test_parameters_are_no_module():
    with pytest.raises(ValueError, match="clip_grad_norm_: model must be a module, got .*generator.*torch.nn.utils"):
        clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)


def test_a_plain_module_beside_ours():
    """Anybody's parameters: replicated, and so torch's norm."""
    mine = nn.Sequential(nn.Linear(4, 3), RMSNorm(3))
    mine(torch.randn(2, 4)).square().sum().backward()
    want = nn.utils.get_total_norm([p.grad for p in mine.parameters()])
    torch.testing.assert_close(clip_grad_norm_(mine, 1e9), want)


@pytest.mark.parametrize("model", [GPT(GPT_CONFIG), Bert(BERT_CONFIG, masked_lm=True)], ids=["gpt", "bert"])
def test_norms_and_biases_do_not_decay(model):
    decayed, others = param_groups(model, weight_decay=0.1)
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(map(id, decayed["params"] + others["params"])) == sorted(names)  # each once
    assert all(names[id(p)].endswith(".bias") or "norm" in names[id(p)] for p in others["params"])
    assert all(names[id(p)].endswith(".weight") and "norm" not in names[id(p)] for p in decayed["params"])


def test_others_norms_and_frozen_parameters():
    model = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.RMSNorm(2), RMSNorm(2), GPT(GPT_CONFIG)])
    model[4].embedding.weight.requires_grad_(False)
    decayed, others = param_groups(model, 0.1)
    held = {id(p) for p in decayed["params"] + others["params"]}
    assert id(model[4].embedding.weight) not in held and len(held) == len(list(model.parameters())) - 1
    assert all(
        id(p) in {id(q) for q in others["params"]} for m in (model[1], model[2], model[3]) for p in m.parameters()
    )


@pytest.mark.parametrize("R", [1, 2])
def test_clipping_starts_few_ops_whatever_the_number_of_parameters(R):
    """One norm and one product a dtype and kind of sharding, and what adds a handful of numbers."""

    def started(layers):
        with fake_world(R) as mesh:
            tp = TensorParallel(mesh["tp"]) if R > 1 else None
            with torch.device("meta"):
                model = GPT(replace(GPT_CONFIG, num_layers=layers), tp=tp)
            for i, p in enumerate(model.parameters()):
                p.data = p.to((F32, torch.bfloat16)[i % 2])
                p.grad = torch.empty_like(p)
            with no_sync() as watch:
                clip_grad_norm_(model, 1.0)
        return watch.started

    few, many = started(1), started(9)
    assert few == many and many["_foreach_norm"] == 2 * R and many["_foreach_mul_"] == 2
    assert sum(many.values()) < 40


def test_gradients_of_several_dtypes():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).bfloat16(), RMSNorm(2).double())
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p.dtype)
    exact = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    before = [p.grad.clone() for p in model.parameters()]
    norm = clip_grad_norm_(model, 0.5)
    torch.testing.assert_close(norm.double(), exact.norm(), rtol=1e-6, atol=0)
    for p, grad in zip(model.parameters(), before):
        torch.testing.assert_close(p.grad, grad * (0.5 / (exact.norm() + 1e-6)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    "dtype, size, max_norm", [(torch.bfloat16, 1e4, 1.0), (torch.float16, 6e4, 1e-3)]
)  # a scale of 1e-9 is 0 in fp16
def test_16_bit_gradients_are_multiplied_by_an_fp32_scale(dtype, size, max_norm, foreach):
    ours, theirs = nn.Linear(128, 128, dtype=dtype), nn.Linear(128, 128, dtype=dtype)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        p.grad = (torch.rand(p.shape, generator=torch.Generator().manual_seed(1)) * size).to(dtype)
        q.grad = p.grad.clone()
    norm = clip_grad_norm_(ours, max_norm)
    nn.utils.clip_grads_with_norm_(theirs.parameters(), max_norm, norm, foreach)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.grad.count_nonzero() > 0 and torch.equal(p.grad, q.grad)


def test_an_infinite_limit_scales_nothing():
    model = nn.Linear(3, 2)
    model.weight.grad, model.bias.grad = torch.full((2, 3), math.inf), torch.ones(2)
    assert clip_grad_norm_(model, math.inf) == math.inf
    assert model.weight.grad.isposinf().all() and model.bias.grad.eq(1).all()


def gathered_on(world):
    """-> the devices of what is gathered over stages by one without a gradient"""
    mesh, devices = world.stages(1, 1, 1), []
    model = GPT(GPT_CONFIG, stage=(0, 1, "1f1b"))
    schedule(model, mesh["pp"], "1f1b", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "all_gather", lambda x, size, name: devices.append(x.device.type) or x[None])
        clip_grad_norm_(model.to("meta"), 1.0)
    return devices


def test_a_stage_without_gradients_sends_from_the_models_device(ranks):
    assert ranks(1, gathered_on) == [["meta"]]


@pytest.mark.parametrize("weight_decay", [-0.1, float("nan"), "x"])
def test_a_decay_that_is_none(weight_decay):
    with pytest.raises(ValueError, match="param_groups: weight_decay must be"):
        param_groups(torch.nn.Linear(2, 2), weight_decay)
