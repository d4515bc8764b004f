"""Partial gradients are named on every rank, at the first backward, step or save; complete ones pass."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tpfuse
from tests.common import Recorder, make_tp, my_rows
from tests.planted import planted
from tests.pool import Pool
from tpfuse import TensorParallel
from tpfuse.layers import ParallelModule, TransformerBlock, collect
from tpfuse.layers import partial as checks
from tpfuse.layers.partial import check_gradients, warn_of_drift
from tpfuse.models import GPT, GPTConfig

M, D = 16, 8


class Shard(ParallelModule):
    """A user's own layer, whose parameter is the same on every rank and is used on this rank's rows."""

    def __init__(self, tp):
        super().__init__(tp)
        self.add_parameter("scale", (D,), None, "ones")
        self.initialize_alone()

    def forward(self, x):
        return x * self.scale


class Model(nn.Module):
    def __init__(self, plain, tp, after=None):
        super().__init__()
        torch.manual_seed(0)
        self.tp = tp
        self.enter = TransformerBlock(D, 4, tp=tp)
        self.plain, self.after = plain, after

    def forward(self, x):
        h = self.plain(self.enter(my_rows(x, self.tp), batch=2))
        return h if self.after is None else self.after(collect(h, self.tp) if self.tp.sequence_parallel else h)


def rows():
    return torch.randn(M, D, generator=torch.Generator().manual_seed(1))


def words_of(call) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def loss_of(model):
    y = model(rows())
    return (y * (my_rows(rows().roll(1), model.tp) if len(y) < M else rows().roll(1))).sum()


def model_of(world, kind, sp=True):
    torch.manual_seed(0)
    tp = make_tp(world, sp)
    if kind == "wrapped in ddp":
        mesh = world.mesh(2, 2)
        tp = TensorParallel(mesh["tp"], sequence_parallel=sp)
        model = Model(nn.Linear(D, D), tp)
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True)
        wrapped.tp = tp
        return wrapped
    plain = {
        "linear": lambda: nn.Linear(D, D),
        "before a norm": lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D, elementwise_affine=False)),
        "norm": lambda: nn.LayerNorm(D),
        "own layer": lambda: Shard(tp),
        "complete": lambda: tpfuse.replicated(nn.Linear(D, D), tp),
    }[kind]()
    return Model(plain, tp, nn.Linear(D, D) if kind == "complete" else None)


NAMED = {
    "linear": "plain.weight, plain.bias;",
    "before a norm": "plain.0.weight, plain.0.bias;",
    "norm": "plain.weight, plain.bias;",
    "own layer": "plain.scale;",
    "wrapped in ddp": "module.plain.weight, module.plain.bias;",
}


def backward(world, kind):
    model = model_of(world, kind)
    return words_of(lambda: loss_of(model).backward())


@pytest.mark.parametrize("kind", NAMED)
def test_the_first_backward_names_them(ranks, kind):
    first, *others = ranks(4 if kind == "wrapped in ddp" else 2, backward, kind)
    assert first.startswith(f"backward: not every tensor-parallel rank has the same gradient of {NAMED[kind]}")
    assert "tpfuse.replicated(module, tp)" in first and "ParallelModule.add_parameter(..., dim=...)" in first
    assert all(other == first for other in others)


def one_rank_only(world):
    """A parameter that has a gradient on one rank only."""
    model = model_of(world, "complete")
    model.idle = nn.Linear(D, D)
    loss = loss_of(model)
    loss = loss + model.idle.weight.sum() if world.rank == 1 else loss
    return words_of(loss.backward)


def test_a_gradient_on_some_ranks_only_is_named(ranks):
    for words in ranks(2, one_rank_only):
        assert "the same gradient of idle.weight;" in words


def step(world, foreign):
    """The compiled forward is not watched, so that the step is the first to see."""
    model = model_of(world, "linear")
    h = model.enter(my_rows(rows(), model.tp), batch=2).detach()
    (model.plain(h).square().sum()).backward()
    before = model.plain.weight.clone()
    optimizer = torch.optim.SGD(model.parameters() if foreign else model.plain.parameters(), lr=1.0)
    words = words_of(optimizer.step) if foreign else optimizer.step()
    return words, torch.equal(before, model.plain.weight)


def test_the_first_step_names_them_before_anything_is_changed(ranks):
    for words, unchanged in ranks(2, step, True):
        assert "SGD.step: not every tensor-parallel rank has the same gradient of parameter " in words
        assert "(Linear.weight (8, 8)), parameter" in words and unchanged


def test_an_optimizer_without_a_split_parameter_is_nobodys_business(ranks):
    """Another model in the process, which may well differ between ranks."""
    assert ranks(2, step, False) == [(None, False)] * 2


def stepped_beside_another(world):
    """One pair of ranks has had a layer of its own before, across the pairs that train; the other pair has not."""
    pairs = world.mesh(2, 2)
    if world.rank in (0, 2):
        Shard(TensorParallel(pairs["dp"]))
    config = GPTConfig(vocab_size=17, max_positions=M, hidden_size=D, num_layers=1, num_heads=2)
    model = GPT(config, tp=TensorParallel(pairs["tp"]), dp=pairs["dp"])
    ids = torch.arange(M)[None]
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_step_waits_for_nobody_who_has_other_layers_in_the_process():
    """In processes that have run nothing before."""
    fresh = Pool()
    try:
        fresh(4, stepped_beside_another)
    finally:
        fresh.close()


def asked(world):
    model = model_of(world, "linear")
    with pytest.raises(ValueError):
        loss_of(model).backward()
    before = model.plain.weight.grad.clone()
    words = words_of(lambda: tpfuse.clip_grad_norm_(model, 1e-3))
    return words, torch.equal(before, model.plain.weight.grad)


def test_clipping_names_them_before_anything_is_changed(ranks):
    for words, unchanged in ranks(2, asked):
        assert words.startswith("clip_grad_norm_: not every tensor-parallel rank has") and unchanged


# ---- complete ones pass ----


def trained(world, sp):
    """-> the calls that compared, of five steps; and whether hooks are left."""
    model = model_of(world, "complete", sp)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    with planted("tpfuse.layers.partial._compare", lambda right, *args: seen.append(1) or right(*args)):
        for _ in range(5):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    left = sum(hook is checks._after_forward for m in model.modules() for hook in m._forward_hooks.values())
    return len(seen), left, copy.deepcopy(model).after.weight


@pytest.mark.parametrize("sp", [True, False])
def test_complete_gradients_pass_and_are_compared_once(ranks, sp):
    first, second = ranks(2, trained, sp)
    assert first[:2] == second[:2] == (2, 0)  # a backward pass and a step
    assert torch.equal(first[2], second[2])


def late(world):
    """A parameter whose gradient is 0 at first, by an initial weight of 0: it is seen when it has one."""
    model = model_of(world, "linear")
    model.gate = nn.Parameter(torch.zeros(()))
    forward = lambda x: x * model.gate
    model.plain.register_forward_hook(lambda module, args, out: forward(out))
    calls = []
    for i in range(4):
        try:
            model(rows()).sum().backward()
            calls.append(None)
        except ValueError as error:
            calls.append(str(error))
        with torch.no_grad():
            model.gate.fill_(0.0 if i < 1 else 1.0)
        for p in model.parameters():
            p.grad = None
    return calls


def test_a_gradient_that_comes_late_is_compared_too(ranks):
    for calls in ranks(2, late):
        assert "same gradient of gate;" in calls[0]  # whose own is there at once
        assert "plain.weight" in calls[3]


def again(world):
    """A backward pass that fails in the middle does not end the watch."""
    model = model_of(world, "linear")
    loss = loss_of(model)
    model.enter.mlp.fc1.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    model.enter.mlp.fc1.weight._backward_hooks.clear()
    return words_of(lambda: loss_of(model).backward())


def test_a_failed_backward_does_not_end_the_watch(ranks):
    assert all("plain.weight" in words for words in ranks(2, again))


def library(world):
    tp = make_tp(world)
    config = GPTConfig(vocab_size=23, max_positions=8, hidden_size=8, num_layers=1, num_heads=2)
    model, ids = GPT(config, tp=tp), torch.arange(8)[None]
    model(ids, labels=ids).loss.backward()
    model.input_norm.weight.grad *= 1 + world.rank  # nobody looks
    with Recorder() as seen:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return check_gradients(model), seen.messages()


def test_the_models_of_the_library_have_nothing_to_compare(ranks):
    assert ranks(2, library) == [(True, [])] * 2


def drifted(world):
    model = model_of(world, "complete")
    with warnings.catch_warnings(record=True) as none:
        warnings.simplefilter("always")
        warn_of_drift(model, "save_checkpoint")
    with torch.no_grad():
        model.plain.weight += world.rank
    with pytest.warns(UserWarning) as caught:
        warn_of_drift(model, "save_checkpoint")
    return len(none), str(caught[0].message)


def test_values_that_have_drifted_apart_are_a_warning(ranks):
    for none, words in ranks(2, drifted):
        assert none == 0
        assert words.startswith(
            "save_checkpoint: plain.weight should be the same on every tensor-parallel rank and differ"
        )


def saved(world, folder):
    """A run is not lost for it: the checkpoint is written."""
    model = model_of(world, "complete")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.plain.weight += world.rank
    with pytest.warns(UserWarning, match="save_checkpoint: plain.weight should be the same"):
        path = tpfuse.save_checkpoint(folder, model, optimizer, step=1)
    return path.is_dir()


def test_a_save_warns_and_saves(ranks, tmp_path):
    assert ranks(2, saved, str(tmp_path)) == [True, True]
