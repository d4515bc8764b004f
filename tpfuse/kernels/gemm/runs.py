"""Activations on a CPU: plain ones in one pass of torch's, gated ones in runs of elements that stay in a core's cache;
no element is rounded in a way of its own.

torch's vectorised loops leave the last elements of a tensor to scalar functions, which round otherwise (sigmoid, erf).
Which elements are the last depends on how many ranks share a tensor, so each thread's share is padded to whole vectors.

Columns of gate and up (gate, up, gate, up, ..) are taken apart, and put together, as words of two numbers: torch's
loops are vectorised on words, and not on every second element.  A bf16 number is the upper half of the fp32 number that
it widens to, and a pair of fp32 numbers is a complex one.
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
    """z [M, N] (gated [M, 2N]) -> act(z) [M, N], in ``y`` where that is given, which is contiguous."""
    if activation not in GATED:
        return _in_place_of(y, _cut(ACTIVATIONS[activation].forward(_whole_vectors(z)), z))
    act = ACTIVATIONS[GATED[activation]]
    y = z.new_empty(len(z), z.shape[1] // 2) if y is None else y
    for (z_run,), (y_run,) in _runs([z], [y], y.numel()):
        gate, up = apart(z_run)
        torch.mul(act.forward(gate)[: len(y_run)], up[: len(y_run)], out=y_run)
    return y


def gradient_of(
    dy: Tensor, z: Tensor, activation: str, *, rebuild: bool, dz: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy [M, N], z [M, N] (gated [M, 2N]) -> dy act'(z) like z, and act(z) with forward's bits (empty unless
    ``rebuild``), in ``dz`` and ``y`` where these are given, which are contiguous."""
    y = z.new_empty(dy.shape if rebuild else 0) if y is None else y
    if activation not in GATED:
        flat, plain = _whole_vectors(z), ACTIVATIONS[activation]
        dz = _in_place_of(dz, _cut(plain.backward(_whole_vectors(dy), flat), z))
        return dz, y.copy_(_cut(plain.forward(flat), z)) if rebuild else y
    act = ACTIVATIONS[GATED[activation]]
    dz = z.new_empty(z.shape) if dz is None else dz
    for (dy_run, z_run), (dz_run, *y_run) in _runs([dy, z], [dz, y] if rebuild else [dz], dy.numel()):
        (gate, up), dy_run = apart(z_run), _widened(dy_run)
        a = act.forward(gate)
        store_pairs(act.backward(dy_run * up, gate), a * dy_run, dz_run)
        for place in y_run:
            torch.mul(a[: len(place)], up[: len(place)], out=place)
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


def _widened(x: Tensor) -> Tensor:
    return x.to(acc_dtype(x))


def _runs(inputs: list[Tensor], outputs: list[Tensor], count: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yields inputs and outputs run by run of ``count`` elements of act(z), the last inputs with zeros behind them."""
    if not count:
        return
    flat = [(x.reshape(-1), x.numel() // count) for x in inputs], [(x.view(-1), x.numel() // count) for x in outputs]
    vectors = VECTORS * torch.get_num_threads()  # gelu gives all threads a share
    step = max(RUN // vectors, 1) * vectors
    for start in range(0, count, step):
        stop = min(start + step, count)
        read, written = ([x[n * start : n * stop] for x, n in tensors] for tensors in flat)
        if missing := (start - stop) % vectors:
            read = [F.pad(x, (0, n * missing)) for x, (_, n) in zip(read, flat[0], strict=True)]
        yield read, written


def apart(z: Tensor) -> tuple[Tensor, Tensor]:
    """z [2n] -> gate, up [n], new, contiguous and widened to fp32 (fp64 of fp64)."""
    by_word = _LITTLE and z.storage_offset() % 2 == 0
    if by_word and z.dtype == torch.bfloat16:
        pairs = z.view(torch.int32)
        return (pairs << 16).view(torch.float32), (pairs & -(1 << 16)).view(torch.float32)
    if by_word and z.dtype == torch.float32:
        pairs = z.view(torch.int64)
        return pairs.to(torch.int32).view(torch.float32), (pairs >> 32).to(torch.int32).view(torch.float32)
    gate, up = _widened(z).view(-1, 2).unbind(1)
    return gate.contiguous(), up.contiguous()


def store_pairs(gate: Tensor, up: Tensor, place: Tensor) -> None:
    """Stores the first of gate and up, fp32 or fp64, in ``place`` [2n] in turns; at once where nothing is rounded."""
    gate, up = (x[: len(place) // 2] for x in (gate, up))
    if place.dtype == gate.dtype and place.storage_offset() % 2 == 0:
        torch.complex(gate, up, out=torch.view_as_complex(place.view(-1, 2)))
    else:
        place.copy_(torch.view_as_real(torch.complex(gate, up)).view(-1))
