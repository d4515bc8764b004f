"""Pieces of tensors: those that a rank holds, the rank that writes each, and their reading at another split."""

import math
from collections.abc import Callable, Sequence
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
    elements: dict[str, int] = {}  # elements by name
    for rank, pieces in enumerate(pieces_of):
        for p in pieces:
            info = wholes.setdefault(p.name, p)
            if (info.shape, info.dtype) != (p.shape, p.dtype):
                raise ValueError(
                    f"{p.name} must be the same tensor on every rank, got {info.shape} of {info.dtype} and {p.shape}"
                    f" of {p.dtype} on rank {rank}"
                )
            if (p.name, p.offset) not in owners:
                elements[p.name] = elements.get(p.name, 0) + math.prod(p.size)
            owners.setdefault((p.name, p.offset), []).append(rank)
    for name, info in wholes.items():
        if elements[name] != math.prod(info.shape):
            raise ValueError(f"{name} has {math.prod(info.shape)} elements, the ranks hold {elements[name]} of them")
    return _divided(pieces_of, owners)


def _divided(pieces_of: Sequence[Sequence[PieceInfo]], owners: dict[tuple[str, Index], list[int]]) -> list[set[str]]:
    bytes_of = {(p.name, p.offset): math.prod(p.size) * p.dtype.itemsize for pieces in pieces_of for p in pieces}
    load, names = [0] * len(pieces_of), [set[str]() for _ in pieces_of]
    for (name, offset), ranks in owners.items():
        rank = min(ranks, key=lambda r: (load[r], r))
        load[rank] += bytes_of[name, offset]
        names[rank].add(name)
    return names


def fill(name: str, target: Piece, stored: Sequence[Stored]) -> None:
    """Reads a piece from the stored pieces that it overlaps; OSError where they leave a hole."""
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
