"""A few entries of a long vector: which are large enough, chosen the same way every time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import select_large

_SAMPLE, _SAMPLED = 1 << 16, 1 << 8  # entries of a sample at least, and how many of them the k largest are to be


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


def above(x: Tensor, threshold: float, most: int) -> tuple[Entries, int]:
    """Returns the entries of ``x`` [n] that are not zero and of a magnitude of at least ``threshold``, the first
    ``most`` of them, and how many there are.  The host waits for that number: the sizes of messages follow from it."""
    index, value, count = select_large(x, threshold, most)
    number = int(count)
    return Entries(index[:number], value[:number]), number


def largest(x: Tensor, k: int) -> tuple[Entries, float]:
    """Returns the k entries of the largest magnitude, of equal ones the first, without zeros; and the magnitude from
    which on they are."""
    if k >= len(x):
        return above(x, 0.0, len(x))[0], 0.0
    entries = _candidates(x, k)
    if entries is None:
        threshold = _kth_of(x.abs(), k)
        entries, count = above(x, threshold, k)
        if count > k:
            entries, _ = above(x, threshold, count)
    else:
        magnitude = entries.value.abs()
        threshold = _kth_of(magnitude, k)
        entries = entries[magnitude >= threshold]
    if len(entries) > k:
        equal = entries.value.abs() == threshold
        spare = k - int((~equal).sum())  # of the equal ones
        entries = entries[~equal | (equal.cumsum(0) <= spare)]
    return entries, threshold


def _candidates(x: Tensor, k: int) -> Entries | None:
    """Returns k to 2 k entries of which the k largest are, found by the magnitudes of a sample; None if the sample does
    not tell, or is not much less than all.  The k-th largest of all takes many times as long as reading them."""
    n = len(x)
    step = n // max(_SAMPLE, _SAMPLED * n // k)
    if step < 4:
        return None
    sample = x[::step].abs()
    threshold = _kth_of(sample, min(-(-3 * k * len(sample) // (2 * n)), len(sample)))
    entries, count = above(x, threshold, 2 * k)
    return entries if k <= count <= 2 * k else None


def _kth_of(magnitude: Tensor, k: int) -> float:
    return float(torch.kthvalue(magnitude, len(magnitude) - k + 1).values)
