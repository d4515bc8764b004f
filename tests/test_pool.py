"""The pool the parallel tests stand on: it returns what ranks compute, and says what went wrong on which."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests import pool as pool_module
from tests.forking import START_METHOD
from tests.pool import MOST_GROUPS, Pool, RankFailed, Remote


def _coordinates(world):
    return world.rank, world.size, dist.get_rank(world.group), dist.get_world_size()


def _sum_of_ranks(world):
    x = torch.tensor([float(world.rank), 1.0])
    dist.all_reduce(x, group=world.group)
    return x


def _mesh_sums(world, dp, tp):
    """Sums of global ranks over this rank's dp and tp groups."""
    mesh = world.mesh(dp, tp)
    assert mesh is world.mesh(dp, tp)
    sums = []
    for name in "dp", "tp":
        x = torch.tensor(world.rank)
        dist.all_reduce(x, group=mesh[name].get_group())
        sums.append(x.item())
    return (mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()), tuple(sums)


def _pid(world):
    return os.getpid()


def _parent(world):
    return os.getppid(), len(os.listdir(f"/proc/{os.getppid()}/task"))


def _threads(world):
    return torch.get_num_threads(), os.environ.get("TRITON_INTERPRET")


def _groups(world, new):
    for _ in range(new):
        dist.new_group()
    return len(dist.distributed_c10d._world.pg_map)


def _random(world):
    return torch.rand(3)


def _echo(world, x):
    return x


def _raise_everywhere(world, error):
    raise error


def _raise_on_one(world, rank, error):
    if world.rank == rank:
        raise error
    dist.all_reduce(torch.zeros(1))  # waits for a rank that never comes


def _die_on_one(world, rank):
    if world.rank == rank:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def _hang_on_one(world, rank):
    while world.rank == rank:
        time.sleep(0.1)


def _leave_rank_zero_waiting(world):
    if world.rank == 0:
        dist.all_reduce(torch.zeros(1))
    else:
        time.sleep(1000)


class Odd(Exception):
    """Pickles, and does not come back."""

    def __init__(self, a, b):
        super().__init__(f"odd {a} {b}")


def _raise_odd(world):
    raise Odd(1, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_come_in_rank_order_from_a_world_of_that_size(ranks, size):
    assert ranks(size, _coordinates) == [(rank, size, rank, size) for rank in range(size)]
    assert all(torch.equal(x, torch.tensor([size * (size - 1) / 2, size])) for x in ranks(size, _sum_of_ranks))


@pytest.mark.parametrize("dp, tp", [(1, 1), (1, 2), (2, 1), (3, 1), (1, 4), (4, 1), (2, 2)])
def test_mesh(ranks, dp, tp):
    for rank, (coordinates, (over_dp, over_tp)) in enumerate(ranks(dp * tp, _mesh_sums, dp, tp)):
        i, j = coordinates
        assert (i, j) == divmod(rank, tp)
        assert over_dp == sum(range(j, dp * tp, tp))
        assert over_tp == sum(range(i * tp, (i + 1) * tp))


def test_a_mesh_is_the_whole_world(ranks):
    with pytest.raises(ValueError, match="dp=2 x tp=2 is not the world's size 2"):
        ranks(2, _mesh_sums, 2, 2)


def test_one_pool_is_reused(ranks):
    pids = ranks(4, _pid)
    assert len(set(pids) | {os.getpid()}) == 5
    with pytest.raises(ValueError):
        ranks(4, _raise_everywhere, ValueError())
    assert ranks(2, _pid) == pids[:2]
    assert ranks(4, _pid) == pids


@pytest.mark.skipif(START_METHOD != "forkserver", reason="the fork server is used on Linux only")
def test_workers_are_forked_from_one_process_without_threads(ranks):
    """A thread's locks would be copied as they happen to be."""
    ((parent, threads),) = set(ranks(4, _parent))
    assert parent != os.getpid() and threads == 1


def test_two_pools_at_once(ranks):
    """As two test processes on one machine have them."""
    other = Pool()
    try:
        for size in 1, 3, 2:
            assert ranks(size, _coordinates) == other(size, _coordinates)
        assert not set(ranks(2, _pid)) & set(other(2, _pid))
    finally:
        other.close()


def test_workers_are_single_threaded_and_not_interpreted(ranks):
    assert ranks(2, _threads) == [(1, None)] * 2


def test_groups_that_calls_leave_do_not_add_up():
    pool = Pool()
    try:
        assert pool(2, _groups, 1) == [2, 2] and pool(2, _groups, 0) == [2, 2]
        assert pool(2, _groups, MOST_GROUPS) == [2 + MOST_GROUPS] * 2
        assert pool(2, _groups, 0) == [1, 1]
    finally:
        pool.close()


def test_no_call_depends_on_the_one_before(ranks):
    assert torch.equal(ranks(1, _random)[0], ranks(1, _random)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_tensors_travel_bit_for_bit(ranks, dtype):
    x = (100 * torch.randn(5, 3)).to(dtype)
    for y in ranks(2, _echo, {"x": x}):
        assert y["x"].dtype == dtype and torch.equal(y["x"], x) and y["x"].data_ptr() != x.data_ptr()


def test_an_error_on_every_rank_keeps_its_type(ranks):
    with pytest.raises(ValueError, match="num_heads=5") as info:
        ranks(3, _raise_everywhere, ValueError("num_heads=5 is not divisible"))
    assert isinstance(info.value.__cause__, Remote)
    assert all(f"rank {rank}: Traceback" in str(info.value.__cause__) for rank in range(3))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_is_raised_at_once_and_not_its_echo(ranks, rank):
    start = time.monotonic()
    with pytest.raises(KeyError, match="cause") as info:
        ranks(2, _raise_on_one, rank, KeyError("cause"))
    assert time.monotonic() - start < 20  # not the collective's timeout
    assert "_raise_on_one" in str(info.value.__cause__)
    assert ranks(2, _coordinates)[1] == (1, 2, 1, 2)


def test_an_error_that_does_not_pickle_is_named(ranks):
    with pytest.raises(RankFailed, match="Odd: odd 1 2"):
        ranks(2, _raise_odd)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_dead_worker_is_reported_and_replaced(ranks, rank):
    before = ranks(3, _pid)
    with pytest.raises(RankFailed, match=rf"rank {rank} died \(exit code 7\)"):
        ranks(3, _die_on_one, rank)
    assert not set(ranks(3, _pid)) & set(before)


@pytest.mark.slow
def test_a_hung_worker_is_reported_with_its_stack_and_replaced(ranks):
    before = ranks(2, _pid)
    with pytest.raises(RankFailed, match="rank 1 was not done in time") as info:
        ranks(2, _hang_on_one, 1, timeout=2)
    assert "_hang_on_one" in str(info.value.__cause__)
    assert not set(ranks(2, _pid)) & set(before)


@pytest.mark.slow
def test_an_unfinished_collective_ends_at_its_timeout(monkeypatch):
    """Rank 0's call fails then, long before the limit of the whole; rank 1 is named, which never came."""
    monkeypatch.setattr(pool_module, "GRACE", 1.0)
    pool, start = Pool(timeout=timedelta(seconds=2)), time.monotonic()
    try:
        with pytest.raises(RankFailed, match="rank 1 was not done in time"):
            pool(2, _leave_rank_zero_waiting)
    finally:
        pool.close()
    assert time.monotonic() - start < 60
