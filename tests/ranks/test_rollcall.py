"""A gather that says which rank has ended, and that needs no register of groups."""

import json
import os

import pytest
import torch.distributed as dist

from tests.forking import forking
from tpfuse.ranks.rollcall import RankEnded, roll_call


def called(world, value):
    return roll_call([world.rank, value], world.group)


@pytest.mark.parametrize("value", [None, "é" * 100_000, {"a": [1.5]}], ids=["nothing", "long", "nested"])
def test_values_of_all_ranks(ranks, value):
    assert ranks(3, called, value) == [[[rank, value] for rank in range(3)]] * 3


def called_in_pairs(world):
    pairs = [dist.new_group(pair) for pair in ([1, 0], [2, 3])]
    return roll_call(world.rank, pairs[world.rank // 2])


def test_in_a_group_of_some_ranks(ranks):
    assert ranks(4, called_in_pairs) == [[0, 1]] * 2 + [[2, 3]] * 2


def process(work, rank, size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=size)
    said = []

    def call(group):
        try:
            said.append(roll_call(rank, group))
        except RankEnded as error:
            said.append(str(error))

    work(rank, call)
    (folder / f"{rank}").write_text(json.dumps(said))
    os._exit(0)  # at once, as a killed one does


def said(work, size, folder):
    """Returns what the calls of ``work(rank, call)`` gave each of ``size`` processes, until its end."""
    started = [forking().Process(target=process, args=(work, rank, size, folder)) for rank in range(size)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    return [json.loads((folder / f"{rank}").read_text()) for rank in range(size)]


ENDED = "rank {} has ended, or has not answered within the group's limit of time"


def in_a_pair(rank, call):
    pair = dist.new_group([1, 2])
    if rank == 1:
        call(pair)


def test_who_has_ended_by_its_number_in_the_world(tmp_path):
    assert said(in_a_pair, 3, tmp_path) == [[], [ENDED.format(2)], []]


def after_the_end_of_groups(rank, call):
    own = dist.new_group()
    dist.destroy_process_group()
    for _ in range(1 if rank == 1 else 2):
        call(own)


def test_after_the_groups_were_destroyed(tmp_path):
    every = [0, 1, 2]
    assert said(after_the_end_of_groups, 3, tmp_path) == [[every, ENDED.format(1)], [every], [every, ENDED.format(1)]]
