"""A parameter as a whole, of which a rank holds a slice."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..parallel import TensorParallel


@dataclass(frozen=True)
class Spec:
    """A parameter as a whole.

    ``shape`` is the full shape, ``dim`` the dimension it is sharded on (None: replicated), ``init`` its standard
    deviation at the start (or "ones" or "zeros"; None: initialised elsewhere).  A shard is one contiguous slice, split
    as torch.chunk splits.  ``copies`` ranks in a row hold the same slice (kv heads that are fewer than ranks), and
    ``leaf_copies`` leaves do (TensorParallel.all_leaves).
    ``origin``: the initial values are those of another parameter's elements, so that a layout which depends on the
    number of ranks does not change them.
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
    """Index i of dimension 0 takes its initial values from another parameter of the same module.

    They are the elements from ``offset(i)`` on of the parameter ``leaf``, flattened.
    """

    leaf: str
    offset: Callable[[np.ndarray], np.ndarray]
