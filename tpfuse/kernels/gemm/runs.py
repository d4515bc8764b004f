"""Activations on a CPU: plain ones in one pass of torch's, gated ones in runs of rows that stay in a core's cache; no
element is rounded in a way of its own.

torch's vectorised loops leave the last elements of a tensor to scalar functions, which round otherwise (sigmoid, erf).
Which elements are the last depends on how many ranks share a tensor, so each thread's share is padded to whole vectors.

Gate and up in halves [M, 2, N] are read as they lie.  In pairs (gate, up, gate, up, ..) they are taken apart, and put
together, as words of two numbers: torch's loops are vectorised on words, and not on every second element.  A bf16
number is the upper half of the fp32 number that it widens to, and a pair of fp32 numbers is a complex one.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.op import acc_dtype
from ..runtime.processor import SHARE
from .activation import ACTIVATIONS, GATED

RUN = 1 << 16  # elements of act(z); most functions of torch give at most two threads a share of so many
VECTORS = 2 * 32  # elements: whole vectors of all instructions in each share of one thread or two
_LITTLE = sys.byteorder == "little"  # a pair's first number is its word's lower half


@torch.no_grad()  # as multiply_into is
def value_of(z: Tensor, activation: str, y: Tensor | None = None) -> Tensor:
    """z [M, N] (gated [M, 2N] or [M, 2, N]) -> act(z) [M, N], in ``y`` where that is given, which is contiguous."""
    if activation not in GATED:
        return _in_place_of(y, _cut(ACTIVATIONS[activation].forward(_whole_vectors(z)), z))
    act = ACTIVATIONS[GATED[activation]]
    y = z.new_empty(len(z), z.shape[1:].numel() // 2) if y is None else y
    for (gate, up), z_rows, (y_rows,) in in_runs(2, z, (y,)):
        ups = apart(z_rows, gate.rows, up.rows)
        multiply(_unpadded(act.forward(gate.padded), ups), ups, y_rows, up.rows)
    return y


@torch.no_grad()
def gradient_of(
    dy: Tensor, z: Tensor, activation: str, *, rebuild: bool, dz: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy [M, N], z [M, N] (gated [M, 2N] or [M, 2, N]) -> dy act'(z) [M, N] (gated [M, 2N], in pairs), and act(z) with
    forward's bits (empty unless ``rebuild``), in ``dz`` and ``y`` where these are given, which are contiguous."""
    y = z.new_empty(dy.shape if rebuild else 0) if y is None else y
    if activation not in GATED:
        flat, plain = _whole_vectors(z), ACTIVATIONS[activation]
        dz = _in_place_of(dz, _cut(plain.backward(_whole_vectors(dy), flat), z))
        return dz, y.copy_(_cut(plain.forward(flat), z)) if rebuild else y
    dz = z.new_empty(len(z), 2 * dy.shape[1]) if dz is None else dz
    for (room, *rooms), z_rows, (dy_rows, dz_rows, y_rows) in in_runs(4, z, (dy, dz, y if rebuild else None)):
        gated_gradient(widened(dy_rows, room.rows), z_rows, activation, rooms=rooms, dz=dz_rows, y=y_rows)
    return dz, y


# ---- plain, at once: one pass of torch's, in the tensor's own dtype ----


def _whole_vectors(x: Tensor) -> Tensor:
    """Returns x as [n], with zeros behind it where a thread's share would not be whole vectors."""
    threads, flat = torch.get_num_threads(), x.reshape(-1)
    shares = min(threads, -(-len(flat) // SHARE))  # or, with zeros, one more; of gelu all threads
    vectors = VECTORS * math.lcm(threads, max(shares, 1), min(shares + 1, threads))
    missing = -len(flat) % vectors
    return F.pad(flat, (0, missing)) if missing else flat


def _cut(flat: Tensor, z: Tensor) -> Tensor:
    """Returns the first elements of ``flat`` in the shape of z, with no room behind them."""
    return flat.view(z.shape) if flat.numel() == z.numel() else flat[: z.numel()].clone().view(z.shape)


def _in_place_of(place: Tensor | None, x: Tensor) -> Tensor:
    return x if place is None else place.copy_(x)


# ---- gated, run by run, in fp32 ----


class Room(NamedTuple):
    """Memory for a run of rows in fp32 (fp64 of fp64): ``rows`` [m, N], and ``padded``, the same or flat with zeros
    behind, which is whole vectors."""

    rows: Tensor
    padded: Tensor


def in_runs(
    count: int, z: Tensor, others: Sequence[Tensor | None] = ()
) -> Iterator[tuple[list[Room], Tensor, tuple[Any, ...]]]:
    """Yields z and the others by runs of rows, of about RUN elements of act(z) together or of one row, behind ``count``
    rooms, whose memory is the same in each run and stays in a core's cache.  None stays None."""
    threads, columns = torch.get_num_threads(), z.shape[1:].numel() // 2
    if not z.numel():
        return
    step = max(RUN // columns // threads * threads, 1)
    pieces = zip(*(itertools.repeat(None) if t is None else t.split(step) for t in others), strict=False)
    rooms: list[Room] = []
    for z_rows, rows in zip(z.split(step), pieces if others else itertools.repeat(()), strict=False):
        shape = torch.Size((z_rows.shape[0], columns))
        if not rooms or rooms[0].rows.shape != shape:
            rooms = [_room(shape, z) for _ in range(count)]
        yield rooms, z_rows, rows


def gated_gradient(
    dy: Tensor, z: Tensor, activation: str, *, rooms: Sequence[Room], dz: Tensor, y: Tensor | None
) -> None:
    """dy [m, N] in fp32, z [m, 2N] or [m, 2, N] -> the gradient of z, in pairs, in ``dz`` [m, 2N], and act(gate) up in
    ``y`` [m, N] unless that is None, of one run and with three of its rooms."""
    act, (gate, up, product) = ACTIVATIONS[GATED[activation]], rooms
    ups = apart(z, gate.rows, up.rows)
    a = _unpadded(act.forward(gate.padded), ups)
    if y is not None:
        multiply(a, ups, y, product.rows)
    torch.mul(dy, ups, out=product.rows)
    dgate = _unpadded(act.backward(product.padded, gate.padded), ups)
    store_pairs(dgate, a.mul_(dy), dz)


def _room(shape: torch.Size, z: Tensor) -> Room:
    n, dtype = shape.numel(), acc_dtype(z)
    missing = -n % (VECTORS * torch.get_num_threads())  # gelu gives all threads a share
    if not missing:
        rows = z.new_empty(shape, dtype=dtype)
        return Room(rows, rows)
    padded = z.new_empty(n + missing, dtype=dtype)
    padded[n:] = 0
    return Room(padded[:n].view(shape), padded)


def _unpadded(padded: Tensor, model: Tensor) -> Tensor:
    """Returns what is no padding, in the shape of ``model``."""
    return padded if padded.dim() == 2 else padded[: model.numel()].view(model.shape)


def widened(x: Tensor, place: Tensor) -> Tensor:
    """Returns x in the dtype of ``place``: x itself, or there."""
    return x if x.dtype == place.dtype else place.copy_(x)


def multiply(a: Tensor, b: Tensor, place: Tensor, product: Tensor) -> None:
    """Writes a b, in fp32, to ``place``, and may overwrite ``product``, of that shape in fp32: torch multiplies and
    rounds faster in two passes than in one."""
    if place.dtype == a.dtype:
        torch.mul(a, b, out=place)
    else:
        place.copy_(torch.mul(a, b, out=product))


def apart(z: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """z [m, 2N] or [m, 2, N] -> gate [m, N], written to its place in fp32 (fp64 of fp64); returns up, written there or,
    in halves of that dtype, where it lies.

    Gate is copied in any case, because torch computes gelu in another way where memory is not contiguous.
    """
    if z.dim() == 3:
        gate.copy_(z[:, 0])
        return widened(z[:, 1], up)
    by_word = _LITTLE and z.storage_offset() % 2 == 0
    if by_word and z.dtype == torch.bfloat16:
        pairs = z.view(torch.int32)
        torch.bitwise_left_shift(pairs, 16, out=gate.view(torch.int32))
        torch.bitwise_and(pairs, -(1 << 16), out=up.view(torch.int32))
    elif by_word and z.dtype == torch.float32:
        pairs = z.view(torch.int64)
        gate.view(torch.int32).copy_(pairs)
        up.view(torch.int32).copy_(pairs >> 32)
    else:
        gate.copy_(z[:, ::2])
        up.copy_(z[:, 1::2])
    return up


def store_pairs(gate: Tensor, up: Tensor, place: Tensor) -> None:
    """Stores gate and up [m, N], fp32 or fp64, in ``place`` [m, 2N] in turns, and may overwrite both."""
    by_word = place.storage_offset() % 2 == 0
    if by_word and place.dtype == gate.dtype:
        torch.complex(gate, up, out=torch.view_as_complex(place.unflatten(-1, (-1, 2))))
    elif by_word and _LITTLE and place.dtype == torch.bfloat16:
        rounded = up.to(place.dtype)
        upper = up.copy_(rounded).view(torch.int32)
        lower = gate.view(torch.int32).copy_(rounded.copy_(gate).view(torch.uint16))
        torch.bitwise_or(lower, upper, out=place.view(torch.int32))
    else:
        place.copy_(torch.view_as_real(torch.complex(gate, up)).flatten(-2))
