"""State dictionaries of a split model in the hands of torch: whatever reads one, reads the whole."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.common import assert_equal, make_tp
from tests.models.common import STEP_CONFIG, batch, whole
from tests.training.foreign.common import Double
from tpfuse import TensorParallel, param_groups
from tpfuse.layers import ParallelAttention, ParallelMLP
from tpfuse.layers.shards import named_specs
from tpfuse.models import GPT
from tpfuse.models.files.write import full_tensor

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}),
    "foreach": (torch.optim.AdamW, dict(foreach=True)),
    "fused": (torch.optim.AdamW, dict(fused=True)),
    "amsgrad": (torch.optim.AdamW, dict(amsgrad=True, lr=torch.tensor(1e-2), foreach=False)),
    "momentum": (torch.optim.SGD, dict(momentum=0.9)),
}


def trained(world, dp=1, seed=0, steps=1, optimizer="adamw"):
    """A model, its optimizer, and steps on the same batch everywhere."""
    mesh = world.mesh(dp, world.size // dp)
    model = GPT(STEP_CONFIG, tp=TensorParallel(mesh["tp"]), dp=mesh["dp"], seed=seed)
    cls, options = OPTIMIZERS[optimizer]
    optimizer = cls(param_groups(model, 0.1), **dict(dict(lr=1e-2), **options))
    for _ in range(steps):
        model(**batch(STEP_CONFIG), first_sample=0).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def all_of(model, optimizer):
    """Weights and states as whole tensors, without a state dictionary."""
    found = whole(model)
    for name, p, spec, tp in named_specs(model):
        for key, value in optimizer.state[p].items():
            found[f"{name} {key}"] = full_tensor(value, spec, tp).clone() if value.shape == p.shape else value.clone()
    return found


# ---- torch.distributed.checkpoint ----


def plain(model, optimizer):
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def load_plain(model, optimizer, state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


def helpers(model, optimizer, options=None):
    found = get_state_dict(model, optimizer, options=options)
    return dict(zip(("model", "optim"), found, strict=True))


def load_helpers(model, optimizer, state, options=None):
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
IDIOMS = {
    "plain": (plain, load_plain),
    "helpers": (helpers, load_helpers),
    "flat": (lambda m, o: helpers(m, o, FLAT), lambda m, o, s: load_helpers(m, o, s, FLAT)),
}


def save(world, path, dp, idiom, kind, asynchronous):
    model, optimizer = trained(world, dp, optimizer=kind)
    exact = all_of(model, optimizer)
    if asynchronous:
        future = dcp.async_save(IDIOMS[idiom][0](model, optimizer), checkpoint_id=path)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        future.result()
    else:
        dcp.save(IDIOMS[idiom][0](model, optimizer), checkpoint_id=path)
    return exact


def load(world, path, dp, idiom, kind):
    model, optimizer = trained(world, dp, seed=1, optimizer=kind)
    get, put = IDIOMS[idiom]
    state = get(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    put(model, optimizer, state)
    found = all_of(model, optimizer)
    model(**batch(STEP_CONFIG), first_sample=0).loss.backward()
    optimizer.step()  # what was loaded is of use
    assert not any(isinstance(v, DTensor) for s in optimizer.state.values() for v in s.values())
    return found


@pytest.mark.parametrize(
    "idiom, optimizer, asynchronous",
    [
        ("plain", "adamw", False),
        pytest.param("helpers", "foreach", True, marks=pytest.mark.slow),
        pytest.param("flat", "fused", False, marks=pytest.mark.slow),
        pytest.param("plain", "amsgrad", True, marks=pytest.mark.slow),
        pytest.param("plain", "momentum", False, marks=pytest.mark.slow),
    ],
)
def test_dcp_at_any_split(ranks, tmp_path, idiom, optimizer, asynchronous):
    exact = ranks(4, save, tmp_path, 2, idiom, optimizer, asynchronous)[0]
    for size, dp in ((4, 4), (4, 1), (1, 1)):
        for found in ranks(size, load, tmp_path, dp, idiom, optimizer):
            assert_equal(found, exact)


def in_full(world, dp):
    """-> the whole on rank 0's CPU, by torch's helpers."""
    model, optimizer = trained(world, dp)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    parts = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    return parts, all_of(model, optimizer)


def from_full(world, dp, parts):
    model, optimizer = trained(world, dp, seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world.size > 1)
    of_model, of_optimizer = parts if world.rank == 0 else ({}, {})
    set_model_state_dict(model, of_model, options=options)
    set_optimizer_state_dict(model, optimizer, of_optimizer, options=options)
    return all_of(model, optimizer)


def test_full_state_dicts(ranks):
    parts, exact = ranks(2, in_full, 1)[0]
    assert_equal({k: v for k, v in exact.items() if " " not in k}, parts[0])
    for name in parts[0]:
        assert torch.equal(parts[1]["state"][name]["exp_avg_sq"], exact[f"{name} exp_avg_sq"])
    for size, dp in ((4, 2), (1, 1)):
        for found in ranks(size, from_full, dp, parts):
            assert_equal(found, exact)


# ---- files and dictionaries of one rank ----


def per_rank(world, path):
    """Written with torch.save, read in the same job: another model of the same split."""
    (model, optimizer), other = trained(world), trained(world, seed=1)
    torch.save(plain(model, optimizer), path / f"{world.rank}.pt")
    load_plain(*other, torch.load(path / f"{world.rank}.pt", weights_only=True))
    assert_equal(all_of(*other), all_of(model, optimizer))
    return all_of(model, optimizer)


def per_rank_again(world, path):
    """In another job, whose groups have other names; without a step before, and of another rank's file."""
    model, optimizer = trained(world, dp=world.size // 2, seed=1, steps=0)
    torch.distributed.new_group(backend="gloo")
    load_plain(model, optimizer, torch.load(path / f"{model.tp.rank}.pt", weights_only=True))
    found = all_of(model, optimizer)
    state = torch.load(path / f"{1 - model.tp.rank}.pt", weights_only=True)
    errors = []
    for part in (model, optimizer):
        with pytest.raises(ValueError) as caught:
            part.load_state_dict(state["model" if part is model else "optim"])
        errors.append(str(caught.value))
    assert_equal(all_of(model, optimizer), found)
    return found, errors


def test_torch_save_of_every_rank(ranks, tmp_path):
    exact = ranks(2, per_rank, tmp_path)[0]
    for size in (4, 2):
        for rank, (found, (of_model, of_optimizer)) in enumerate(ranks(size, per_rank_again, tmp_path)):
            assert_equal(found, exact)
            here, there = ("0:49", "49:97") if rank % 2 == 0 else ("49:97", "0:49")
            assert "embedding.weight must be elements" in of_model and "parameter 0" in of_optimizer
            assert f"[{here}, 0:48] of (97, 48)" in of_model and f"[{there}, 0:48] of (97, 48)" in of_model


def dictionaries(world):
    model, optimizer = trained(world)
    exact, state = whole(model), model.state_dict()
    split = [name for name, _, spec, _ in named_specs(model) if spec.dim is not None]
    assert [name for name, v in state.items() if isinstance(v, DTensor)] == split
    for name, p in model.named_parameters():
        v = state[name].to_local() if name in split else state[name]
        assert v.data_ptr() == p.data_ptr() and not v.requires_grad
    assert_equal({k: v.full_tensor() if k in split else v for k, v in copy.deepcopy(state).items()}, exact)
    kept = model.state_dict(keep_vars=True)
    assert kept["input_norm.weight"] is model.input_norm.weight
    (grad,) = torch.autograd.grad(kept["embedding.weight"].to_local().sum(), model.embedding.weight)
    assert (grad == 1).all()

    ema, before = {k: v.clone() for k, v in state.items()}, exact
    for p in model.parameters():
        p.data.add_(1)
    for k, v in model.state_dict().items():
        ema[k].lerp_(v, 0.5)
    assert model.load_state_dict(ema) == ([], [])
    assert all(torch.allclose(v, before[k] + 0.5, atol=1e-6) for k, v in whole(model).items())

    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    again = torch.optim.swa_utils.AveragedModel(trained(world, seed=1, steps=0)[0])
    again.load_state_dict(averaged.state_dict())
    assert_equal(whole(again.module), whole(model))

    fresh = trained(world, seed=1, steps=0)[0]
    part = {k: v for k, v in model.state_dict().items() if "norm" not in k}
    missing, extra = fresh.load_state_dict(part, assign=True, strict=False)
    assert all("norm" in k for k in missing) and not extra
    assert not any(isinstance(p, DTensor) for p in fresh.parameters())
    assert fresh.embedding.weight.data_ptr() == model.embedding.weight.data_ptr()
    return {k: v.clone() for k, v in whole(model).items()}


def test_dictionaries_of_one_rank(ranks):
    first, second = ranks(2, dictionaries)
    assert_equal(first, second)


def wrapped(world):
    """DDP's and torch.compile's names; a whole plain dictionary, of one process or of torch, at any split."""
    model, optimizer = trained(world, dp=2)
    mesh = world.mesh(2, world.size // 2)
    replica = torch.nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    compiled = torch.compile(model)
    alone = GPT(STEP_CONFIG, seed=3)
    for outer, prefix in ((replica, "module."), (compiled, "_orig_mod.")):
        state = outer.state_dict()
        assert isinstance(state[f"{prefix}embedding.weight"], DTensor) == (model.tp.size > 1)
        outer.load_state_dict({prefix + k: torch.zeros_like(v) for k, v in alone.state_dict().items()})
        assert not any(p.any() for p in model.parameters())
        outer.load_state_dict(state | {prefix + k: v for k, v in alone.state_dict().items()})
        assert_equal(whole(model), dict(alone.state_dict()))
    with pytest.raises(RuntimeError, match="size mismatch for head.bias|size mismatch for embedding.weight"):
        model.load_state_dict({k: v[:-1] for k, v in alone.state_dict().items()})
    return True


@pytest.mark.slow
def test_wrappers_and_whole_dictionaries(ranks):
    assert all(ranks(4, wrapped))


def layers(world):
    """Fused projections, kv heads that several ranks hold, parametrized weights: each knows its whole."""
    tp, found = make_tp(world, False), {}
    torch.manual_seed(0)
    attention = ParallelAttention(16, 8, num_kv_heads=2, tp=tp)
    mlp = ParallelMLP(8, 12, gated=True, tp=tp)

    torch.nn.utils.parametrize.register_parametrization(mlp.fc1, "weight", Double())
    for layer in (attention, mlp):
        state = layer.state_dict()
        before = {k: p.clone() for k, p in layer.named_parameters()}
        taken = {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}
        with torch.no_grad():
            for p in layer.parameters():
                p.zero_()
        found |= taken
        layer.load_state_dict(taken)
        assert_equal(dict(layer.named_parameters()), before)
    return {k: v.detach() for k, v in found.items()}


def test_layers(ranks):
    exact, two, four = (ranks(R, layers)[0] for R in (1, 2, 4))
    assert_equal(two, exact)
    kv = four["qkv.kv"]  # beyond the number of kv heads the layout is another, with each rank's copy
    assert kv.shape == (4, 2, 2, 16) and torch.equal(kv[::2], exact["qkv.weight"][:, 4:])
    assert torch.equal(four["qkv.q"].view(2, 4, 2, 16), exact["qkv.weight"][:, :4])
    assert_equal(*({k: v for k, v in x.items() if "qkv" not in k} for x in (four, exact)))


def copied_kv(world, path, write):
    model = torch.nn.ModuleDict({"attention": ParallelAttention(16, 8, num_kv_heads=2, tp=make_tp(world))})
    state = model.state_dict()
    before = {k: p.clone() for k, p in model.named_parameters()}
    if write:
        dcp.save(state, checkpoint_id=path)
    else:
        with pytest.raises(dcp.api.CheckpointException, match="Missing key in checkpoint state_dict: attention.qkv"):
            dcp.load(state, checkpoint_id=path)
    assert_equal(dict(model.named_parameters()), before)
    return True


def test_another_layout_of_kv_heads_is_refused_by_name(ranks, tmp_path):
    assert all(ranks(4, copied_kv, tmp_path, True)) and all(ranks(2, copied_kv, tmp_path, False))


class Odd(torch.optim.SGD):
    """A state that is not shaped as the parameter."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["row"] = p.new_zeros(len(p), 1)


def odd_state(world):
    model, _ = trained(world, steps=0)
    optimizer = Odd(model.parameters())
    model(**batch(STEP_CONFIG), first_sample=0).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError) as caught:
        optimizer.state_dict()
    return str(caught.value)


def test_states_that_do_not_know_the_whole(ranks):
    for rank, error in enumerate(ranks(2, odd_state)):
        assert f"Optimizer.state_dict: row of shape ({49 - rank}, 1) belongs to a parameter" in error


def plain_fsdp(world):
    from torch.distributed.fsdp import fully_shard

    mesh = world.mesh(2, 2)
    model = GPT(STEP_CONFIG, tp=TensorParallel(mesh["tp"]), dp=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="call tpfuse.as_dtensor before fully_shard"):
        model.state_dict()
    return True


def test_fully_shard_of_plain_shards_is_refused(ranks):
    assert all(ranks(4, plain_fsdp))


def alone(world):
    """At tensor-parallel size 1 everything is as torch has it."""
    model, optimizer = trained(world)
    state = plain(model, optimizer)
    for i, p in enumerate(q for g in optimizer.param_groups for q in g["params"]):
        assert state["optim"]["state"][i]["exp_avg"] is optimizer.state[p]["exp_avg"]
    assert not any(isinstance(v, DTensor) for v in state["model"].values())
    buffer: Any = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    return True


def test_one_rank(ranks):
    assert ranks(1, alone)[0]
