"""All-gathers through shared memory: gloo's values, no waiting for who is gone, and gloo where one rank cannot."""

import glob
import os
import platform
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankFailed
from tpfuse import TensorParallel
from tpfuse.collectives import all_gather, all_reduce
from tpfuse.models.generation import shared_memory as memory
from tpfuse.models.generation.shared_memory import ROOM, exchange

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="shared memory is for Linux on x86_64"
)
CPU = torch.device("cpu")


def parts(rank, i):
    """Other sizes and dtypes from call to call, strided ones, an empty one, and one that has just room."""
    generator = torch.Generator().manual_seed(100 * i + rank)
    dtype = (torch.float32, torch.bfloat16, torch.float64, torch.int64)[i % 4]
    shape = ((3, 5), (7,), (0, 4), (2, 3, 4), (ROOM // dtype.itemsize,))[i % 5]
    x = torch.randn(shape, generator=generator).mul(9).to(dtype)
    return x.t() if x.dim() == 2 else x


def left():
    return glob.glob("/dev/shm/tpfuse-*")


def gathered(world, calls):
    tp = TensorParallel(world.group)
    messages = exchange(tp, CPU)
    assert messages.memory is not None and exchange(tp, CPU).memory is messages.memory
    for i in range(calls):
        if (i + world.rank) % 7 == 0:
            time.sleep(0.002)
        x = parts(world.rank, i)
        assert torch.equal(messages.gather(x), torch.stack([parts(rank, i) for rank in range(world.size)]))
        if x.is_floating_point():
            assert torch.equal(messages.sum(x), all_reduce(x, tp))
    return left()


def begun_in_inference_mode(world):
    """-> sums of the same shapes in it, where the memory is made, and then outside"""
    messages, x = None, torch.full((3,), float(world.rank))
    tp = TensorParallel(world.mesh(1, 2)["tp"].get_group())
    with torch.inference_mode():
        messages = exchange(tp, CPU)
        first = messages.sum(x)
    return messages.memory is not None, first.tolist(), messages.sum(x).tolist(), messages.sum(x).tolist()


def test_memory_made_in_inference_mode_is_written_outside_too(ranks):
    assert ranks(2, begun_in_inference_mode) == [(True, [1.0] * 3, [1.0] * 3, [1.0] * 3)] * 2


@pytest.mark.parametrize("R", [2, 3, 4])
def test_every_rank_has_what_every_rank_gave(ranks, R):
    assert ranks(R, gathered, 40) == [[]] * R  # and no file is left


def long(world):
    messages = exchange(TensorParallel(world.group), CPU)
    for i in range(3000):
        every = messages.gather(torch.full((64,), i * world.size + world.rank))
        assert every.sum(1).tolist() == [64 * (i * world.size + r) for r in range(world.size)], i


def test_nobody_writes_what_another_one_reads(ranks):
    ranks(3, long)


def larger(world):
    tp = TensorParallel(world.group)
    messages = exchange(tp, CPU)
    x = torch.full((ROOM // 4 + 1,), float(world.rank))
    assert not messages.memory.fits(x)
    assert torch.equal(messages.gather(x), all_gather(x, tp.size, tp.group_name))
    assert torch.equal(messages.sum(x), torch.ones_like(x))


def test_what_has_no_room_goes_through_the_group(ranks):
    ranks(2, larger)


def unable(world, how):
    tp = TensorParallel(dist.new_group(list(range(world.size))))
    before = memory._mapped, memory._namespace, memory._new_file
    if how == "a rank cannot open it" and world.rank == 1:
        memory._mapped = lambda path, size: None
    if how == "another set of processes" and world.rank == 1:
        memory._namespace = lambda: "pid:[1]"
    if how == "no room":
        memory._new_file = lambda size: None
    try:
        messages = exchange(tp, CPU)
    finally:
        memory._mapped, memory._namespace, memory._new_file = before
    assert messages.memory is None
    assert torch.equal(messages.sum(torch.ones(3)), torch.full((3,), 2.0))
    return left()


@pytest.mark.parametrize("how", ["a rank cannot open it", "another set of processes", "no room"])
def test_where_one_rank_cannot_all_use_the_group(ranks, how):
    assert ranks(2, unable, how) == [[], []]


def alone(world):
    assert exchange(TensorParallel(), CPU).memory is None
    split = TensorParallel(world.group)
    assert exchange(split, torch.device("cuda")).memory is None
    elsewhere = TensorParallel(world.group)
    object.__setattr__(elsewhere, "one_machine", False)
    assert exchange(elsewhere, CPU).memory is None


def test_only_for_cpus_of_one_machine(ranks):
    ranks(2, alone)


def killed(world):
    """-> what another process finds of one that ended where it has made the file, and no rank has opened it"""
    child = os.fork()
    if child == 0:
        memory._new_file(1 << 20)
        os._exit(9)
    os.waitpid(child, 0)
    return left()


def test_nothing_is_left_of_a_killed_process(ranks):
    assert ranks(1, killed) == [[]]


def abandoned(world, how):
    messages = exchange(TensorParallel(world.group), CPU)
    messages.gather(torch.ones(3))
    if world.rank == 1:
        if how == "has ended":
            os._exit(3)
        if how == "has left the group":
            del messages
            dist.destroy_process_group()
            memory._made.clear()
            time.sleep(1)
        return None
    if how == "has come to no such call within 1 s":
        messages.memory.timeout = 1
    with pytest.raises(RuntimeError, match=f"all-gather, rank 0 of 2: rank 1 {how}"):
        messages.gather(torch.ones(3))
    raise ValueError("it said so")  # the pool forms its group anew


@pytest.mark.parametrize("how", ["has ended", "has left the group", "has come to no such call within 1 s"])
def test_nobody_waits_for_who_does_not_come(how):
    pool = Pool()
    try:
        with pytest.raises((ValueError, RankFailed), match="it said so|died"):
            pool(2, abandoned, how, timeout=30)
    finally:
        pool.close()


def last(world):
    """The others may look at a rank's counter when it is gone already."""
    for _ in range(20):
        group = dist.new_group(list(range(world.size)))
        messages = exchange(TensorParallel(group), CPU)
        if world.rank == 0:
            messages.gather(torch.ones(3))
        else:
            time.sleep(0.01)
            assert messages.gather(torch.ones(3)).sum() == 3 * world.size
        del messages
        memory._made.pop(group)
        dist.destroy_process_group(group)


def test_who_leaves_after_its_last_call_is_not_missed(ranks):
    ranks(2, last)


def forked(world):
    messages = exchange(TensorParallel(dist.new_group(list(range(world.size)))), CPU)
    child = os.fork()
    if child == 0:
        memory._leave(messages.memory._left, world.rank, os.getppid())
        os._exit(0)
    os.waitpid(child, 0)
    return list(messages.memory._left)


def test_a_forked_child_leaves_nothing(ranks):
    assert ranks(2, forked) == [[0, 0]] * 2
