"""Python objects from rank to rank: a rank that has ended is named, and an error on one rank is an error on every rank.

Every exchange begins with a head of one fixed size from each rank to each other: which call it belongs to, and two
numbers, the lengths of what follows or all that there is to say.  Ranks that are in different calls therefore meet in a
ValueError that names the calls, and never in messages of two lengths, which gloo ends by an abort of the process.

A collective whose member has ended fails on its neighbours with a closed connection, which does not say whose.  Heads
go from each rank to each other, so that a message that fails has a number.  What follows a head in :func:`gather` goes
through the first rank: that is for rare events, such as a save.
"""

import array
import functools
import hashlib
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .failure import explained, note_failures, noted
from .gloo import connect, limit, receive, send, share_limit
from .threads import Threads, outermost

T = TypeVar("T")
_KINDS: tuple[type[Exception], ...] = (ValueError, OSError)  # what bad input and bad files raise; else RuntimeError
_NUMBERS, _LONGEST_NAME = 2, 240  # of a head, beside the call's; bytes of its name
_channels: "weakref.WeakKeyDictionary[dist.ProcessGroup, Channel]" = weakref.WeakKeyDictionary()


class RankEnded(RuntimeError):
    """A rank has ended, or did not answer within the group's limit of time."""


class CallsDiffer(ValueError):
    """The ranks of a group are in different calls; none of them waits for another message of this one."""


# ---- connections beside a group's own ----


class Connections:
    """Connections between ranks: by number in them, of which ``world_rank`` gives the number in the world."""

    def __init__(self, gloo: Any, world_rank: Callable[[int], int], seconds: float):
        self.gloo, self.world_rank, self.seconds = gloo, world_rank, seconds
        self.rank, self.size = gloo.rank(), gloo.size()

    def exchange(self, call: str, *numbers: int, detail: str = "") -> Tensor:
        """Returns the numbers of every rank, int64 [R, n] for at most two; each rank calls it, with as many.

        CallsDiffer on every rank where they are in different ``call``s, with each rank's ``detail``.  RankEnded names a
        rank that has ended.
        """
        head = [_call_number(call, len(numbers)), *numbers, *[0] * (_NUMBERS - len(numbers))]
        heads = self._from_all(torch.tensor(head, device="cpu"))
        if (heads[:, 0] != head[0]).any():
            self._raise_calls(detail)
        return heads[:, 1 : 1 + len(numbers)]

    def _from_all(self, row: Tensor) -> Tensor:
        """All-gathers [n] -> [R, n], the same n on every rank."""
        rows = row.new_empty(self.size, *row.shape)
        rows[self.rank] = row
        peers = [rank for rank in range(self.size) if rank != self.rank]
        ended: dict[int, RuntimeError] = {}

        def attempt(rank: int, action: Callable[[], Any]) -> Any:
            try:
                return action()
            except RuntimeError as error:
                ended.setdefault(rank, error)

        starts = [(rank, functools.partial(receive, rows[rank], self.gloo, rank)) for rank in peers]
        starts += [(rank, functools.partial(send, row, self.gloo, rank)) for rank in peers]
        messages = [(rank, attempt(rank, start)) for rank, start in starts]
        for rank, message in messages:  # all of them: the others shall see which rank it is that has ended
            if message is not None:
                attempt(rank, message.wait)
        if ended:
            rank, error = next(iter(ended.items()))
            raise self.ended(rank, explained(error)) from error
        return rows

    def ended(self, rank: int, note: str) -> "RankEnded":
        """Returns the error of a rank that does not answer; ``note`` says more of it."""
        return RankEnded(
            f"rank {self.world_rank(rank)} has ended, or has come to no such call within the group's limit of"
            f" {self.seconds:g} s; this is rank {self.rank} of {self.size}, in {_caller()}{f' ({note})' * bool(note)}"
        )

    def _raise_calls(self, detail: str) -> NoReturn:
        name = f"{_caller()}{detail}".encode()[:_LONGEST_NAME].ljust(_LONGEST_NAME)
        names = self._from_all(torch.frombuffer(bytearray(name), dtype=torch.uint8))
        calls = [row.numpy().tobytes().decode(errors="replace").strip() for row in names]
        raise CallsDiffer(
            "the ranks are in different calls, and each must make the same ones in the same order: "
            + ", ".join(f"rank {self.world_rank(rank)} is in {call}" for rank, call in enumerate(calls))
        )


class Channel(Connections):
    """Connections of their own between the hosts of a group's ranks.  Made by all of them."""

    def __init__(self, group: dist.ProcessGroup):
        note_failures()
        share_limit(group)
        super().__init__(connect(group), dist.get_process_group_ranks(group).__getitem__, limit(group).total_seconds())
        self.threads = Threads()
        self.comparisons = memoryview(array.array("q", [0] * self.size))  # begun by each rank; shared where they can

    def exchange(self, call: str, *numbers: int, detail: str = "") -> Tensor:
        """Exchanges as :class:`Connections` do.  RuntimeError where another thread of this rank is in a call too."""
        self.threads.enter()
        self.comparisons[self.rank] += 1
        return super().exchange(call, *numbers, detail=detail)


@functools.cache
def _call_number(call: str, count: int) -> int:
    digest = hashlib.blake2b(f"{call} {count}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _caller() -> str:
    return outermost(sys._getframe()) or ""


def channel(group: dist.ProcessGroup | None) -> Channel | None:
    """Returns the channel of a group; None for a group of one, or one without real messages."""
    if group is None or group.size() == 1 or "fake" in dist.get_backend_config(group):
        return None
    if group not in _channels:
        _channels[group] = Channel(group)
    return _channels[group]


# ---- objects ----


def gather(
    value: T,
    group: dist.ProcessGroup | Connections | None,
    *,
    to_first: bool = False,
    call: str | None = None,
    detail: str = "",
) -> list[T]:
    """Returns the values of all ranks, in rank order; each rank calls it.  Without a group: ``[value]``.

    ``to_first``: the group's first rank alone gets them, and the others an empty list.  ``call`` names the call, by
    default the public function that this is in.  CallsDiffer on every rank where they are in different calls, with
    each rank's ``detail``.  RankEnded where one is gone, with its number in the world.

    Connections are the group's channel, or those of a gloo group that has none yet: to make one takes the store, which
    may have gone.  torch's register of groups is not asked for them, which ``destroy_process_group`` empties: a save in
    the background goes on after that.
    """
    if group is None:
        return [value]
    if not isinstance(group, Connections):
        links = _channels.get(group)
        if links is None and not _over_gloo(group):
            return _gather_by_torch(value, group, to_first)
        group = links or Connections(group, functools.partial(_world_rank, group), limit(group).total_seconds())
    message, gloo = pickle.dumps(value), group.gloo
    lengths = group.exchange(f"gather {call or _caller()}", len(message), detail=detail)[:, 0].tolist()
    values, ended = _collect(value, lengths, gloo, to_first) if group.rank == 0 else _ask_first(message, gloo)
    if ended:
        raise group.ended(ended[0], noted())
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


def _world_rank(group: dist.ProcessGroup, rank: int) -> int:
    try:
        return dist.get_global_rank(group, rank)
    except ValueError:  # destroyed: a group that is used nevertheless is one of all ranks
        return rank


def _collect(value: Any, lengths: list[int], links: Any, to_first: bool) -> tuple[list[Any], list[int]]:
    """Gathers on the first rank, and answers the others: the values, and the ranks that sent none."""
    values, ended = [value], list[int]()
    for peer in range(1, links.size()):
        try:
            values.append(pickle.loads(_received(lengths[peer], links, peer)))
        except RuntimeError:
            ended.append(peer)
    answer = pickle.dumps(([] if to_first else values, ended))  # once for all
    for peer in set(range(1, links.size())).difference(ended):
        try:
            send(torch.tensor([len(answer)], device="cpu"), links, peer).wait()
            _send(answer, links, peer)
        except RuntimeError:
            ended.append(peer)
    return values, ended


def _ask_first(message: bytes, links: Any) -> tuple[list[Any], list[int]]:
    try:
        _send(message, links, 0)
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        receive(length, links, 0).wait()
        values, ended = pickle.loads(_received(int(length), links, 0))
    except RuntimeError:
        return [], [0]
    return values, ended


def _send(message: bytes, links: Any, to: int) -> None:
    send(torch.frombuffer(bytearray(message), dtype=torch.uint8), links, to).wait()


def _received(length: int, links: Any, source: int) -> bytes:
    message = torch.empty(length, dtype=torch.uint8, device="cpu")
    receive(message, links, source).wait()
    return message.numpy().tobytes()


# ---- errors ----


def raise_together(
    error: Exception | None, groups: Iterable[dist.ProcessGroup | None], *, call: str | None = None
) -> None:
    """Raises ``error`` if there is one; if another rank of the groups has one, an error with the same message.

    That is a ValueError or an OSError where the other rank's is one, and a RuntimeError otherwise.  RankEnded, and
    ``call``, as by :func:`gather`.  Each rank calls it.
    """
    message = _message(error)
    for group in groups:
        message = next((text for text in gather(message, group, call=call) if text is not None), None)
    _raise(error, message)


def together(action: Callable[[], T], groups: Iterable[dist.ProcessGroup | None]) -> T:
    """Returns ``action()``; an error on every rank of the groups if it raises one on any.  Each rank calls it."""
    result, error = attempt(action)
    raise_together(error, groups)
    return result[0]


def gather_results(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Returns what ``action()`` returned on every rank, in rank order; an error on one rank is an error on every rank.

    Each rank calls it.
    """
    result, error = attempt(action)
    replies = gather((_message(error), result), group)
    _raise(error, next((message for message, _ in replies if message is not None), None))
    return [result[0] for _, result in replies]


def attempt(action: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """Returns [what ``action()`` returned], or [] and its error; raises CallsDiffer."""
    try:
        return [action()], None
    except CallsDiffer:
        raise
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
