"""An error on one rank is an error on every rank, so that none waits for one that has left."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
Gather = Callable[[Any, dist.ProcessGroup | None], list[Any]]
_KINDS: tuple[type[Exception], ...] = (ValueError, OSError)  # what bad input and bad files raise; else RuntimeError


def raise_together(
    error: Exception | None, groups: Iterable[dist.ProcessGroup | None], by: Gather | None = None
) -> None:
    """Raises ``error`` if there is one; if another rank of the groups has one, an error with the same message.

    That is a ValueError or an OSError where the other rank's is one, and a RuntimeError otherwise.  ``by``: how the
    messages are gathered.
    """
    message = None if error is None else _described(error)
    for group in groups:
        if group is not None:
            message = next((found for found in (by or gather)(message, group) if found is not None), None)
    if error is not None:
        raise error
    if message is not None:
        raise (*_KINDS, RuntimeError)[message[0]](message[1])


def together(action: Callable[[], T], groups: Iterable[dist.ProcessGroup | None], by: Gather | None = None) -> T:
    """Returns ``action()``; an error on every rank of the groups if it raises one on any.  Each rank calls it.

    ``by``: how the messages are gathered.
    """
    result: list[T] = []
    error = None
    try:
        result.append(action())
    except Exception as e:
        error = e
    raise_together(error, groups, by)
    return result[0]


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Returns the values of all ranks of ``group`` (the world), in rank order; each rank calls it."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _described(error: Exception) -> tuple[int, str]:
    kind = next((i for i, known in enumerate(_KINDS) if isinstance(error, known)), len(_KINDS))
    return kind, f"{error}" if kind < len(_KINDS) else f"{type(error).__name__}: {error}"
