"""Messages through shared memory: gloo's values, no waiting for who is gone, an error for other calls, and gloo where
one rank cannot."""

import errno
import glob
import os
import pathlib
import platform
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankFailed
from tpfuse import TensorParallel
from tpfuse.collectives import all_gather, all_gather_copies, all_to_all, exchange_rows
from tpfuse.layers import ColumnParallelLinear, RowParallelLinear
from tpfuse.ranks import shared_memory as memory
from tpfuse.ranks import turns
from tpfuse.ranks.shared_memory import shared_memory
from tpfuse.ranks.turns import ROOM

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="shared memory is for Linux on x86_64"
)
DTYPES = torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool


def left():
    return glob.glob("/dev/shm/tpfuse-*")


def data(rank, to, shape, dtype):
    generator = torch.Generator().manual_seed(64 * rank + to)
    return torch.randn(shape, generator=generator).mul(9).to(dtype)


def carried(world):
    """Compares each op's result with what the ranks sent: sizes around a turn's room, other dtypes, no element."""
    group, R, me = world.group, world.size, world.rank
    assert shared_memory(group) is shared_memory(group) is not None
    name, ranks = group.group_name, range(R)
    for i, count in enumerate([0, 1, 7, ROOM // R // 8, ROOM // 8 - 1, ROOM // 8, ROOM // 8 + 1, ROOM // 4 + 5]):
        dtype = DTYPES[i % len(DTYPES)]
        if (i + me) % 3 == 0:
            time.sleep(0.005)
        part = lambda rank, to, shape=(count,), dtype=dtype: data(rank, to, shape, dtype)
        assert torch.equal(all_gather(part(me, me), R, name), torch.stack([part(r, r) for r in ranks]))
        sent, received = (torch.stack([part(*pair) for pair in pairs]) for pairs in _pairs(me, R))
        assert torch.equal(all_to_all(sent, name), received)
        rows = [[(3 * a + 5 * b + i) % 4 * (count // 2 + 1) for b in ranks] for a in ranks]  # from a to b, some none
        outgoing = torch.cat([part(me, to, (rows[me][to], 2)) for to in ranks])
        incoming = torch.cat([part(source, me, (rows[source][me], 2)) for source in ranks])
        received = exchange_rows(outgoing, rows[me], [rows[source][me] for source in ranks], name)
        assert torch.equal(received, incoming), (count, rows)
    return left()


def _pairs(me, ranks):
    return [(me, to) for to in range(ranks)], [(source, me) for source in range(ranks)]


@pytest.mark.parametrize("R", [2, 3, 4])
def test_every_rank_has_what_every_rank_sent(ranks, R):
    assert ranks(R, carried) == [[]] * R  # and no file is left


def in_copies(world):
    x = torch.arange(5.0) + 10 * world.rank
    first = world.rank // 2 * 2
    assert torch.equal(all_gather_copies(x, 2, world.size, world.group.group_name)[0], torch.arange(5.0) + 10 * first)


def test_ranks_with_one_value_gather_among_themselves(ranks):
    ranks(4, in_copies)


def through(world):
    """-> how often messages went through the memory, of four"""
    carry, calls = memory.SharedMemory._carry, []
    memory.SharedMemory._carry = lambda *args: (calls.append(1), carry(*args))[1]
    try:
        x, name = torch.ones(2, 3), world.group.group_name
        (
            all_gather(x, 2, name),
            all_to_all(x, name),
            all_gather_copies(x, 2, 2, name),
            exchange_rows(x, [1, 1], [1, 1], name),
        )
    finally:
        memory.SharedMemory._carry = carry
    return len(calls)


def test_every_message_of_the_table_goes_through_it(ranks):
    assert ranks(2, through) == [4, 4]


def many(world):
    R, me = world.size, world.rank
    for i in range(3000):
        x = torch.full((R, 16), i * R + me)
        assert all_to_all(x, world.group.group_name)[:, 0].tolist() == [i * R + r for r in range(R)], i


def test_nobody_writes_what_another_one_reads(ranks):
    ranks(3, many)


OTHER_CALLS = {
    "another size": (lambda name: all_gather(torch.ones(3), 2, name), lambda name: all_gather(torch.ones(4), 2, name)),
    "another dtype": (
        lambda name: all_to_all(torch.ones(2, 3), name),
        lambda name: all_to_all(torch.ones(2, 3, dtype=torch.float64), name),
    ),
    "another op": (
        lambda name: all_gather(torch.ones(3), 2, name),
        lambda name: all_to_all(torch.ones(2, 3), name),
    ),
    "other rows": (
        lambda name: exchange_rows(torch.ones(3, 2), [1, 2], [1, 1], name),
        lambda name: exchange_rows(torch.ones(3, 2), [2, 1], [1, 1], name),
    ),
    "more turns": (
        lambda name: all_gather(torch.ones(3), 2, name),
        lambda name: all_gather(torch.ones(ROOM), 2, name),
    ),
}


def differing(world, name):
    group = dist.new_group([0, 1])
    calls = OTHER_CALLS[name]
    with pytest.raises(RuntimeError, match="(all-gathers|exchanges) [0-9]+ bytes, and this rank|has left the group"):
        calls[world.rank](group.group_name)
    with pytest.raises(RuntimeError, match="bytes, and this rank|has left the group"):
        calls[world.rank](group.group_name)  # their turns are no longer the same
    return True


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_ranks_in_other_calls_say_so(ranks, name):
    assert ranks(2, differing, name) == [True, True]


def interrupted(world):
    """-> rank 0 is interrupted while it waits, goes on with another message; both say what is wrong"""
    name = dist.new_group([0, 1]).group_name
    all_gather(torch.ones(3), 2, name)
    if world.rank == 0:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            all_gather(torch.ones(3), 2, name)
    else:
        time.sleep(0.3)
    with pytest.raises(RuntimeError) as raised:
        all_to_all(torch.ones(2, 3), name)
    return str(raised.value)


def _interrupt(number, frame):
    raise KeyboardInterrupt


def test_after_an_interrupted_message_there_is_none(ranks):
    first, second = ranks(2, interrupted)
    assert first.endswith("a message of this rank was interrupted")
    assert "rank 0 all-gathers 12 bytes, and this rank exchanges 12" in second


def interrupted_alone(world):
    """-> what rank 1 of a group is told that waits for rank 2, which is interrupted in the message"""
    group = dist.new_group([1, 2])
    if world.rank == 0:
        return ""
    shared_memory(group)
    all_gather(torch.ones(3), 2, group.group_name)
    if world.rank == 1:
        time.sleep(0.5)
        all_gather(torch.ones(3), 2, group.group_name)  # rank 2 had sent its part
        with pytest.raises(RuntimeError) as raised:
            all_gather(torch.ones(3), 2, group.group_name)
        return str(raised.value)
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        all_gather(torch.ones(3), 2, group.group_name)


def test_the_others_of_an_interrupted_message_do_not_wait(ranks):
    """Ranks have their numbers in the world; the group's limit is half an hour."""
    assert ranks(3, interrupted_alone)[1] == "all_gather, rank 0 of 2: rank 2 was interrupted in a message"


def other_rows(world):
    """Rank 1 has more rows than ever in a call of two layers -> what both are told; then both go on."""
    tp = TensorParallel(dist.new_group(list(range(world.size))))
    up, down = ColumnParallelLinear(6, 12, tp=tp), RowParallelLinear(12, 6, tp=tp)
    call, said = lambda rows: down(up(torch.ones(rows, 6))), []
    call(3)
    for rows in (3, 5):
        try:
            call(rows if world.rank != 1 else 5)
            said.append("")
        except ValueError as error:
            said.append(str(error))
        assert torch.equal(call(3), call(3))
    return said


@pytest.mark.parametrize("R", [2, 3])
def test_a_message_meets_a_comparison_in_an_error(ranks, R):
    """One rank calls a layer as never before and compares that; for the others it is a call like those before."""
    said = ranks(R, other_rows)
    assert all(texts == said[0] for texts in said)
    (refused, together) = said[0]
    assert together == "" and refused == (
        "the ranks are in different calls, and each must make the same ones in the same order: "
        + ", ".join(
            "rank 1 is in ColumnParallelLinear.forward, for the first time with argument 1 torch.float32 (5, 6) on cpu"
            if rank == 1
            else f"rank {rank} is in RowParallelLinear.forward (it all-gathers 72 bytes)"
            for rank in range(R)
        )
    )


def in_inference_mode(world):
    x, name = torch.full((2, 3), float(world.rank)), world.group.group_name
    with torch.inference_mode():
        y = all_gather(x + 1, 2, name)[1]
    z = all_to_all(y, name)
    with torch.inference_mode():
        return all_to_all(z, name).tolist()


def test_tensors_of_inference_mode(ranks):
    assert ranks(2, in_inference_mode) == [[[2.0] * 3] * 2] * 2


def unable(world, how):
    group = dist.new_group(list(range(world.size)))
    before = memory._mapped, memory._namespace, memory._new_file, memory.host
    if how == "a rank cannot open it" and world.rank == 1:
        memory._mapped = lambda path, size: None
    if how == "another set of processes" and world.rank == 1:
        memory._namespace = lambda: "pid:[1]"
    if how == "another machine" and world.rank == 1:
        memory.host = lambda: ("another", 0)
    if how == "no room":
        memory._new_file = lambda size: None
    try:
        assert shared_memory(group) is None
    finally:
        memory._mapped, memory._namespace, memory._new_file, memory.host = before
    assert torch.equal(all_gather(torch.ones(3), 2, group.group_name), torch.ones(2, 3))
    return left()


@pytest.mark.parametrize("how", ["a rank cannot open it", "another set of processes", "another machine", "no room"])
def test_where_one_rank_cannot_all_use_the_group(ranks, how):
    assert ranks(2, unable, how) == [[], []]


def alone(world):
    assert shared_memory(None) is None
    assert shared_memory(dist.new_group([world.rank], use_local_synchronization=True)) is None


def test_a_rank_alone_has_none(ranks):
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
    shared, gather = shared_memory(world.group), lambda: all_gather(torch.ones(3), 2, dist.group.WORLD.group_name)
    gather()
    if world.rank == 1:
        if how == "has ended":
            os._exit(3)
        if how == "has left the group":
            del shared
            dist.destroy_process_group()
            memory._made.clear()
            time.sleep(1)
        return None
    if how == "has come to no such call within 1 s":
        shared.members.timeout = 1
    with pytest.raises(RuntimeError, match=f"all_gather, rank 0 of 2: rank 1 {how}"):
        gather()
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
        gathered = lambda name=group.group_name: all_gather(torch.ones(3), world.size, name)
        shared_memory(group)
        time.sleep(0.01 * world.rank)
        assert gathered().sum() == 3 * world.size
        memory._made.pop(group)
        dist.destroy_process_group(group)


def test_who_leaves_after_its_last_call_is_not_missed(ranks):
    ranks(2, last)


def forked(world):
    left = shared_memory(dist.new_group(list(range(world.size)))).members.left
    child = os.fork()
    if child == 0:
        memory._leave(left, world.rank, os.getppid())
        os._exit(0)
    os.waitpid(child, 0)
    return list(left)


def test_a_forked_child_leaves_nothing(ranks):
    assert ranks(2, forked) == [[0, 0]] * 2


def test_a_rank_without_free_files_takes_no_other_for_ended(monkeypatch):
    """Too many open files say nothing of another process."""

    def read_text(path, *args):
        raise OSError(errno.EMFILE, "Too many open files")

    assert turns._ended(2**22 + 1) and not turns._ended(os.getpid())
    monkeypatch.setattr(pathlib.Path, "read_text", read_text)
    assert not turns._ended(os.getpid())
