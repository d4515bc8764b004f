"""Whole tensors out of the slices that ranks hold."""

from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...collectives import all_gather
from ...models.files.write import full_tensor
from ...models.rows import BatchRows
from ...parallel import TensorParallel
from ...ranks.messages import channel, gather
from .trace import Key, Trace

Shape = tuple[int, ...]


class Pair(NamedTuple):
    """A tensor on one rank, and the split one: whole, or None where it is no slice of that."""

    key: Key
    one: Tensor
    split: Tensor | None


def pairs(one: Trace, split: Trace) -> Iterator[Pair]:
    """Yields what both traces have, in the order of ``one``, which is the same on every rank; a collective.

    A tensor is split in one dimension, or is the same everywhere.  Padding of the rows is left out.
    """
    tp, keys = split.tp, one.comparable(split)
    by_rank = gather({key: tuple(split[key].tensor.shape) for key in keys}, channel(tp.group))
    for key in keys:
        if not all(key in shapes for shapes in by_rank):
            continue
        (x, parameter), reference = split[key], one[key].tensor
        if parameter is not None:
            yield Pair(key, reference, full_tensor(x, *parameter))
        else:
            joined = _joined(x, [shapes[key] for shapes in by_rank], reference.shape, tp)
            real = _unpadded(reference, one.rows)
            yield Pair(key, reference[real], None if joined is None else joined[real])


def _unpadded(x: Tensor, rows: BatchRows | None) -> slice | EllipsisType:
    """Returns the index of x without the rows that fill up a batch, where it has them."""
    return ... if rows is None or x.dim() == 0 or len(x) != rows.count else slice(rows.batch * rows.seq)


def _joined(x: Tensor, shapes: list[Shape], size: Sequence[int], tp: TensorParallel) -> Tensor | None:
    """Returns the tensor of the shape ``size``; ``shapes`` are those of all ranks' slices."""
    if any(len(shape) != len(size) for shape in shapes):
        return None
    if size and all(0 <= shape[0] - size[0] < tp.size for shape in shapes):
        x, shapes = x[: size[0]], [(size[0], *shape[1:]) for shape in shapes]
    cut = [d for d, n in enumerate(size) if any(shape[d] != n for shape in shapes)]
    if not cut:
        return x
    sizes, n = [shape[cut[0]] for shape in shapes], size[cut[0]]
    if len(cut) > 1 or not 0 <= sum(sizes) - n < tp.size:  # of rows padded to a multiple of the ranks
        return None
    rows = x.movedim(cut[0], 0)
    rows = pad(rows.flatten(1) if x.dim() > 1 else rows[:, None], (0, 0, 0, max(sizes) - len(rows)))
    shards = all_gather(rows.contiguous(), tp.size, tp.group_name).unbind(0)
    full = torch.cat([shard[:count] for shard, count in zip(shards, sizes, strict=True)])[:n]
    return full.view(n, *x.movedim(cut[0], 0).shape[1:]).movedim(0, cut[0])
