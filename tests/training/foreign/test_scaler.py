"""torch.amp.GradScaler where one rank alone has an infinity in its slice: one scale, and a step by all or by none."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.common import make_tp
from tests.no_sync import no_sync
from tests.pool import Pool
from tests.training.foreign.test_clip import CONFIG, with_gradients
from tpfuse import TensorParallel
from tpfuse.layers.module import local
from tpfuse.models import GPT
from tpfuse.tools.ledger.dryrun import fake_world
from tpfuse.training.foreign import scaler

F32 = torch.float32
SLICE, WHOLE = "blocks.0.mlp.fc1.weight", "input_norm.weight"  # a split parameter and a replicated one
WAYS = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale": lambda scaler, optimizer: (scaler.unscale_(optimizer), scaler.step(optimizer)),
    "clip": lambda scaler, optimizer: (
        scaler.unscale_(optimizer),
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0),
        scaler.step(optimizer),
    ),
}


def trained(world, way, fused, kind, dp):
    """Four steps, in the second of which the last rank alone meets an infinity -> scales, and which steps were taken"""
    model = with_gradients(world, F32, dp, kind)
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD(named.values(), lr=1e-3, fused=fused)
    amp = GradScaler("cpu", init_scale=4.0, growth_interval=2)
    amp.scale(torch.ones(()))
    saved = [local(p.grad).clone() for p in named.values()]
    found = []
    for step in range(4):
        for p, grad in zip(named.values(), saved):
            local(p.grad).copy_(grad * amp.get_scale())
        if step == 1 and world.rank == world.size - 1:
            local(named[SLICE].grad).view(-1)[0] = float("inf")
        before = local(named[WHOLE]).detach().clone()
        WAYS[way](amp, optimizer)
        amp.update()
        found.append((amp.get_scale(), not torch.equal(before, local(named[WHOLE]))))
    return found


@pytest.mark.parametrize(
    "way, fused, R, dp, kind",
    [
        ("step", False, 2, 1, "plain"),
        pytest.param("unscale", False, 4, 1, "plain", marks=pytest.mark.slow),
        ("clip", False, 2, 1, "plain"),
        pytest.param("step", True, 2, 1, "plain", marks=pytest.mark.slow),
        ("clip", True, 2, 1, "plain"),
        ("step", False, 2, 1, "dtensor"),
        ("step", False, 4, 2, "plain fsdp"),
    ],
)
def test_an_infinity_in_one_slice_is_one_on_every_rank(ranks, way, fused, R, dp, kind):
    exact = ranks(1, trained, way, fused, "plain", 1)[0]
    assert exact == [(4.0, True), (2.0, False), (2.0, True), (4.0, True)]
    every = ranks(R, trained, way, fused, kind, dp)
    tp = R // dp  # the last rank's group meets it; DDP or FSDP2 gives another replica's to all
    assert every[-tp:] == [exact] * tp and ("fsdp" not in kind or every == [exact] * R)


@pytest.mark.slow
def test_under_fsdp2():
    """In processes of their own: in a world formed anew torch does not always find a mesh's group."""
    exact = [(4.0, True), (2.0, False), (2.0, True), (4.0, True)]
    pool = Pool()
    try:
        assert pool(4, trained, "clip", False, "fsdp", 2) == [exact] * 4
    finally:
        pool.close()


def sharded(world):
    model = with_gradients(world, F32)
    if world.rank == 1:
        model.get_parameter(SLICE).grad[0, 0] = float("inf")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    amp = ShardedGradScaler("cpu", init_scale=4.0, process_group=world.mesh(2, 1)["tp"].get_group())
    amp.scale(torch.ones(()))
    amp.step(optimizer)
    amp.update()
    return amp.get_scale()


def test_fsdps_own_scaler(ranks):
    assert ranks(2, sharded) == [2.0, 2.0]


def messages(world):
    """-> the messages that the scaler sends for a plain model, and for a split one"""
    split, started = GPT(CONFIG, tp=make_tp(world)), []
    for model in nn.Linear(3, 3), split:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        amp = GradScaler("cpu")
        amp.scale(torch.ones(()))
        with no_sync() as watch:
            amp.unscale_(torch.optim.SGD(model.parameters()))
        started.append(watch.started["all_gather"])
    return started


def test_no_message_where_no_parameter_is_split(ranks):
    assert ranks(2, messages) == [[0, 1]] * 2


def test_nothing_waits_for_a_gpu():
    """On tensors that are nowhere; torch's own part of it is stood in for, which has no kernel there."""
    with fake_world(2) as mesh, torch.device("meta"):
        model = GPT(CONFIG, tp=TensorParallel(mesh["tp"]))
        found = {torch.device("meta"): torch.empty(())}
        optimizer = torch.optim.SGD(model.parameters())
        with no_sync() as watch:
            assert scaler.unscale(lambda *args: found, GradScaler("cpu"), optimizer) is found
    assert watch.started["all_gather"] == 1
