"""A few entries of a long vector: which are large enough, chosen the same way every time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entries:
    """``index`` int64 [c], ascending, of a vector; ``value`` [c]."""

    index: Tensor
    value: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, part: slice | Tensor) -> "Entries":
        """Returns some of them, as torch indexes."""
        return Entries(self.index[part], self.value[part])

    @staticmethod
    def joined(parts: Sequence["Entries"]) -> "Entries":
        """Returns the entries of several, one after another."""
        return Entries(torch.cat([e.index for e in parts]), torch.cat([e.value for e in parts]))


def above(x: Tensor, threshold: float) -> Entries:
    """Returns the entries of ``x`` [n] that are not zero and of a magnitude of at least ``threshold``."""
    (index,) = torch.nonzero((x.abs() >= threshold) & (x != 0), as_tuple=True)
    return Entries(index, x[index])


def largest(x: Tensor, k: int) -> tuple[Entries, float]:
    """Returns the k entries of the largest magnitude, of equal ones the first, without zeros; and the magnitude from
    which on they are."""
    if k >= len(x):
        return above(x, 0.0), 0.0
    threshold = float(torch.kthvalue(x.abs(), len(x) - k + 1).values)
    found = above(x, threshold)
    if len(found) > k:
        equal = found.value.abs() == threshold
        spare = k - (len(found) - int(equal.sum()))  # of the equal ones
        found = found[~equal | (equal.cumsum(0) <= spare)]
    return found, threshold
