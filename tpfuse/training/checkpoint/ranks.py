"""The ranks that write or read one checkpoint, and what they tell each other.

Those of a save in the background travel in a gloo group of their own: they must not mix with those of the training,
and must outlive ``destroy_process_group``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ...ranks.gloo import limit
from ...ranks.rollcall import roll_call
from ...ranks.together import together

T = TypeVar("T")
_made: "list[tuple[dist.ProcessGroup, Ranks]]" = []  # at most one: the world it was made in, and its ranks


class Ranks(NamedTuple):
    """This rank among all ranks of the world; without torch.distributed it is alone."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    def each(self, action: Callable[[], T]) -> T:
        """Returns what ``action`` returned on this rank; an error of one rank is an error of all, and so is its end."""
        return together(action, (self.group,), roll_call)

    def gather(self, action: Callable[[], T]) -> list[T]:
        """As :meth:`each`; returns what ``action`` returned on every rank, in rank order."""
        mine = self.each(action)
        return [mine] if self.group is None else roll_call(mine, self.group)

    def first(self, action: Callable[[], T]) -> T:
        """Returns what ``action`` returned on rank 0, which alone calls it; its error is an error of all."""
        value: Any = self.gather(lambda: action() if self.rank == 0 else None)[0]
        return value


def all_ranks(*, background: bool = False) -> Ranks:
    """Returns the ranks of the world; every rank calls it.

    In the ``background`` they have a group of their own, made by the first such call in a world.  Others do without:
    to make a group takes the store, which ends with the launcher, and a last save comes after it.
    """
    if not dist.is_initialized():
        return Ranks(0, 1, None)
    world = dist.group.WORLD
    assert world is not None
    if not background:
        return Ranks(dist.get_rank(), dist.get_world_size(), world)
    if not _made or _made[0][0] is not world:
        own = dist.new_group(backend="gloo", timeout=limit(world))
        _made[:] = [(world, Ranks(dist.get_rank(), dist.get_world_size(), own))]
    return _made[0][1]
