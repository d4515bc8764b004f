"""A gather that says which rank has ended.

A collective whose member has ended fails on its neighbours with a closed connection, which does not say whose, and the
others wait until those end too.  Here every rank talks with the group's first alone: a message that fails has a number,
and the first tells the others.  All goes through one rank: this is for what is seldom done, such as a save.
"""

import pickle
from typing import Any, TypeVar

import torch.distributed as dist

from .failure import noted

T = TypeVar("T")


class RankEnded(RuntimeError):
    """A rank whose part is needed has ended, or did not answer within the group's limit of time."""


def roll_call(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Returns the values of all ranks of ``group`` (the world), in rank order; each rank calls it.

    RankEnded on every rank where one is gone, with its number in the world; only over gloo, for NCCL waits for a lost
    rank in any form of a message.
    """
    if dist.get_backend(group) != "gloo":
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values
    every, ended = (_collected if dist.get_rank(group) == 0 else _told)(value, group)
    if ended:
        number = dist.get_global_rank(dist.group.WORLD if group is None else group, ended[0])  # type: ignore[arg-type]
        note = noted()
        raise RankEnded(
            f"rank {number} has ended, or has not answered within the group's limit of time{f' ({note})' * bool(note)}"
        )
    return every


def _collected(value: Any, group: dist.ProcessGroup | None) -> tuple[list[Any], list[int]]:
    """On the group's first rank: what all have sent, and who has not; the others are told."""
    every, ended = [value], list[int]()
    others = range(1, dist.get_world_size(group))
    for other in others:
        try:
            every.append(_received(group, other))
        except RuntimeError:
            ended.append(other)
    answer = pickle.dumps((every, ended))  # once for all
    for other in (other for other in others if other not in ended):
        try:
            dist.send_object_list([answer], group=group, group_dst=other)
        except RuntimeError:
            ended.append(other)
    return every, ended


def _told(value: Any, group: dist.ProcessGroup | None) -> tuple[list[Any], list[int]]:
    try:
        dist.send_object_list([value], group=group, group_dst=0)
        every, ended = pickle.loads(_received(group, 0))
    except RuntimeError:
        return [], [0]
    return every, ended


def _received(group: dist.ProcessGroup | None, source: int) -> Any:
    found: list[Any] = [None]
    dist.recv_object_list(found, group=group, group_src=source)
    return found[0]
