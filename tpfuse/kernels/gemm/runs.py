"""Activations on a CPU: plain ones in one pass of torch's, gated ones in runs of rows that stay in a core's cache; no
element is rounded in a way of its own.

torch's vectorised loops leave the last elements of a tensor to scalar functions, which round otherwise (sigmoid, erf).
Which elements are the last depends on how many ranks share a tensor, so each thread's share is padded to whole vectors.

Gate and up in halves [M, 2, N] are read as they lie.  In pairs (gate, up, gate, up, ..) they are taken apart, and put
together, as words of two numbers: torch's loops are vectorised on words, and not on every second element.  A bf16
number is the upper half of the fp32 number that it widens to, and a pair of fp32 numbers is a complex one.
"""

import math
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.op import acc_dtype
from .activation import ACTIVATIONS, GATED

SHARE = 1 << 15  # elements: torch starts no thread for fewer
RUN = 1 << 16  # elements of act(z); most functions of torch give at most two threads a share of so many
VECTORS = 2 * 32  # elements: whole vectors of all instructions in each share of one thread or two
_LITTLE = sys.byteorder == "little"  # a pair's first number is its word's lower half


def value_of(z: Tensor, activation: str, y: Tensor | None = None) -> Tensor:
    """z [M, N] (gated [M, 2N] or [M, 2, N]) -> act(z) [M, N], in ``y`` where that is given, which is contiguous."""
    if activation not in GATED:
        return _in_place_of(y, _cut(ACTIVATIONS[activation].forward(_whole_vectors(z)), z))
    act = ACTIVATIONS[GATED[activation]]
    y = z.new_empty(len(z), z.shape[1:].numel() // 2) if y is None else y
    for rows in _runs(*y.shape):
        gate, up = apart(z[rows])
        torch.mul(_unpadded(act.forward(gate), up), up, out=y[rows])
    return y


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
    act = ACTIVATIONS[GATED[activation]]
    dz = z.new_empty(len(z), 2 * dy.shape[1]) if dz is None else dz
    for rows in _runs(*dy.shape):
        gate, up = apart(z[rows])
        dy_run, a = dy[rows].to(acc_dtype(z)), _unpadded(act.forward(gate), up)
        if rebuild:
            torch.mul(a, up, out=y[rows])
        padded, da = _padded(up.shape, z)
        torch.mul(dy_run, up, out=da)
        store_pairs(_unpadded(act.backward(padded, gate), up), a.mul_(dy_run), dz[rows])
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


def _runs(rows: int, columns: int) -> Iterator[slice]:
    """Yields slices of rows, of about RUN elements together, or of one row; none where there is no element."""
    threads = torch.get_num_threads()
    step = max(RUN // max(columns, 1) // threads * threads, 1)
    return (slice(i, i + step) for i in range(0, rows if columns else 0, step))


def _padded(shape: torch.Size, z: Tensor) -> tuple[Tensor, Tensor]:
    """Returns new memory of whole vectors in fp32 (fp64 of fp64), [m, N] or flat with zeros behind, and its begin in
    ``shape``, which is [m, N]."""
    n, dtype = shape.numel(), acc_dtype(z)
    missing = -n % (VECTORS * torch.get_num_threads())  # gelu gives all threads a share
    if not missing:
        room = z.new_empty(shape, dtype=dtype)
        return room, room
    flat = z.new_empty(n + missing, dtype=dtype)
    flat[n:] = 0
    return flat, flat[:n].view(shape)


def _unpadded(padded: Tensor, model: Tensor) -> Tensor:
    """Returns what is no padding, in the shape of ``model``."""
    return padded if padded.dim() == 2 else padded[: model.numel()].view(model.shape)


def apart(z: Tensor) -> tuple[Tensor, Tensor]:
    """z [m, 2N] or [m, 2, N] -> gate and up [m, N] in fp32 (fp64 of fp64): gate in memory of whole vectors, up perhaps
    in z's own.

    Gate is copied in any case, because torch computes gelu in another way where memory is not contiguous.
    """
    if z.dim() == 3:
        padded, gate = _padded(z[:, 0].shape, z)
        gate.copy_(z[:, 0])
        return padded, z[:, 1].to(gate.dtype)
    padded, gate = _padded(torch.Size((len(z), z.shape[1] // 2)), z)
    up = torch.empty_like(gate)
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
    return padded, up


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
