"""How a parameter is made of a file's tensors, as an einops pattern that is read in both directions.

    GPT-2's c_attn.weight [D, 3 D]  "d (t h e) -> h t e d"  our qkv [G, 3, E, D], sharded on dim 0

A file holds full tensors in Hugging Face's layout; a parameter here is a slice of a full tensor in ours.  A rank reads
its own slices only: the sharded letter of the pattern says which ranges of the file's tensor those are.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ...layers.module import Spec
from ...parallel import TensorParallel


@dataclass(frozen=True)
class Source:
    """The tensors a parameter is made of: each is rearranged by ``pattern``, several are concatenated on dimension 1.

    ``widths``: how many indices of dimension 1 each takes.  ``also``: a second name that a single tensor is written
    under, and is read by where the first does not exist.
    """

    names: tuple[str, ...]
    pattern: str
    widths: tuple[int, ...]
    also: str | None = None

    @classmethod
    def one(cls, name: str, pattern: str, also: str | None = None) -> "Source":
        """Returns the source of a parameter that is one tensor of the file."""
        return cls((name,), pattern, (1,), also)

    @classmethod
    def several(cls, names: tuple[str, ...], pattern: str, widths: tuple[int, ...] | None = None) -> "Source":
        """Returns the source of a parameter that is several tensors of the file, of one index each by default."""
        return cls(names, pattern, (1,) * len(names) if widths is None else widths)

    @property
    def theirs(self) -> list[list[str]]:
        """The letters of each dimension in the file: "d (t h e)" -> [["d"], ["t", "h", "e"]]."""
        left = self.pattern.split("->")[0]
        return [token.strip("()").split() for token in re.findall(r"\([^)]*\)|\S+", left)]

    @property
    def ours(self) -> list[str]:
        """The letter of each dimension of the parameter."""
        return self.pattern.split("->")[1].split()

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the shape in our layout of each tensor, for the parameter's ``shape``."""
        return [shape] if len(self.names) == 1 else [(shape[0], width, *shape[2:]) for width in self.widths]

    def sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Returns the size of each letter for our ``shape``; "1" stands for itself."""
        return {letter: n for letter, n in zip(self.ours, shape, strict=True) if letter != "1"}

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in the file of a tensor whose shape in our layout is ``shape``."""
        sizes = self.sizes(shape)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.theirs)

    def read(self, stored: Callable[[str], Any], spec: Spec, tp: TensorParallel) -> Tensor:
        """Returns this rank's slice in our layout, from lazily read tensors."""
        shard = None if spec.dim is None else Shard(self.ours[spec.dim], spec.local(tp)[spec.dim])
        parts = []
        for name, shape in zip(self.names, self.shapes(spec.shape), strict=True):
            sizes = self.sizes(shape)
            x = read_slice(stored(name), self.theirs, sizes, shard)
            if shard is not None:
                sizes[shard.letter] = shard.range.stop - shard.range.start
            parts.append(rearrange(x, self.pattern, **sizes))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def write(self, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields the file's tensors, by name, of our full tensor."""
        left, right = self.pattern.split("->")
        parts = [full] if len(self.names) == 1 else full.split(self.widths, 1)
        for name, part in zip(self.names, parts, strict=True):
            stored = rearrange(part, f"{right} -> {left}", **self.sizes(part.shape)).contiguous()
            yield name, stored
            if self.also is not None:
                yield self.also, stored.clone()


@dataclass(frozen=True)
class Shard:
    """The letter of a pattern that is sharded, and this rank's range of it."""

    letter: str
    range: slice


def read_slice(stored: Any, theirs: list[list[str]], sizes: dict[str, int], shard: Shard | None) -> Tensor:
    """Returns the ranges of a lazily read tensor that belong to ``shard``; all of it without one."""
    if shard is None:
        return stored[...]
    dim = next(i for i, group in enumerate(theirs) if shard.letter in group)
    group, letter = theirs[dim], theirs[dim].index(shard.letter)
    outer = math.prod(sizes[n] for n in group[:letter])
    inner = math.prod(sizes[n] for n in group[letter + 1 :])
    before, n = (slice(None),) * dim, sizes[shard.letter]
    ranges = [
        stored[(*before, slice((i * n + shard.range.start) * inner, (i * n + shard.range.stop) * inner))]
        for i in range(outer)
    ]
    return ranges[0] if outer == 1 else torch.cat(ranges, dim)
