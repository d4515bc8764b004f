"""Optimizers over whole matrices: the same update at every tensor-parallel size."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.common import assert_equal, error, make_tp
from tests.models.common import STEP_CONFIG, batch, default_dtype, whole
from tpfuse import MainGrad, WholeMatrices, as_dtensor, clip_grad_norm_
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT

GATED = replace(STEP_CONFIG, gated=True, num_kv_heads=4)  # every weight of another number of dimensions


def muon_of_the_same_gradients(world):
    """Three steps of torch's Muon, whose iteration is in bf16: bitwise the same where the gradients are."""
    model = GPT(GATED, tp=make_tp(world))
    matrices = WholeMatrices(model.blocks)
    muon = torch.optim.Muon(matrices.parameters(), lr=0.02, adjust_lr_fn="match_rms_adamw")
    muon.register_step_pre_hook(matrices.gather_gradients)
    shapes = [tuple(m.shape) for m in matrices.parameters()]
    assert shapes == [(80, 48), (48, 48), (168, 48), (48, 84)]  # of qkv, out, fc1, fc2
    for step in range(3):
        for _, p, spec, tp in named_specs(model):
            g = torch.Generator().manual_seed(step * 100 + sum(spec.shape))
            p.grad = torch.randn(spec.shape, generator=g)[spec.local(tp)].contiguous()
        muon.step()
    assert all(p.grad is not None for p in model.parameters())  # another optimizer's, for the rest
    return whole(model)


def test_muon(ranks):
    exact = ranks(1, muon_of_the_same_gradients)[0]
    start = whole(GPT(GATED))
    moved = {name for name in exact if not torch.equal(exact[name], start[name])}
    assert moved == {
        name for name in start if name.startswith("blocks.") and start[name].dim() > 1 and "bias" not in name
    }
    for R in (2, 4):
        for found in ranks(R, muon_of_the_same_gradients):
            assert_equal(found, exact)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_optimizer(ranks, set_to_none):
    """Resets the weights' gradients, to which the next backward pass adds, as the model's own does."""
    assert all(ranks(2, zeroed, set_to_none))


def zeroed(world, set_to_none):
    weights = []
    for by_optimizer in (False, True):
        model = GPT(GATED, tp=make_tp(world))
        matrices = WholeMatrices(model.blocks)
        muon = torch.optim.Muon(matrices.parameters(), lr=0.02)
        muon.register_step_pre_hook(matrices.gather_gradients)
        for step in range(3):
            model(**batch(GATED, seed=step), step=step).loss.backward()
            muon.step()
            (muon if by_optimizer else model).zero_grad(set_to_none)
        weights.append(whole(model))
    return all(map(torch.equal, weights[0].values(), weights[1].values()))


def stepped(model, matrices, first, second):
    """Three steps of the optimizers of whole matrices and of the rest -> the weights."""
    first.register_step_pre_hook(matrices.gather_gradients)
    for step in range(3):
        model(**batch(GATED, seed=step), step=step).loss.backward()
        first.step()
        second.step()
        model.zero_grad()
    return whole(model)


class Shampoo(torch.optim.Optimizer):
    """Gupta et al. 2018, arXiv:1802.09568: L^(-1/4) G R^(-1/4), where L sums G G' and R sums G' G; written as for
    plain tensors."""

    def __init__(self, params, lr, eps=1e-4):
        super().__init__(params, dict(lr=lr, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                for name, gram in (("L", g @ g.mT), ("R", g.mT @ g)):
                    state[name] = state[name] + gram if name in state else gram
                update = root(state["L"], group["eps"]) @ g @ root(state["R"], group["eps"])
                p.add_(update, alpha=-group["lr"])


def root(gram, eps):
    """gram^(-1/4) by eigenvalues in fp64."""
    values, vectors = torch.linalg.eigh(gram.double())
    return ((vectors * (values.clamp(min=0) + eps) ** -0.25) @ vectors.mT).to(gram.dtype)


def shampoo(world, dtype, main_grad=False):
    with default_dtype(dtype):
        model = GPT(GATED, tp=make_tp(world))
    if main_grad:
        return beside_main_grad(model, MainGrad(model))
    matrices = WholeMatrices(model.blocks)
    first, second = Shampoo(matrices.parameters(), lr=0.01), torch.optim.SGD(matrices.others(model), lr=0.1)
    return stepped(model, matrices, first, second)


def scaled(world, again, scale):
    """Clipped steps with a gradient scaler, which unscales what has been gathered before it."""
    with default_dtype(torch.float64):
        model = GPT(GATED, tp=make_tp(world))
    matrices, scaler = WholeMatrices(model.blocks), torch.amp.GradScaler("cpu", init_scale=scale)
    optimizers = Shampoo(matrices.parameters(), lr=0.01), torch.optim.SGD(matrices.others(model), lr=0.1)
    if again:
        optimizers[0].register_step_pre_hook(matrices.gather_gradients)
    for step in range(3):
        scaler.scale(model(**batch(GATED, seed=step), step=step).loss).backward()
        matrices.gather_gradients()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if again:
            clip_grad_norm_(model, 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    return whole(model)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("R", [1, 2])
def test_beside_a_gradient_scaler(ranks, R, again):
    """Gradients that a step gathers again, as after clipping, are unscaled too."""
    (exact,) = ranks(1, scaled, True, 1.0) if again else ranks(1, shampoo, torch.float64)
    for found in ranks(R, scaled, again, 8.0):
        assert max(error(found[name], exact[name]) for name in exact) < 1e-10


def beside_main_grad(model, main):
    """The same steps, each of two micro-batches whose gradients are added in place."""
    matrices = WholeMatrices(model.blocks)
    optimizers = Shampoo(matrices.parameters(), lr=0.01), torch.optim.SGD(matrices.others(model), lr=0.1)
    optimizers[0].register_step_pre_hook(matrices.gather_gradients)
    for step in range(3):
        call = batch(GATED, seed=step)
        count = (call["labels"][:, 1:] != -100).sum()
        for i in range(len(call["labels"])):
            rows = {key: x[i : i + 1] for key, x in call.items()}
            model(**rows, step=step, first_sample=i, loss_normalizer=count).loss.backward()
        main.reduce()
        for optimizer in optimizers:
            optimizer.step()
        main.zero()
    return whole(model)


@pytest.mark.parametrize("R", [1, 2])
def test_beside_main_grad(ranks, R):
    exact = ranks(1, shampoo, torch.float64)[0]
    for found in ranks(R, shampoo, torch.float64, True):
        assert max(error(found[name], exact[name]) for name in exact) < 1e-10


def test_steps_that_bf16_would_lose_are_kept():
    """The whole matrices are those of the MainGrad's fp32 weights, and so is their state."""
    with default_dtype(torch.bfloat16):
        model = GPT(GATED)
    main = MainGrad(model)
    matrices = WholeMatrices(model.blocks)
    muon = torch.optim.Muon(matrices.parameters(), lr=1e-6)
    muon.register_step_pre_hook(matrices.gather_gradients)
    before = [x.detach().clone() for x in matrices.parameters()]
    model(**batch(GATED)).loss.backward()
    with pytest.raises(RuntimeError, match="call main.reduce"):
        muon.step()
    main.reduce()
    muon.step()
    for (p, _, matrix), old in zip(matrices.sources.values(), before, strict=True):
        assert matrix.dtype == torch.float32 and not torch.equal(matrix, old)
        assert muon.state[matrix]["momentum_buffer"].dtype == torch.float32
        assert torch.equal(p.view(matrix.shape), matrix.to(torch.bfloat16))
    assert {id(x) for x in matrices.others(model)} <= {id(x) for x in main.parameters()}


@pytest.mark.parametrize(
    "dtype, limit", [(torch.float64, 1e-10), pytest.param(torch.float32, 1e-6, marks=pytest.mark.slow)]
)
def test_shampoo(ranks, dtype, limit):
    exact, start = ranks(1, shampoo, dtype)[0], whole(GPT(GATED))
    assert error(exact["blocks.0.mlp.fc1.weight"], start["blocks.0.mlp.fc1.weight"]) > 0.01
    for found in ranks(4, shampoo, dtype):
        assert max(error(found[name], exact[name]) for name in exact) < limit


def test_a_weight_whose_matrix_would_be_a_copy():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(3, 2))
    WholeMatrices(model)
    with pytest.raises(ValueError, match="the matrix of 0.weight would be a copy"):
        WholeMatrices(model.to(memory_format=torch.channels_last))


def refused(world):
    errors = []
    copied = GPT(replace(STEP_CONFIG, num_kv_heads=1), tp=make_tp(world))
    view = as_dtensor(GPT(STEP_CONFIG, tp=make_tp(world)), world.mesh(1, world.size))
    for model in (copied, view):
        with pytest.raises(ValueError) as caught:
            WholeMatrices(model.blocks)
        errors.append(str(caught.value))
    model = GPT(STEP_CONFIG, tp=make_tp(world))
    model(**batch(STEP_CONFIG)).loss.backward()
    if world.rank:
        model.blocks[0].mlp.fc1.weight.grad = None
    with pytest.raises(ValueError) as caught:
        WholeMatrices(model.blocks).gather_gradients()
    return [*errors, str(caught.value)]


def test_refused(ranks):
    for copied, view, differing in ranks(2, refused):
        assert "WholeMatrices: 0.attention.qkv.kv is held by 2 ranks at tensor-parallel size 2" in copied
        assert "WholeMatrices: 0.attention.qkv.weight is a DTensor; leave as_dtensor" in view
        assert "parameters without a gradient must be the same on every" in differing
