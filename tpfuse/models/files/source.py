"""The tensors of a file that a parameter is made of, and an einops pattern that is read in both directions.

    GPT-2's c_attn.weight [D, 3 D]  "d (t h e) -> h t e d"  our qkv [G, 3, E, D], sharded on dim 0

A file holds full tensors in Hugging Face's layout; a parameter here is a slice of a full tensor in ours.  A rank reads
its own slices only: the sharded letter of the pattern says which ranges of the file's tensor those are.

A tensor of the file may hold several parameters, one after another in dimension 0 (Phi-3's q, k and v): a
:class:`RowBlocks` says which rows of it are meant, and :func:`written` puts it together again.
"""

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ...layers.module import Spec
from ...parallel import TensorParallel


class RowBlocks(NamedTuple):
    """Rows of a tensor in the file, which is ``of`` blocks of equal size: ``blocks`` of them from ``start`` on."""

    start: int = 0
    blocks: int = 1
    of: int = 1

    def rows(self, rows: int) -> slice:
        """Returns the range of the tensor that these ``rows`` are."""
        size = rows // self.blocks
        return slice(self.start * size, self.start * size + rows)


ALL_ROWS = RowBlocks()


@dataclass(frozen=True)
class Source:
    """The tensors a parameter is made of: each is rearranged by ``pattern``, several are concatenated on dimension 1.

    ``widths``: how many indices of dimension 1 each takes.  ``also``: a second name that a single tensor is written
    under, and is read by where the first does not exist.  ``places``: where in its tensor each stands; all are whole
    tensors unless given.  ``alternative``: what it is read from where these do not exist.
    """

    names: tuple[str, ...]
    pattern: str
    widths: tuple[int, ...]
    also: str | None = None
    places: tuple[RowBlocks, ...] = ()
    alternative: "Source | None" = None

    @classmethod
    def one(cls, name: str, pattern: str, also: str | None = None) -> "Source":
        """Returns the source of a parameter that is one tensor of the file."""
        return cls((name,), pattern, (1,), also)

    @classmethod
    def several(cls, names: tuple[str, ...], pattern: str, widths: tuple[int, ...] | None = None) -> "Source":
        """Returns the source of a parameter that is several tensors of the file, of one index each by default."""
        return cls(names, pattern, (1,) * len(names) if widths is None else widths)

    def within(self, *places: RowBlocks) -> "Source":
        """Returns the same source, of tensors of which these places are meant."""
        return replace(self, places=places)

    def or_read(self, alternative: "Source") -> "Source":
        """Returns the same source, which is read as ``alternative`` where that one's tensors exist and these do not."""
        return replace(self, alternative=alternative)

    def found_by(self, names: Container[str]) -> "Source":
        """Returns the source, this one or ``alternative``, that tensors of these ``names`` are read by."""
        if self.alternative is None or any(name in names for name in self.names):
            return self
        return self.alternative if any(name in names for name in self.alternative.names) else self

    @property
    def parts(self) -> tuple[tuple[str, RowBlocks], ...]:
        """The name and the place of each tensor."""
        return tuple(zip(self.names, self.places or (ALL_ROWS,) * len(self.names), strict=True))

    @property
    def file_letters(self) -> list[list[str]]:
        """The letters of each dimension in the file: "d (t h e)" -> [["d"], ["t", "h", "e"]]."""
        left = self.pattern.split("->")[0]
        return [token.strip("()").split() for token in re.findall(r"\([^)]*\)|\S+", left)]

    @property
    def letters(self) -> list[str]:
        """The letter of each dimension of the parameter."""
        return self.pattern.split("->")[1].split()

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the shape in our layout of each tensor, for the parameter's ``shape``."""
        return [shape] if len(self.names) == 1 else [(shape[0], width, *shape[2:]) for width in self.widths]

    def sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Returns the size of each letter for our ``shape``; "1" stands for itself."""
        return {letter: n for letter, n in zip(self.letters, shape, strict=True) if letter != "1"}

    def file_shape(self, shape: tuple[int, ...], place: RowBlocks = ALL_ROWS) -> tuple[int, ...]:
        """Returns the shape of a tensor in the file, for that in our layout of what stands at its ``place``."""
        sizes = self.sizes(shape)
        rows, *columns = (math.prod(sizes[letter] for letter in group) for group in self.file_letters)
        return (rows // place.blocks * place.of, *columns)

    def file_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the shape in the file of each tensor, for the parameter's ``shape``."""
        return [self.file_shape(part, place) for part, (_, place) in zip(self.shapes(shape), self.parts, strict=True)]

    def read(self, stored: Callable[[str], Any], spec: Spec, tp: TensorParallel) -> Tensor:
        """Returns this rank's slice in our layout, from lazily read tensors."""
        shard = None if spec.dim is None else SplitLetter(self.letters[spec.dim], spec.local(tp)[spec.dim])
        slices = []
        for (name, place), shape in zip(self.parts, self.shapes(spec.shape), strict=True):
            sizes = self.sizes(shape)
            tensor = stored(name)
            if place.of > 1:
                tensor = _LazyRows(tensor, place.rows(self.file_shape(shape)[0]))
            x = read_slice(tensor, self.file_letters, sizes, shard)
            if shard is not None:
                sizes[shard.letter] = shard.range.stop - shard.range.start
            slices.append(rearrange(x, self.pattern, **sizes))
        return slices[0] if len(slices) == 1 else torch.cat(slices, 1)

    def write(self, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields the file's tensors, by name, of our full tensor; ValueError where it is a part of one only."""
        yield from written([(self, full)])

    def pieces(self, full: Tensor) -> Iterator[tuple[str, RowBlocks, Tensor]]:
        """Yields what stands at each place of the file's tensors."""
        left, right = self.pattern.split("->")
        parts = [full] if len(self.names) == 1 else full.split(self.widths, 1)
        for (name, place), part in zip(self.parts, parts, strict=True):
            stored = rearrange(part, f"{right} -> {left}", **self.sizes(part.shape)).contiguous()
            yield name, place, stored
            if self.also is not None:
                yield self.also, place, stored.clone()


@dataclass(frozen=True)
class Stacked(Source):
    """The tensors of a parameter of which each index of dimension 0 is made of tensors of its own: ``each`` says which.

    Where dimension 0 is split, a rank opens those of its own indices.
    """

    each: tuple[Source, ...] = ()

    @classmethod
    def of(cls, sources: Iterable[Source]) -> "Stacked":
        """Returns the source of the parameter that these are the indices of."""
        each = tuple(sources)
        names = tuple(name for source in each for name in source.names)
        return cls(names, each[0].pattern, each[0].widths, each=each)

    def file_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [stored for source in self.each for stored in source.file_shapes(shape[1:])]

    def read(self, stored: Callable[[str], Any], spec: Spec, tp: TensorParallel) -> Tensor:
        one = replace(spec, shape=spec.shape[1:], dim=None)
        return torch.stack([source.read(stored, one, tp) for source in self.each[spec.local(tp)[0]]])

    def pieces(self, full: Tensor) -> Iterator[tuple[str, RowBlocks, Tensor]]:
        for source, part in zip(self.each, full, strict=True):
            yield from source.pieces(part)


def written(parameters: Iterable[tuple[Source, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Takes parameters, as (source, full tensor) -> yields the file's tensors, by name, each as soon as it is whole.

    ValueError where a tensor of the file is still lacking rows in the end.
    """
    parts: dict[str, dict[int, tuple[RowBlocks, Tensor]]] = {}
    for source, full in parameters:
        for name, place, tensor in source.pieces(full):
            if place.of == 1:
                yield name, tensor
                continue
            pieces = parts.setdefault(name, {})
            pieces[place.start] = place, tensor
            if sum(p.blocks for p, _ in pieces.values()) == place.of:
                del parts[name]
                yield name, torch.cat([pieces[start][1] for start in sorted(pieces)])
    if parts:
        raise ValueError(f"written: {', '.join(parts)} is not all there")


class _LazyRows:
    """Rows of a lazily read tensor, as a tensor to read lazily."""

    def __init__(self, stored: Any, rows: slice):
        self.stored, self.rows = stored, rows

    def __getitem__(self, index: Any) -> Any:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        if rows is Ellipsis:
            rows = slice(None)
        start, stop, _ = rows.indices(self.rows.stop - self.rows.start)
        return self.stored[(slice(self.rows.start + start, self.rows.start + stop), *columns)]


@dataclass(frozen=True)
class SplitLetter:
    """The letter of a pattern that is sharded, and this rank's range of it."""

    letter: str
    range: slice


def read_slice(stored: Any, letters: list[list[str]], sizes: dict[str, int], shard: SplitLetter | None) -> Tensor:
    """Returns the ranges of a lazily read tensor that belong to ``shard``; all of it without one."""
    if shard is None:
        return stored[...]
    dim = next(i for i, group in enumerate(letters) if shard.letter in group)
    group, letter = letters[dim], letters[dim].index(shard.letter)
    outer = math.prod(sizes[n] for n in group[:letter])
    inner = math.prod(sizes[n] for n in group[letter + 1 :])
    leading, n = (slice(None),) * dim, sizes[shard.letter]
    ranges = [
        stored[(*leading, slice((i * n + shard.range.start) * inner, (i * n + shard.range.stop) * inner))]
        for i in range(outer)
    ]
    return ranges[0] if outer == 1 else torch.cat(ranges, dim)
