"""The ranks that write or read one checkpoint, and their messages.

Those of a save in the background travel in a gloo group of their own: they must not mix with those of the training,
and must outlive ``destroy_process_group``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ...ranks.gloo import limit
from ...ranks.messages import gather_results, together

T = TypeVar("T")
_background: "list[tuple[dist.ProcessGroup, Ranks]]" = []  # at most one: the world it was made in, and its ranks


class Ranks(NamedTuple):
    """This rank among all ranks of the world; without torch.distributed it is alone."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    def together(self, action: Callable[[], T]) -> T:
        """Returns ``action()`` of this rank; an error of one rank is an error of all, and so is its end."""
        return together(action, (self.group,))

    def gather(self, action: Callable[[], T]) -> list[T]:
        """Returns ``action()`` of every rank, in rank order; errors as in :meth:`together`."""
        return gather_results(action, self.group)

    def on_first(self, action: Callable[[], T]) -> T:
        """Returns ``action()`` of rank 0, which alone calls it; its error is an error of all."""
        value: Any = self.gather(lambda: action() if self.rank == 0 else None)[0]
        return value


def ranks_named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def all_ranks(*, background: bool = False) -> Ranks:
    """Returns the ranks of the world; every rank calls it.

    In the ``background`` they have a group of their own, made by the first such call in a world.  Others do without:
    to make a group takes the store, which ends with the launcher, and a last save comes after it.  ValueError on every
    rank where some are in the background and others not.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return Ranks(0, 1, None)
    ranks = Ranks(world.rank(), world.size(), world)
    everywhere = ranks.gather(lambda: background)
    if len(set(everywhere)) > 1:
        values = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(everywhere))
        raise ValueError(f"background must be the same on every rank, got {values}")
    if not background:
        return ranks
    if not _background or _background[0][0] is not world:
        group = dist.new_group(backend="gloo", timeout=limit(world))
        _background[:] = [(world, Ranks(world.rank(), world.size(), group))]
    return _background[0][1]
