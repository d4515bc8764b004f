"""Differences of two tensors as bits: elements, and units in the last place."""

from typing import NamedTuple

import torch
from torch import Tensor

from .trace import Key

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def bits(x: Tensor) -> Tensor:
    """Returns x as integers: NaNs compare, and -0 is not 0."""
    return x.contiguous().view(INTEGERS[x.element_size()])


def differing(a: Tensor, b: Tensor) -> tuple[int, int]:
    """Returns the number of elements whose bits differ, and the largest distance of two: in units in the last place,
    counted along the line of a dtype's numbers, on which -0 is beside 0 and NaNs are beyond infinity."""
    unequal = bits(a) != bits(b)
    x, y = _place(a[unequal]), _place(b[unequal])
    distances = (torch.maximum(x, y) - torch.minimum(x, y)).cpu().numpy().view("uint64")
    return len(distances), int(distances.max(initial=0))


def _place(x: Tensor) -> Tensor:
    """Returns the place of each number on the line, int64."""
    integers = bits(x)
    return torch.where(integers >= 0, integers.long(), -1 - (integers.long() & torch.iinfo(integers.dtype).max))


class BitsRow(NamedTuple):
    """A tensor on one rank and split: of how many elements the bits differ, and by how much at most."""

    kind: str
    name: str
    differ: int
    elements: int
    ulps: int

    @classmethod
    def of(cls, key: Key, one: Tensor, split: Tensor) -> "BitsRow":
        count, ulps = differing(one, split)
        return cls(key.kind, key.label, count, one.numel(), ulps)

    @property
    def same(self) -> bool:
        return self.differ == 0

    @property
    def distance(self) -> float:
        """The larger, the worse."""
        return self.differ

    @property
    def cells(self) -> dict[str, str]:
        return {"differ": f"{self.differ}", "elements": f"{self.elements}", "largest ulp": f"{self.ulps}"}

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.differ} of {self.elements} elements differ, largest {self.ulps} ulp"
