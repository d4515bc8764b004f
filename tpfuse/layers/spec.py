"""A parameter as a whole, of which a rank holds a slice."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..parallel import TensorParallel


@dataclass(frozen=True)
class Spec:
    """A parameter as a whole.

    ``shape`` is the full shape, ``dim`` the dimension it is sharded on (None: replicated), ``init`` its standard
    deviation at the start (or "ones" or "zeros"; None: initialised elsewhere).  A shard is one contiguous slice, split
    as torch.chunk splits.  ``copies`` ranks in a row hold the same slice (kv heads that are fewer than ranks), and
    ``leaf_copies`` leaves do (TensorParallel.all_leaves).
    ``origin``: the parameter is a part of another one, so that a layout which depends on the number of ranks changes
    neither initial values nor files.
    """

    shape: tuple[int, ...]
    dim: int | None
    init: float | str | None
    copies: int = 1
    leaf_copies: int = 1
    origin: "Origin | None" = None

    @property
    def spread(self) -> tuple[int, ...]:
        """The shape of all ranks' slices concatenated: the full shape, times ``copies`` on the sharded dimension."""
        return tuple(n * self.copies if i == self.dim else n for i, n in enumerate(self.shape))

    def local(self, tp: TensorParallel) -> tuple[slice, ...]:
        """Returns this rank's slice of the full tensor."""
        full = [slice(0, n) for n in self.shape]
        if self.dim is not None:
            full[self.dim] = slice(*tp.chunk(self.shape[self.dim], copies=self.leaf_copies))
        return tuple(full)


@dataclass(frozen=True)
class Origin:
    """A parameter as a part of another one, ``leaf`` of the same module, which a module over fewer ranks has instead.

    ``whole`` is the other's shape: groups, rows of a group, and what a row is.  The part has the rows from ``start`` on
    of every group: as its dimension 1 (kv heads, [G, 2, E, D]), or joined with the groups as its dimension 0 (query
    heads, [H, E, D]).  Initial values and files are those of the other.
    """

    leaf: str
    whole: tuple[int, ...]
    start: int

    def offset(self, indices: np.ndarray, part: tuple[int, ...]) -> np.ndarray:
        """Returns where indices of dimension 0 begin in the other parameter, flattened; ``part``: this one's shape."""
        group, row = self._place(indices, part)
        return (group * self.whole[1] + row) * math.prod(self.whole[2:])

    def box(self, offset: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
        """Returns where a slice of the part that begins at ``offset``, of one group or of whole ones, lies in the other
        one."""
        group, row = self._place(offset[0], part)
        return (group, row, *offset[2 - len(self.whole) :])

    def rows(self, part: tuple[int, ...]) -> int:
        """Returns how many rows of a group the part has."""
        return part[0] // self.whole[0] * (part[1] if len(part) == len(self.whole) else 1)

    def _place(self, index: Any, part: tuple[int, ...]) -> tuple[Any, Any]:
        rows = part[0] // self.whole[0]
        return index // rows, index % rows + self.start
