"""Pieces of tensors: those that a rank holds, the rank that writes each, and their reading at another split."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...layers.module import Spec
from ...layers.state import check_whole
from ...parallel import TensorParallel

BUFFER = "buffer."  # before the names of buffers, of which every replica may have another
Index = tuple[int, ...]  # of an element in the whole tensor, or a shape
Place = tuple[str, Index]  # of a piece: its tensor, and where in it


class Piece(NamedTuple):
    """One rank's part of the tensor ``name`` of a checkpoint: elements from ``offset`` on of a whole of ``shape``."""

    name: str
    local: Tensor
    offset: Index
    shape: Index


class PieceInfo(NamedTuple):
    """A piece without its values, as ranks send it to each other."""

    name: str
    offset: Index
    size: Index
    shape: Index
    dtype: torch.dtype


class Stored(NamedTuple):
    """A piece in a file: ``read`` returns a part of it."""

    offset: Index
    size: Index
    read: Callable[[tuple[slice, ...]], Tensor]


Sources = Mapping[str, Sequence[Stored]]  # where the pieces of each tensor are


def piece(name: str, x: Tensor, spec: Spec, tp: TensorParallel) -> Piece:
    """Returns what is here of the tensor that ``x`` is a slice of, sharing its memory.

    ``x`` is shaped as a parameter of this ``spec``: a DTensor, a plain slice, or the whole.  The layout is the same at
    every number of ranks: a slice that several hold is there once, and a part of another parameter lies in that.
    """
    x, offset = x.detach(), [s.start for s in spec.local(tp)]
    if isinstance(x, DTensor):
        check_whole(x, spec)
        (chunk,) = x.__create_chunk_list__()
        x, offset = x.to_local(), list(chunk.offsets)
        if spec.dim is not None and spec.copies > 1:  # a DTensor is of all ranks' slices, one after the other
            rank, place = divmod(offset[spec.dim], spec.spread[spec.dim] // tp.size)
            offset[spec.dim] = rank // spec.copies * (spec.spread[spec.dim] // tp.size) + place
    if spec.origin is None:
        return Piece(name, x, tuple(offset), spec.shape)
    if x.dim() < len(spec.origin.whole):  # rows joined with groups: some of one group's, or several groups' whole
        x = x.unflatten(0, (-1, min(len(x), spec.origin.rows(spec.shape))))
    return Piece(name, x, spec.origin.box(tuple(offset), spec.shape), spec.origin.whole)


def full_piece(name: str, x: Tensor) -> Piece:
    """Returns a tensor that every rank has, or the part of it that is here of a DTensor, sharing its memory."""
    x = x.detach()
    if not isinstance(x, DTensor):
        return Piece(name, x, (0,) * x.dim(), tuple(x.shape))
    (chunk,) = x.__create_chunk_list__()
    return Piece(name, x.to_local(), tuple(chunk.offsets), tuple(x.shape))


def shares(pieces_of: Sequence[Sequence[PieceInfo]]) -> list[set[Place]]:
    """Divides the pieces among the ranks that hold them, each once and by bytes -> those that each rank writes.

    A buffer is that of the first rank that holds it.  ``pieces_of`` lists the pieces of each rank.  ValueError where
    the ranks disagree on a tensor, or hold only a part.
    """
    wholes: dict[str, PieceInfo] = {}
    owners: dict[Place, list[int]] = {}
    sizes: dict[str, dict[Index, Index]] = {}  # of the pieces of each tensor, by offset
    for rank, pieces in enumerate(pieces_of):
        for p in pieces:
            info = wholes.setdefault(p.name, p)
            if (info.shape, info.dtype) != (p.shape, p.dtype):
                raise ValueError(
                    f"{p.name} must be the same tensor on every rank, got {info.shape} of {info.dtype} and {p.shape}"
                    f" of {p.dtype} on rank {rank}"
                )
            owners.setdefault((p.name, p.offset), []).append(rank)
            sizes.setdefault(p.name, {})[p.offset] = p.size
    for name, info in wholes.items():
        elements = sum(map(math.prod, sizes[name].values()))
        if elements != math.prod(info.shape):
            raise ValueError(f"{name} has {math.prod(info.shape)} elements, the ranks hold {elements} of them")
        check_apart(name, info.shape, sizes[name].items())
    return _divided(pieces_of, owners)


def _divided(pieces_of: Sequence[Sequence[PieceInfo]], owners: dict[Place, list[int]]) -> list[set[Place]]:
    bytes_of = {(p.name, p.offset): math.prod(p.size) * p.dtype.itemsize for pieces in pieces_of for p in pieces}
    load, places = [0] * len(pieces_of), [set[Place]() for _ in pieces_of]
    for place, ranks in owners.items():
        rank = ranks[0] if place[0].startswith(BUFFER) else min(ranks, key=lambda r: (load[r], r))
        load[rank] += bytes_of[place]
        places[rank].add(place)
    return places


def check_apart(name: str, shape: Index, places: Iterable[tuple[Index, Index]]) -> None:
    """ValueError where pieces of a tensor, by offset and size, overlap or reach beyond its shape.

    Of pieces that do neither, as many elements as the tensor has leave no hole.
    """
    earlier: list[tuple[Index, Index]] = []  # that reach as far in the first dimension
    for offset, size in sorted(places):
        if any(a + n > whole for a, n, whole in zip(offset, size, shape, strict=True)):
            raise ValueError(f"{name} of shape {shape} has a piece at {offset} of shape {size}")
        earlier = [(o, s) for o, s in earlier if not o or o[0] + s[0] > offset[0]]
        for other, extent in earlier if math.prod(size) else ():
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, size, other, extent, strict=True)):
                raise ValueError(f"{name} has pieces that overlap, at {other} and at {offset}")
        earlier += [(offset, size)] if math.prod(size) else []


def fill(path: object, target: Piece, stored: Sequence[Stored]) -> None:
    """Reads a piece from the stored pieces that it overlaps, which are apart; OSError where they leave a hole."""
    filled = 0
    for s in stored:
        ends = zip(target.offset, target.local.shape, s.offset, s.size, strict=True)
        overlap = [(max(a, b), min(a + n, b + m)) for a, n, b, m in ends]
        if all(start < stop for start, stop in overlap):
            source = tuple(slice(i - b, j - b) for (i, j), b in zip(overlap, s.offset, strict=True))
            inside = tuple(slice(i - a, j - a) for (i, j), a in zip(overlap, target.offset, strict=True))
            target.local[inside].copy_(s.read(source))
            filled += math.prod(j - i for i, j in overlap)
    check_count(path, target.name, filled, target.local.numel())


def check_count(path: object, name: str, found: int, wanted: int) -> None:
    """OSError where elements of a tensor are missing."""
    if found != wanted:
        raise OSError(f"{path}: {name} is not whole: {found} of {wanted} elements are there")
