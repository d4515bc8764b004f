"""A gather that names the rank that has ended, and needs no register of groups; an error on one rank is one on all."""

import errno
import json
import os

import pytest
import torch.distributed as dist

from tests.forking import forking
from tpfuse.ranks.messages import RankEnded, channel, gather, gather_results, together

# ---- values ----


def called(world, value):
    assert gather(value, None) == [value]
    mine = [world.rank, value]
    return gather(mine, world.group), gather(mine, channel(world.group)), gather(mine, world.group, to_first=True)


@pytest.mark.parametrize("value", [None, "é" * 100_000, {"a": [1.5]}], ids=["nothing", "long", "nested"])
def test_values_of_all_ranks(ranks, value):
    values = [[rank, value] for rank in range(3)]
    assert ranks(3, called, value) == [(values, values, values), (values, values, []), (values, values, [])]


def called_in_pairs(world):
    pairs = [dist.new_group(pair) for pair in ([1, 0], [2, 3])]
    return gather(world.rank, pairs[world.rank // 2])


def test_in_a_group_of_some_ranks(ranks):
    assert ranks(4, called_in_pairs) == [[0, 1]] * 2 + [[2, 3]] * 2


# ---- a rank that has ended ----


def process(work, rank, size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=size)
    results = []

    def call(group):
        try:
            results.append(gather(rank, group))
        except RankEnded as error:
            results.append(str(error).partition(" limit of ")[0])

    work(rank, call)
    (folder / f"{rank}").write_text(json.dumps(results))
    os._exit(0)  # at once, as a killed one does


def results_of(work, size, folder):
    """Returns what the calls of ``work(rank, call)`` gave each of ``size`` processes, until its end."""
    started = [forking().Process(target=process, args=(work, rank, size, folder)) for rank in range(size)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    return [json.loads((folder / f"{rank}").read_text()) for rank in range(size)]


ENDED = "rank {} has ended, or has come to no such call within the group's"


def in_a_pair(rank, call):
    """Over the group's own connections, or over a channel: rank 2 of the world, 1 of the pair, ends."""
    pair = dist.new_group([1, 2])
    links = channel(pair) if rank else None
    if rank:
        call(links)
    if rank == 1:
        call(pair)
        call(links)


def test_who_has_ended_by_its_number_in_the_world(tmp_path):
    assert results_of(in_a_pair, 3, tmp_path) == [[], [[1, 2], *[ENDED.format(2)] * 2], [[1, 2]]]


def after_the_end_of_groups(rank, call):
    group = dist.new_group()
    dist.destroy_process_group()
    for _ in range(1 if rank == 1 else 2):
        call(group)


def test_after_the_groups_were_destroyed(tmp_path):
    numbers = [0, 1, 2]
    ended = ENDED.format(1)
    assert results_of(after_the_end_of_groups, 3, tmp_path) == [[numbers, ended], [numbers], [numbers, ended]]


# ---- an error on one rank ----

FULL = OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
ERRORS = [
    (ValueError("n_head is 0"), ValueError, "n_head is 0"),
    (FULL, OSError, str(FULL)),
    (KeyError("r"), RuntimeError, "KeyError: 'r'"),
]


def act(world, failing, error):
    def action():
        if world.rank == failing:
            raise error
        return world.rank

    def outcome(call):
        try:
            return call()
        except Exception as e:
            return e

    return outcome(lambda: together(action, (world.group,))), outcome(lambda: gather_results(action, world.group))


@pytest.mark.parametrize("error, kind, message", ERRORS, ids=lambda x: type(x).__name__)
def test_an_error_on_one_rank_is_one_on_all(ranks, error, kind, message):
    for outcomes in zip(*ranks(3, act, 0, error), strict=True):
        assert type(outcomes[0]) is type(error) and str(outcomes[0]) == str(error)
        assert [(type(e), str(e)) for e in outcomes[1:]] == [(kind, message)] * 2


def test_without_an_error_each_has_its_result(ranks):
    assert ranks(3, act, None, None) == [(rank, [0, 1, 2]) for rank in range(3)]
