"""The hook under DistributedDataParallel, on real processes."""

import copy
import types
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tpfuse
from tests.models.common import STEP_CONFIG, batch, default_dtype
from tpfuse import OkTopk, TensorParallel, ok_topk_hook
from tpfuse.models import GPT

BUCKETS = 0.005  # MB


def net(dtype=torch.float64, extra=False):
    torch.manual_seed(0)
    layers = [nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 1)]
    model = nn.Sequential(*layers).to(dtype)
    if extra:
        model.register_parameter("unused", nn.Parameter(torch.ones(7, dtype=dtype)))
        model.register_parameter("empty", nn.Parameter(torch.ones(0, dtype=dtype)))
        model[2].bias.requires_grad_(False)
    return model


def rows(step, rank, dtype=torch.float64):
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64).to(dtype)
    return x, 2 * x[:, :1]


def loss_of(model, step, rank, dtype=torch.float64):
    x, y = rows(step, rank, dtype)
    return (model(x) - y).square().mean()


def hooked(model, density=0.05, group=None, hook=ok_topk_hook, **options):
    ddp_options = {key: options.pop(key) for key in list(options) if key in ("find_unused_parameters",)}
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKETS, **ddp_options)
    state = OkTopk(density, group=group, **options)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def gradients(model):
    """Zeros where there is none."""
    every = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in every])


def residuals(model, state):
    parts = {id(p): part for unit in state.units for p, part in unit.parts()}
    return torch.cat([parts[id(p)].flatten() for p in model.parameters() if id(p) in parts])


def trained(world, density, steps, dtype, extra):
    """-> of each step the averages, this rank's own gradient at the same weights, and its residual"""
    model = net(dtype, extra)
    ddp, state = hooked(model, density, find_unused_parameters=extra)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(steps):
        alone = copy.deepcopy(model)
        loss_of(alone, step, world.rank, dtype).backward()
        loss_of(ddp, step, world.rank, dtype).backward()
        found.append((gradients(model), gradients(alone), residuals(model, state).clone()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("extra", [False, True], ids=["plain", "frozen, unused and empty parameters"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_given_and_what_is_kept_is_what_there_was(ranks, size, extra):
    every = ranks(size, trained, 0.05, 5, torch.float64, extra)
    given = had = 0
    for steps in zip(*every, strict=True):
        averages, owns, kept = zip(*steps, strict=True)
        assert all(torch.equal(averages[0], other) for other in averages)
        assert 0 < averages[0].count_nonzero() < 0.4 * averages[0].numel()
        given, had = given + size * averages[0], had + sum(owns)
        torch.testing.assert_close(given + sum(kept), had, rtol=1e-12, atol=1e-13)


def test_at_density_one_it_is_the_average(ranks):
    for steps in zip(*ranks(3, trained, 1.0, 4, torch.float64, False), strict=True):
        averages, owns, _ = zip(*steps, strict=True)
        torch.testing.assert_close(averages[0], sum(owns) / 3, rtol=1e-12, atol=1e-14)


def test_residuals_of_narrow_gradients_are_wide(ranks):
    for averages, _, kept in ranks(2, trained, 0.05, 3, torch.bfloat16, False)[0]:
        assert (averages.dtype, kept.dtype) == (torch.bfloat16, torch.float32)


SETTINGS = {"density": dict(density=0.1), "warmup_steps": dict(warmup_steps=3), "exact_every": dict(exact_every=7)}


def disagreeing(world, name):
    model, other = net(), SETTINGS[name] if world.rank else {}
    ddp, state = hooked(model, **(dict(density=0.05) | other))
    with pytest.raises(ValueError) as caught:
        loss_of(ddp, 0, world.rank).backward()
    dist.barrier()
    return str(caught.value), state.step, state.units


@pytest.mark.parametrize("name", SETTINGS)
def test_replicas_that_differ_in_a_setting(ranks, name):
    """Before anything of the step is sent: a smaller count of entries would be read as another message's bytes."""
    first, second = ranks(2, disagreeing, name)
    assert first == second and first[1:] == (0, [])
    assert f"ok_topk_hook: {name} must be the same on every data-parallel rank, got rank 0: " in first[0]


def warm(world):
    """-> which steps are those of plain DistributedDataParallel, and what is sent, of all and of values and indices"""
    model = net()
    ddp, state = hooked(model, 0.05, warmup_steps=6)
    plain = DistributedDataParallel(net(), bucket_cap_mb=BUCKETS)
    same, sent, entries, had, given = [], [], [], 0, 0
    for step in range(8):
        for each in (ddp, plain):
            each.zero_grad()
            loss_of(each, step, world.rank).backward()
        same.append(torch.allclose(gradients(ddp), gradients(plain), rtol=1e-12))
        sent.append(state.sent)
        entries.append(state.sent_entries)
        had, given = had + gradients(plain), given + gradients(ddp)
    return dict(same=same, sent=sent, entries=entries, had=had, given=given, kept=residuals(model, state))


def test_density_falls_over_the_warm_up(ranks):
    """0.05 ** (step / 6): 1, 0.61, 0.37, then 0.22, 0.14, 0.08 and 0.05.  Whole gradients are sent while entries could
    be more, counted as a ring of two sends them: their size once, beside a byte for every parameter."""
    every = ranks(2, warm)
    for one in every:
        size, sent, entries = one["had"].nbytes, one["sent"], one["entries"]
        assert one["same"] == [True] * 3 + [False] * 5
        assert all(size < whole < 1.01 * size for whole in sent[:3]) and entries[:3] == [0] * 3
        assert all(later < 0.8 * before for before, later in zip(entries[3:6], entries[4:7], strict=True))
        assert max(sent[3:]) < size and 0.8 * entries[6] < entries[7] < 1.25 * entries[6]
    kept = sum(one["kept"] for one in every) / 2
    torch.testing.assert_close(every[0]["given"] + kept, every[0]["had"], rtol=1e-12, atol=1e-13)


def accumulated(world):
    """-> gradients of two micro-batches under no_sync, and of a hook that is given their sum at once"""
    model = net()
    ddp, _ = hooked(model)
    with ddp.no_sync():
        loss_of(ddp, 0, world.rank).backward()
    loss_of(ddp, 1, world.rank).backward()
    other, _ = hooked(net())
    (loss_of(other.module, 0, world.rank)).backward()
    loss_of(other, 1, world.rank).backward()
    return torch.equal(gradients(model), gradients(other))


def test_no_sync(ranks):
    assert ranks(2, accumulated) == [True, True]


def uneven(world):
    model = net()
    ddp, state = hooked(model)
    with ddp.join():
        for step in range(2 + world.rank):
            ddp.zero_grad()
            loss_of(ddp, step, world.rank).backward()
    return state.step


def test_ranks_with_fewer_batches_join(ranks):
    assert ranks(2, uneven) == [3, 3]


def spoilt(world, value):
    model = net()
    ddp, state = hooked(model)
    loss_of(ddp, 0, world.rank).backward()
    before, said = residuals(model, state).clone(), None
    x, y = rows(1, world.rank)
    if world.rank == 1:
        x[0, 0] = value
    try:
        (ddp(x) - y).square().mean().backward()
    except ValueError as error:
        said = str(error)
    kept = torch.equal(before, residuals(model, state))
    ddp.zero_grad()
    loss_of(ddp, 2, world.rank).backward()
    return said, kept, bool(torch.isfinite(gradients(model)).all()), state.step


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_on_every_rank(ranks, value):
    (said, *first), (also_said, *second) = ranks(2, spoilt, value)
    shape = {"nan": "(1,)", "inf": "(50, 20)"}[str(value)]  # of the first in its bucket: tanh of an infinity is finite
    assert f"on rank 1 of the replicas in a parameter of shape {shape}" in said
    assert (also_said, first, second) == (said, [True, True, 2], [True, True, 2])


def again(world):
    """A hook's state under a second model."""
    ddp, state = hooked(net())
    loss_of(ddp, 0, world.rank).backward()
    other = DistributedDataParallel(net())
    other.register_comm_hook(state, ok_topk_hook)
    try:
        loss_of(other, 0, world.rank).backward()
    except ValueError as error:
        return str(error)


def test_a_state_is_of_one_model(ranks):
    assert all("use a new OkTopk" in said for said in ranks(2, again))


def counted(world):
    """-> bytes that the state says it has sent, and those of the messages"""
    ddp, state = hooked(net())
    loss_of(ddp, 0, world.rank).backward()
    sizes, swap, all_gather = [], dist.batch_isend_irecv, dist.all_gather

    def swapped(works):
        sizes.extend(work.tensor.numel() * work.tensor.element_size() for work in works if work.op is dist.isend)
        return swap(works)

    def gathered(every, x, **kwargs):
        sizes.append((world.size - 1) * x.numel() * x.element_size())
        return all_gather(every, x, **kwargs)

    with mock.patch.object(dist, "batch_isend_irecv", swapped), mock.patch.object(dist, "all_gather", gathered):
        loss_of(ddp, 1, world.rank).backward()
    return state.sent, sum(sizes)


def test_every_byte_is_counted(ranks):
    for said, sent in ranks(3, counted):
        assert said == sent > 0


BAD = [
    (dict(density=0), "density"),
    (dict(density=1.5), "density"),
    (dict(density=float("nan")), "density"),
    (dict(warmup_steps=-1), "warmup_steps"),
    (dict(exact_every=0), "exact_every"),
    (dict(borders_every=1.5), "borders_every"),
]


@pytest.mark.parametrize("given, named", BAD)
def test_bad_settings_are_named(given, named):
    with pytest.raises(ValueError, match=f"OkTopk: {named} must"):
        OkTopk(**given)


def test_without_a_process_group_it_says_so():
    with pytest.raises(ValueError, match="there is no process group"):
        _ = tpfuse.OkTopk().replicas


def spoilt_slice(world):
    """-> what each rank of (dp, tp) = (2, 2) says where one rank's own slice alone has a NaN in its gradient"""
    mesh = world.mesh(2, 2)
    with default_dtype(torch.float64):
        model = GPT(STEP_CONFIG, tp=TensorParallel(mesh["tp"]), dp=mesh["dp"])
    ddp = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    ddp.register_comm_hook(OkTopk(0.05, group=mesh["dp"].get_group()), ok_topk_hook)
    weight = model.blocks[0].mlp.fc1.weight
    if world.rank == 1:
        weight.register_hook(lambda g: g * float("nan"))
    try:
        ddp(**batch(STEP_CONFIG, seed=world.rank // 2)).loss.backward()
    except ValueError as error:
        return str(error)


def test_a_nan_of_one_slice_is_an_error_of_all_tensor_parallel_ranks(ranks):
    said = ranks(4, spoilt_slice)
    assert all(each and "on rank 0 of the replicas in a parameter of shape" in each for each in said), said


CHANGES = {  # what a tensor-parallel rank has otherwise
    "density": lambda state: setattr(state, "dials", state.dials._replace(density=0.1)),
    "exact_every": lambda state: setattr(state, "dials", state.dials._replace(exact_every=3)),
    "borders_every": lambda state: setattr(state, "dials", state.dials._replace(borders_every=2)),
    "warmup_steps": lambda state: setattr(state, "warmup_steps", 5),
    "step": lambda state: setattr(state, "step", 7),
}


def sharing_heads(world):
    """Steps of four ranks, of which two hold the same kv head."""
    mesh = world.mesh(1, 4)
    with default_dtype(torch.float64):
        model = GPT(replace(STEP_CONFIG, num_kv_heads=2), tp=TensorParallel(mesh["tp"]), dp=mesh["dp"])
    group = mesh["dp"].get_group()
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(OkTopk(0.02, group=group), ok_topk_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        ddp(**batch(STEP_CONFIG, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tpfuse.check_replicas(ddp, optimizer)


def test_heads_that_ranks_share_stay_equal(ranks):
    ranks(4, sharing_heads)


def other_settings(world, whole):
    """-> what each rank of (dp, tp) = (2, 2) says of each setting, which tensor-parallel rank 1 of one replica, or of
    both, has otherwise from the second step on; and the number of steps"""
    mesh, said = world.mesh(2, 2), {}
    with default_dtype(torch.float64):
        model = GPT(STEP_CONFIG, tp=TensorParallel(mesh["tp"]), dp=mesh["dp"])
    ddp = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    state = OkTopk(0.05, group=mesh["dp"].get_group())
    ddp.register_comm_hook(state, ok_topk_hook)
    step = lambda: ddp(**batch(STEP_CONFIG, seed=world.rank // 2)).loss.backward()
    step()
    for name, change in CHANGES.items():
        before, kept = copy.copy(state), residuals(model, state).clone()
        if world.rank == 3 or (whole and world.rank == 1):
            change(state)
        with pytest.raises(ValueError) as caught:
            step()
        said[name] = str(caught.value)
        state.dials, state.warmup_steps, state.step = before.dials, before.warmup_steps, before.step
        assert torch.equal(kept, residuals(model, state))
    step()
    return said, state.step


@pytest.mark.parametrize("whole", [False, True], ids=["one rank", "a tensor-parallel rank of every replica"])
def test_settings_that_differ_over_tensor_parallel_ranks(ranks, whole):
    for said, steps in ranks(4, other_settings, whole):
        assert steps == 2
        for name, text in said.items():
            assert name in text and text.startswith("ok_topk_hook: ") and " must be the same on every " in text


def interrupted(world):
    """A backward pass that fails on all ranks between two buckets -> how many buckets the next one leaves behind"""
    model = net()
    state = OkTopk(0.05)
    first = types.SimpleNamespace(
        index=lambda: 0, is_last=lambda: False, buffer=lambda: None, gradients=list, parameters=list
    )
    state._take(first)
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKETS)
    ddp.register_comm_hook(state, ok_topk_hook)
    loss_of(ddp, 0, world.rank).backward()
    return bool(gradients(model).count_nonzero()), state.step


def test_buckets_of_a_pass_that_failed_are_forgotten(ranks):
    assert ranks(2, interrupted) == [(True, 1)] * 2


class Branches(nn.Module):
    """Two layers, of which a call uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(20, 30), nn.Linear(20, 30)])
        self.last = nn.Linear(30, 1)

    def forward(self, x, which):
        return self.last(self.branches[which](x))


def in_turn(world, views, density):
    """-> what the steps have given, this rank's gradients, and what is kept, of parameters that every other step leaves
    out on all ranks"""
    model = Branches().double()
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=BUCKETS, find_unused_parameters=True, gradient_as_bucket_view=views
    )
    state = OkTopk(density)
    ddp.register_comm_hook(state, ok_topk_hook)
    given = had = 0
    for step in range(6):
        alone = copy.deepcopy(model)
        x, y = rows(step, world.rank)
        for each in (alone, ddp):
            each.zero_grad()
            (each(x, step % 2) - y).square().mean().backward()
        given, had = given + gradients(model), had + gradients(alone)
    return given, had, residuals(model, state)


@pytest.mark.parametrize("views, density", [(False, 0.05), (True, 0.05), (False, 0.9)])
def test_a_parameter_that_no_rank_uses_keeps_its_residual(ranks, views, density):
    """DDP leaves out what a hook gives it."""
    (given, *_), *_ = every = ranks(2, in_turn, views, density)
    had, kept = (sum(each) for each in list(zip(*every, strict=True))[1:])
    torch.testing.assert_close(2 * given + kept, had, rtol=1e-12, atol=1e-13)


def joined_and_spoilt(world):
    """The last rank's last gradient is not finite, when the others have joined -> what each rank is told"""
    ddp, _ = hooked(net())
    try:
        with ddp.join():
            for step in range(1 + world.rank):
                x, y = rows(step, world.rank)
                ((ddp(x) - y).square().mean() * (float("nan") if step == world.size - 1 else 1)).backward()
    except ValueError as error:
        return str(error)


def test_a_gradient_that_is_not_finite_is_named_on_ranks_that_have_joined(ranks):
    first, *others = ranks(3, joined_and_spoilt)
    assert "on rank 2 of the replicas" in first and others == [first, first]


def with_sparse_gradients(world):
    embedding = DistributedDataParallel(nn.Embedding(7, 3, sparse=True))
    embedding.register_comm_hook(OkTopk(), ok_topk_hook)
    with pytest.raises(ValueError) as caught:
        embedding(torch.arange(3)).sum().backward()
    return str(caught.value)


def test_sparse_gradients_are_refused_by_name(ranks):
    assert all(
        "gradients must be dense, got a sparse one of [(7, 3)]" in said for said in ranks(2, with_sparse_gradients)
    )
