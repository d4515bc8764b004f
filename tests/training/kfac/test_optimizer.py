"""KFAC's steps: the same at every tensor-parallel size and over replicas, resumed bit for bit, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch

import tpfuse
from tests.common import assert_equal, error, make_tp
from tests.models.common import STEP_CONFIG, batch, default_dtype, whole
from tests.pipeline.common import said
from tests.planted import planted
from tpfuse import KFAC, TensorParallel
from tpfuse.models import GPT

F64 = torch.float64
GATED = replace(STEP_CONFIG, gated=True, num_kv_heads=4)  # every weight of another number of dimensions
OPTIONS = dict(lr=0.01, weight_decay=0.1, refresh=2)


def call_of(step, rows=4):
    return batch(GATED, size=rows, seed=step)


def made(tp=None, dtype=F64, config=GATED, **options):
    with default_dtype(dtype):
        model = GPT(config, tp=tp, **options)
    kfac = KFAC(model, **OPTIONS)
    return model, kfac, torch.optim.SGD(kfac.remaining(model), lr=0.1)


def stepped(model, kfac, others, steps):
    for step in steps:
        model(**call_of(step), step=step).loss.backward()
        kfac.step()
        others.step()
        model.zero_grad()
    return everything(model, kfac)


def everything(model, kfac):
    """The weights, and the factors with all else that the optimizer has."""
    states = enumerate(kfac.state.values())
    return whole(model) | {f"{i}.{key}": x.clone() for i, state in states for key, x in state.items()}


def training(world, sequence_parallel=True):
    return stepped(*made(make_tp(world, sequence_parallel)), range(3))


def largest(found, exact):
    return max(error(found[name], exact[name]) for name in exact)


@pytest.mark.parametrize(
    "R, sequence_parallel",
    [(2, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(4, True, marks=pytest.mark.slow)],
)
def test_the_same_at_every_size(ranks, R, sequence_parallel):
    (exact,) = ranks(1, training)
    with default_dtype(F64):
        start = whole(GPT(GATED))
    assert error(exact["blocks.0.mlp.fc1.weight"], start["blocks.0.mlp.fc1.weight"]) > 0.01
    assert all(largest(found, exact) < 1e-12 for found in ranks(R, training, sequence_parallel))


def unexchanged(right, self, side):
    """Each rank's own columns in the place of its rows of all."""
    return right(self, torch.zeros_like(side)) + side.repeat(1, self.placement.tp.size)[:: self.placement.tp.size]


def mistaken(world):
    with planted("tpfuse.training.kfac.curvature.Curvature._exchanged", unexchanged):
        return training(world)


def test_a_factor_of_own_columns_is_seen(ranks):
    (exact,) = ranks(1, training)
    assert all(largest(found, exact) > 1e-4 for found in ranks(2, mistaken))


def of_replicas(world, micro_batches):
    """Each replica has half of the rows."""
    mesh = world.mesh(2, world.size // 2)
    with default_dtype(F64):
        model = GPT(GATED, tp=TensorParallel(mesh["tp"]), dp=mesh["dp"])
    replica = tpfuse.data_parallel(model, mesh["dp"], bitwise_micro_batches=micro_batches)
    kfac = KFAC(model, **OPTIONS)
    others = torch.optim.SGD(kfac.remaining(model), lr=0.1)
    rows = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
    for step in range(3):
        call = {key: x[rows] for key, x in call_of(step).items()}
        count = (call_of(step)["labels"][:, 1:] != -100).sum() / 2
        replica(**call, step=step, first_sample=rows.start, loss_normalizer=count).loss.backward()
        kfac.step()
        others.step()
        model.zero_grad()
    return everything(model, kfac)


@pytest.mark.parametrize("R, micro_batches", [(2, None), (2, 2), pytest.param(4, None, marks=pytest.mark.slow)])
def test_replicas_step_on_factors_of_all_rows(ranks, R, micro_batches):
    (exact,) = ranks(1, training)
    assert all(largest(found, exact) < 1e-12 for found in ranks(R, of_replicas, micro_batches))


def resumed(world, dtype):
    """Five steps, and the last two of them again after a restart -> the weights of both."""
    model, kfac, others = made(make_tp(world), dtype)
    stepped(model, kfac, others, range(3))
    saved = [x.state_dict() for x in (model, kfac, others)]
    saved = torch.load(_file(saved), weights_only=True)
    shapes = {tuple(x.shape) for state in kfac.state_dict()["state"].values() for x in state.values()}
    exact = stepped(model, kfac, others, range(3, 5))
    del model, kfac, others
    again = made(make_tp(world), dtype)
    for x, state in zip(again, saved, strict=True):
        x.load_state_dict(state)
    return exact, stepped(*again, range(3, 5)), shapes


def _file(value):
    import io

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(F64, marks=pytest.mark.slow)])
def test_resumes_bit_for_bit(ranks, dtype):
    """Factors of bf16 weights are fp32, and whole."""
    for exact, again, shapes in ranks(2, resumed, dtype):
        assert_equal(again, exact)
        assert {(48, 48), (80, 80), (168, 168), (84, 84), (168, 48)} <= shapes


def test_a_step_that_a_scaler_skips():
    """Sums that are not finite, those of gradients, change no factor."""
    model, kfac, others = made()
    stepped(model, kfac, others, range(2))
    before = {p: {key: x.clone() for key, x in state.items()} for p, state in kfac.state.items()}
    (float("nan") * model(**call_of(2), step=2).loss).backward()
    for p in model.parameters():
        p.grad = None
    model(**call_of(2), step=2).loss.backward()  # its sums are added to NaN
    kfac.step()
    for p, state in before.items():
        assert all(torch.equal(kfac.state[p][key], x) for key, x in state.items() if key.startswith("output"))
        assert all(x.isfinite().all() for x in kfac.state[p].values())
    assert all(p.isfinite().all() for p in model.parameters())


def failing(gradient):
    raise RuntimeError("of a hook")


@pytest.mark.parametrize("of_what", ["kfac", "model"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_gradient_that_is_dropped(of_what, fails):
    """zero_grad forgets what its matrices have added, of a backward pass that failed too."""
    exact, found = made(), made()
    model, kfac, others = found
    loss = model(**call_of(7), step=0).loss
    handle = model.embedding.weight.register_hook(failing) if fails else None
    if handle is not None:
        assert said(loss.backward, RuntimeError) == "of a hook"
        handle.remove()
    else:
        loss.backward()
    assert all(curvature.sums for curvature in kfac._curvature.values())
    for x in (kfac, others) if of_what == "kfac" else (model,):
        x.zero_grad()
    assert_equal(stepped(*found, range(2)), stepped(*exact, range(2)))


def test_a_main_grad_that_is_dropped():
    model = GPT(GATED)
    main, kfac = tpfuse.MainGrad(model), KFAC(model)
    model(**call_of(0)).loss.backward()
    assert all(curvature.sums for curvature in kfac._curvature.values())
    main.zero()
    assert not any(curvature.sums for curvature in kfac._curvature.values())


class Either(torch.nn.Module):
    """A model, of which a call leaves the blocks out where it is told to."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, call, used):
        own = self.model.embedding.weight.square().mean()
        return own + self.model(**call, step=0, first_sample=0).loss if used else own


def on_one_replica(world, used, late=False):
    """A step whose loss depends on the blocks on the ranks of ``used`` alone -> error, factors of a weight."""
    model = GPT(GATED)
    kfac = None if late else KFAC(model, dp=world.group)
    replica = torch.nn.parallel.DistributedDataParallel(Either(model), find_unused_parameters=True)
    replica(call_of(world.rank), world.rank in used).backward()
    kfac = kfac or KFAC(model, dp=world.group)
    message = said(kfac.step) if late else kfac.step()
    return message, [x for p in kfac.matrices.parameters() for x in kfac.state[p].values()]


def test_a_weight_that_one_replica_does_not_use(ranks):
    """Its gradient is of the others' rows, as are its factors: no error, unless nobody has captured them."""
    (first, factors), (second, others) = ranks(2, on_one_replica, (1,))
    assert first is second is None and factors and all(map(torch.equal, factors, others))
    for message, _ in ranks(2, on_one_replica, (1,), True):
        assert "blocks.0.attention.qkv.weight" in message and "have not been captured" in message


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_gradient_of_zeros_is_an_update_of_zeros(dtype):
    """Of weights in front of ones that are 0, as some start, and of a step without labels."""
    model, kfac, _ = made(dtype=dtype)
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.out.weight)
        torch.nn.init.zeros_(block.mlp.fc2.weight)
    before = whole(model)
    model(**call_of(0), step=0).loss.backward()
    kfac.step()
    changed = [name for name, x in whole(model).items() if not torch.equal(x, before[name] * (1 - 0.01 * 0.1))]
    assert "blocks.0.mlp.fc2.weight" in changed and "blocks.0.mlp.fc1.weight" not in changed
    assert all(p.isfinite().all() for p in model.parameters())
    model, kfac, _ = made(dtype=dtype)
    before, call = whole(model), call_of(0)
    model(**call | dict(labels=torch.full_like(call["labels"], -100)), step=0).loss.backward()
    kfac.step()
    after = whole(model)
    torch.testing.assert_close(after["blocks.0.mlp.fc1.weight"], before["blocks.0.mlp.fc1.weight"] * 0.999)


def unlike(world):
    """-> errors of numbers that are another on rank 1: of a KFAC, of one that only rank 1 cannot have, at a step"""
    model, odd = GPT(STEP_CONFIG, tp=make_tp(world)), world.rank == 1
    errors = [said(lambda: KFAC(model, refresh=1 + odd)), said(lambda: KFAC(model, lr=-1.0 if odd else 1.0))]
    kfac = KFAC(model)
    model(**batch(STEP_CONFIG)).loss.backward()
    kfac.param_groups[0]["lr"] *= 1 + odd
    return [*errors, said(kfac.step)]


def test_numbers_are_the_same_on_every_rank(ranks):
    first, second = ranks(2, unlike)
    assert first == second
    refresh, negative, rate = first
    assert refresh == "KFAC: refresh must be the same on every tensor-parallel rank, got rank 0: 1; rank 1: 2"
    assert "KFAC: lr must be at least 0 and finite, got -1.0" in negative
    assert rate == "KFAC.step: lr must be the same on every tensor-parallel rank, got rank 0: 0.001; rank 1: 0.002"


def refused(world):
    errors = {}
    copied = GPT(replace(STEP_CONFIG, num_kv_heads=1), tp=make_tp(world))
    errors["kv"] = said(lambda: KFAC(copied))
    view = tpfuse.as_dtensor(GPT(STEP_CONFIG, tp=make_tp(world)), world.mesh(1, world.size))
    errors["dtensor"] = said(lambda: KFAC(view))
    errors["dp"] = said(lambda: KFAC(GPT(STEP_CONFIG)))
    other = GPT(STEP_CONFIG, dp=world.group)
    errors["another dp"] = said(lambda: KFAC(other, dp=world.mesh(1, world.size)["dp"]))
    errors["bitwise"] = said(lambda: KFAC(GPT(STEP_CONFIG, tp=TensorParallel(world.group, bitwise=4))))
    pieces = GPT(STEP_CONFIG, tp=TensorParallel(cp=world.pieces(1, world.size, 1)["cp"]))
    errors["cp"] = said(lambda: KFAC(pieces))
    model = GPT(STEP_CONFIG, tp=make_tp(world))
    model(**batch(STEP_CONFIG)).loss.backward()
    late = KFAC(model)
    errors["late"] = said(late.step)
    errors["twice"] = said(lambda: KFAC(model))
    return errors


def test_what_is_refused_says_why(ranks):
    for found in ranks(2, refused):
        assert "blocks.0.attention.qkv.kv is held by 2 ranks at tensor-parallel size 2" in found["kv"]
        assert "blocks.0.attention.qkv.weight is a DTensor" in found["dtensor"]
        assert "KFAC: 2 ranks are more than the 1 of tensor parallelism" in found["dp"]
        assert "KFAC: GPT was given dp=[0, 1], and dp here is [" in found["another dp"]
        assert "KFAC's sums are not by leaves" in found["bitwise"]
        assert "KFAC is not built for context parallelism" in found["cp"]
        assert "of blocks.0.attention.qkv.weight" in found["late"] and "have not been captured" in found["late"]
        assert "KFAC: blocks.0.attention.qkv.weight has a KFAC already" in found["twice"]


def test_refused_in_one_process():
    adapted = tpfuse.add_lora(GPT(STEP_CONFIG), rank=2, alpha=4)
    assert "KFAC: GPT has no weight of a parallel linear layer to train" in said(lambda: KFAC(adapted or GPT))
    assert "lr must be at least 0" in said(lambda: KFAC(GPT(STEP_CONFIG), lr=-1.0))
    assert "KFAC: lr must be a number, got None" in said(lambda: KFAC(GPT(STEP_CONFIG), lr=None))
    model = GPT(STEP_CONFIG)
    assert "KFAC: model must be a module" in said(lambda: KFAC(model.parameters()))
    assert "KFAC: dp must be a DeviceMesh of one dimension or a ProcessGroup that this process is in, got 'x'" in said(
        lambda: KFAC(model, dp="x")
    )
    kfac, main = KFAC(model), tpfuse.MainGrad(model)
    assert "KFAC has the weights of its model's layers alone" in said(lambda: kfac.add_param_group(dict(params=[])))
    with pytest.raises(TypeError, match="cannot be copied; use state_dict"):
        copy.deepcopy(kfac)
    state = kfac.state_dict()
    state["param_groups"][0]["refresh"] = 0
    assert "KFAC.load_state_dict: refresh must be a positive integer, got 0" in said(
        lambda: kfac.load_state_dict(state)
    )
    model(**batch(STEP_CONFIG)).loss.backward()
    main.reduce()
    assert "MainGrad: the optimizer holds blocks.0" in said(kfac.step)


def test_blocks_of_another_model_stay_one_node():
    calls = []

    def counted(right, *args):
        calls.append(1)
        return right(*args)

    model, kfac, _ = made()
    other = GPT(GATED)
    with planted("tpfuse.layers.block.one_node", counted):
        model(**call_of(0)).loss.backward()
        assert not calls and kfac.param_groups
        other(**call_of(0)).loss.backward()
        assert len(calls) == GATED.num_layers


@pytest.mark.slow
def test_a_compiled_block_is_not_captured():
    model = GPT(STEP_CONFIG)
    for block in model.blocks:
        block.compile(backend="eager")
    kfac = KFAC(model)
    model(**batch(STEP_CONFIG)).loss.backward()
    assert "neither a compiled module" in said(kfac.step)
