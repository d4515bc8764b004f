"""How long ranks wait for each other: the world's limit, in groups that torch makes without one too."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tpfuse import TensorParallel
from tpfuse.ranks import gloo

CPU = torch.device("cpu")


def limits(world):
    """-> the limits of the world, of a group that was made without one, as of the library and of torch, and of one that
    was made with one"""
    ranks = list(range(world.size - 1))
    groups = [dist.new_group(ranks), dist.new_group(ranks, timeout=timedelta(seconds=77))]
    if world.rank not in ranks:
        return None
    for group in groups:
        TensorParallel(group)
    torchs = [group._get_backend(CPU).options._timeout for group in groups]
    return gloo.limit(dist.group.WORLD), *[gloo.limit(group) for group in groups], *torchs


def test_a_group_without_a_limit_has_the_worlds(ranks):
    first, second, _ = ranks(3, limits)
    world, own = first[0], timedelta(seconds=77)
    assert first == second == (world, world, own, world, own)
    assert world != dist.distributed_c10d.default_pg_timeout  # the pool's


def late(world):
    """-> the error of a message that does not come in time"""
    group = dist.new_group([0, 1])
    assert isinstance(gloo.receive(torch.empty(3), group, 1 - world.rank), gloo.LimitedWork)
    if world.rank == 1:
        time.sleep(1.5)
        return ""
    with pytest.raises(RuntimeError) as raised:
        gloo.LimitedWork(group.recv([torch.empty(3)], 1, 1), timedelta(seconds=0.3)).wait()
    return str(raised.value)


@pytest.mark.slow
def test_a_message_waits_no_longer(ranks):
    said, _ = ranks(2, late)
    assert "Timed out waiting 300ms" in said
