"""A gather that says which rank has ended.

A collective whose member has ended fails on its neighbours with a closed connection, which does not say whose, and the
others wait until those end too.  Here every rank talks with the group's first alone: a message that fails has a number,
and the first tells the others.  All goes through one rank: this is for what is seldom done, such as a save.
"""

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .failure import noted
from .gloo import receive, send

T = TypeVar("T")


class RankEnded(RuntimeError):
    """A rank whose part is needed has ended, or did not answer within the group's limit of time."""


def roll_call(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Returns the values of all ranks of ``group`` (the world), in rank order; each rank calls it.

    RankEnded on every rank where one is gone, with its number in the world; only over gloo, for NCCL waits for a lost
    rank in any form of a message.

    Over gloo it asks nothing of torch's register of groups, which ``destroy_process_group`` empties: a save in the
    background goes on after that.
    """
    among = dist.group.WORLD if group is None else group
    assert among is not None
    if not _over_gloo(among):
        values: list[Any] = [None] * among.size()
        dist.all_gather_object(values, value, group=among)
        return values
    every, ended = (_collected if among.rank() == 0 else _told)(value, among)
    if ended:
        note = noted()
        raise RankEnded(
            f"rank {_number(among, ended[0])} has ended, or has not answered within the group's limit of"
            f" time{f' ({note})' * bool(note)}"
        )
    return every


def _over_gloo(group: dist.ProcessGroup) -> bool:
    cpu = torch.device("cpu")
    return cpu in group._device_types and group._get_backend(cpu).name() == "gloo"


def _number(group: dist.ProcessGroup, rank: int) -> int:
    """Returns the number in the world of a group's rank."""
    try:
        return dist.get_global_rank(group, rank)
    except ValueError:  # destroyed: a group that is used nevertheless is one of all ranks
        return rank


def _collected(value: Any, group: dist.ProcessGroup) -> tuple[list[Any], list[int]]:
    """On the group's first rank: what all have sent, and who has not; the others are told."""
    every, ended = [value], list[int]()
    others = range(1, group.size())
    for other in others:
        try:
            every.append(pickle.loads(_received(group, other)))
        except RuntimeError:
            ended.append(other)
    answer = pickle.dumps((every, ended))  # once for all
    for other in (other for other in others if other not in ended):
        try:
            _send(answer, group, other)
        except RuntimeError:
            ended.append(other)
    return every, ended


def _told(value: Any, group: dist.ProcessGroup) -> tuple[list[Any], list[int]]:
    try:
        _send(pickle.dumps(value), group, 0)
        every, ended = pickle.loads(_received(group, 0))
    except RuntimeError:
        return [], [0]
    return every, ended


def _send(message: bytes, group: dist.ProcessGroup, to: int) -> None:
    """Sends the length, then the bytes."""
    for part in (torch.tensor([len(message)]), torch.frombuffer(bytearray(message), dtype=torch.uint8)):
        send(part, group, to).wait()


def _received(group: dist.ProcessGroup, source: int) -> bytes:
    length = torch.empty(1, dtype=torch.int64)
    receive(length, group, source).wait()
    message = torch.empty(int(length), dtype=torch.uint8)
    receive(message, group, source).wait()
    return message.numpy().tobytes()
