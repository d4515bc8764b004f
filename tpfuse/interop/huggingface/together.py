"""An error on one rank is an error on every rank, so that none waits for one that has left."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def raise_together(error: Exception | None, groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Raises ``error`` if there is one; if another rank of the groups has one, an error with the same message."""
    message = None if error is None else (isinstance(error, ValueError), f"{error}")
    for group in groups:
        if group is not None:
            every: list[tuple[bool, str] | None] = [None] * group.size()
            dist.all_gather_object(every, message, group=group)
            message = next((e for e in every if e is not None), None)
    if error is not None:
        raise error
    if message is not None:
        raise (ValueError if message[0] else RuntimeError)(message[1])


def together(action: Callable[[], T], groups: Iterable[dist.ProcessGroup | None]) -> T:
    """Returns ``action()``; a ValueError on every rank if it raises one on any."""
    result: list[T] = []
    error = None
    try:
        result.append(action())
    except ValueError as e:
        error = e
    raise_together(error, groups)
    return result[0]
