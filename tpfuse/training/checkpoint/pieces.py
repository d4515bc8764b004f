"""Pieces of tensors: those that a rank holds, the rank that writes each, and their reading at another split."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...layers.module import Spec
from ...layers.state import check_whole
from ...parallel import TensorParallel

Index = tuple[int, ...]  # of an element in the whole tensor, or a shape


class Piece(NamedTuple):
    """One rank's part of a tensor: the elements from ``offset`` onwards of a whole of ``shape``."""

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


def piece(x: Tensor, spec: Spec, tp: TensorParallel) -> Piece:
    """Returns what is here of the tensor that ``x`` is a slice of, sharing its memory.

    ``x`` is shaped as a parameter of this ``spec``: a DTensor, a plain slice, or the whole.  With ``tp.bitwise`` copies
    of a slice are one piece, so that the whole is the same at every split; else they stand one after another.
    """
    x = x.detach()
    if isinstance(x, DTensor):
        check_whole(x, spec)
        (chunk,) = x.__create_chunk_list__()
        return Piece(x.to_local(), tuple(chunk.offsets), tuple(x.shape))
    if tp.bitwise is not None:
        return Piece(x, tuple(s.start for s in spec.local(tp)), spec.shape)
    offset = [0] * x.dim()
    if spec.dim is not None and tp.size > 1:
        offset[spec.dim], _ = tp.chunk(spec.spread[spec.dim])
    return Piece(x, tuple(offset), spec.spread)


def full_piece(x: Tensor) -> Piece:
    """Returns a tensor that every rank has."""
    return Piece(x.detach(), (0,) * x.dim(), tuple(x.shape))


def shares(pieces_of: Sequence[Sequence[PieceInfo]]) -> list[set[str]]:
    """Divides the pieces among the ranks that hold them, each once and by bytes -> the names that each rank writes.

    ``pieces_of`` lists the pieces of each rank.  ValueError where the ranks disagree on a tensor, or hold only a part.
    """
    wholes: dict[str, PieceInfo] = {}
    owners: dict[tuple[str, Index], list[int]] = {}
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


def _divided(pieces_of: Sequence[Sequence[PieceInfo]], owners: dict[tuple[str, Index], list[int]]) -> list[set[str]]:
    bytes_of = {(p.name, p.offset): math.prod(p.size) * p.dtype.itemsize for pieces in pieces_of for p in pieces}
    load, names = [0] * len(pieces_of), [set[str]() for _ in pieces_of]
    for (name, offset), ranks in owners.items():
        rank = min(ranks, key=lambda r: (load[r], r))
        load[rank] += bytes_of[name, offset]
        names[rank].add(name)
    return names


def check_apart(name: str, shape: Index, places: Iterable[tuple[Index, Index]]) -> None:
    """ValueError where pieces of a tensor, by offset and size, overlap or reach beyond its shape.

    Of pieces that do neither, as many elements as the tensor has leave no hole.
    """
    before: list[tuple[Index, Index]] = []  # that reach as far in the first dimension
    for offset, size in sorted(places):
        if any(a + n > whole for a, n, whole in zip(offset, size, shape, strict=True)):
            raise ValueError(f"{name} of shape {shape} has a piece at {offset} of shape {size}")
        before = [(o, s) for o, s in before if not o or o[0] + s[0] > offset[0]]
        for other, extent in before if math.prod(size) else ():
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, size, other, extent, strict=True)):
                raise ValueError(f"{name} has pieces that overlap, at {other} and at {offset}")
        before += [(offset, size)] if math.prod(size) else []


def fill(name: str, target: Piece, stored: Sequence[Stored]) -> None:
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
    if filled != target.local.numel():
        raise OSError(f"{name} is not whole: {filled} of {target.local.numel()} elements are there")
