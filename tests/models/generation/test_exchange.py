"""Generation's messages: gloo's values, read where they lie in shared memory, or the group's where there is no room."""

import platform
import time

import pytest
import torch

from tpfuse import TensorParallel
from tpfuse.collectives import all_reduce
from tpfuse.models.generation.exchange import exchange
from tpfuse.ranks.turns import ROOM

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
    ranks(R, gathered, 40)


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
    whole = torch.stack([torch.full_like(x, rank) for rank in range(world.size)])
    assert torch.equal(messages.gather(x), whole)
    assert torch.equal(messages.sum(x), torch.ones_like(x))


def test_what_has_no_room_goes_through_the_group(ranks):
    ranks(2, larger)


def elsewhere(world):
    assert exchange(TensorParallel(), CPU).memory is None
    assert exchange(TensorParallel(world.group), torch.device("cuda")).memory is None


def test_only_for_cpus(ranks):
    ranks(2, elsewhere)
