"""Python objects from rank to rank: a rank that has ended is named, and an error on one rank is an error on every rank.

A collective whose member has ended fails on its neighbours with a closed connection, which does not say whose, and the
others wait until those end too.  In :func:`gather` every rank talks with the first one alone: a message that fails has
a number, and the first tells the others.  All goes through one rank: this is for rare events, such as a save.
"""

import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .failure import explained, note_failures, noted
from .gloo import connect, limit, receive, send

T = TypeVar("T")
_KINDS: tuple[type[Exception], ...] = (ValueError, OSError)  # what bad input and bad files raise; else RuntimeError
_channels: "weakref.WeakKeyDictionary[dist.ProcessGroup, Channel]" = weakref.WeakKeyDictionary()


class RankEnded(RuntimeError):
    """A rank has ended, or did not answer within the group's limit of time."""


# ---- connections beside a group's own ----


class Channel:
    """Connections between the hosts of a group's ranks.  Made by all of them."""

    def __init__(self, group: dist.ProcessGroup):
        note_failures()
        self.rank, self.size, self.timeout = group.rank(), group.size(), limit(group)
        self.world_ranks = dist.get_process_group_ranks(group)
        self.gloo = connect(group)

    def exchange(self, row: Tensor) -> Tensor:
        """All-gathers int64 [n] -> [R, n], the same n on every rank."""
        rows = row.new_empty(self.size, *row.shape)
        rows[self.rank] = row
        peers = [rank for rank in range(self.size) if rank != self.rank]
        try:
            messages = [receive(rows[rank], self.gloo, rank) for rank in peers]
            for message in messages + [send(row, self.gloo, rank) for rank in peers]:
                message.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} compares its call with the other ranks', and one of them has ended or"
                f" has come to no such call within {self.timeout.total_seconds():g} s: {explained(error)}"
            ) from error
        return rows


def channel(group: dist.ProcessGroup | None) -> Channel | None:
    """Returns the channel of a group; None for a group of one, or one without real messages."""
    if group is None or group.size() == 1 or "fake" in dist.get_backend_config(group):
        return None
    if group not in _channels:
        _channels[group] = Channel(group)
    return _channels[group]


# ---- objects ----


def gather(value: T, group: dist.ProcessGroup | Channel | None, *, to_first: bool = False) -> list[T]:
    """Returns the values of all ranks, in rank order; each rank calls it.  Without a group: ``[value]``.

    ``to_first``: the group's first rank alone gets them, and the others an empty list.  RankEnded on every rank where
    one is gone, with its number in the world; only over gloo, for NCCL waits for a lost rank in any form of a message.

    Over gloo torch's register of groups is not asked, which ``destroy_process_group`` empties: a save in the background
    goes on after that.
    """
    if group is None:
        return [value]
    if not isinstance(group, Channel) and not _over_gloo(group):
        return _gather_by_torch(value, group, to_first)
    links: Any = group.gloo if isinstance(group, Channel) else group
    values, ended = _collect(value, links, to_first) if links.rank() == 0 else _ask_first(value, links)
    if ended:
        note = noted()
        raise RankEnded(
            f"rank {_world_rank(group, ended[0])} has ended, or has not answered within the group's limit of"
            f" time{f' ({note})' * bool(note)}"
        )
    return values


def _over_gloo(group: dist.ProcessGroup) -> bool:
    cpu = torch.device("cpu")
    return cpu in group._device_types and group._get_backend(cpu).name() == "gloo"


def _gather_by_torch(value: Any, group: dist.ProcessGroup, to_first: bool) -> list[Any]:
    values: list[Any] = [None] * group.size()
    if not to_first:
        dist.all_gather_object(values, value, group=group)
        return values
    dist.gather_object(value, values if group.rank() == 0 else None, group=group, group_dst=0)
    return values if group.rank() == 0 else []


def _world_rank(group: dist.ProcessGroup | Channel, rank: int) -> int:
    if isinstance(group, Channel):
        return group.world_ranks[rank]
    try:
        return dist.get_global_rank(group, rank)
    except ValueError:  # destroyed: a group that is used nevertheless is one of all ranks
        return rank


def _collect(value: Any, links: Any, to_first: bool) -> tuple[list[Any], list[int]]:
    """Gathers on the first rank, and answers the others: the values, and the ranks that sent none."""
    values, ended = [value], list[int]()
    for peer in range(1, links.size()):
        try:
            values.append(_receive(links, peer))
        except RuntimeError:
            ended.append(peer)
    answer = pickle.dumps(([] if to_first else values, ended))  # once for all
    for peer in set(range(1, links.size())).difference(ended):
        try:
            _send(answer, links, peer)
        except RuntimeError:
            ended.append(peer)
    return values, ended


def _ask_first(value: Any, links: Any) -> tuple[list[Any], list[int]]:
    try:
        _send(pickle.dumps(value), links, 0)
        values, ended = _receive(links, 0)
    except RuntimeError:
        return [], [0]
    return values, ended


def _send(message: bytes, links: Any, to: int) -> None:
    """Sends the length, then the bytes."""
    for part in (torch.tensor([len(message)], device="cpu"), torch.frombuffer(bytearray(message), dtype=torch.uint8)):
        send(part, links, to).wait()


def _receive(links: Any, source: int) -> Any:
    length = torch.empty(1, dtype=torch.int64, device="cpu")
    receive(length, links, source).wait()
    message = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    receive(message, links, source).wait()
    return pickle.loads(message.numpy().tobytes())


# ---- errors ----


def raise_together(error: Exception | None, groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Raises ``error`` if there is one; if another rank of the groups has one, an error with the same message.

    That is a ValueError or an OSError where the other rank's is one, and a RuntimeError otherwise.  RankEnded as by
    :func:`gather`.  Each rank calls it.
    """
    message = _message(error)
    for group in groups:
        message = next((text for text in gather(message, group) if text is not None), None)
    _raise(error, message)


def together(action: Callable[[], T], groups: Iterable[dist.ProcessGroup | None]) -> T:
    """Returns ``action()``; an error on every rank of the groups if it raises one on any.  Each rank calls it."""
    result, error = _attempt(action)
    raise_together(error, groups)
    return result[0]


def gather_results(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Returns what ``action()`` returned on every rank, in rank order; an error on one rank is an error on every rank.

    Each rank calls it.
    """
    result, error = _attempt(action)
    replies = gather((_message(error), result), group)
    _raise(error, next((message for message, _ in replies if message is not None), None))
    return [result[0] for _, result in replies]


def _attempt(action: Callable[[], T]) -> tuple[list[T], Exception | None]:
    try:
        return [action()], None
    except Exception as error:
        return [], error


def _message(error: Exception | None) -> tuple[int, str] | None:
    if error is None:
        return None
    kind = next((i for i, base in enumerate(_KINDS) if isinstance(error, base)), len(_KINDS))
    return kind, f"{error}" if kind < len(_KINDS) else f"{type(error).__name__}: {error}"


def _raise(error: Exception | None, message: tuple[int, str] | None) -> None:
    if error is not None:
        raise error
    if message is not None:
        raise (*_KINDS, RuntimeError)[message[0]](message[1])
