"""Activations on a CPU: in runs of elements that stay in a core's cache, with no element rounded in a way of its own.

torch's vectorised loops leave the last elements of a tensor to scalar functions, which round otherwise (sigmoid, erf).
Which elements are the last depends on how many ranks share a tensor, so a run is padded to whole vectors.

Columns of gate and up (gate, up, gate, up, ..) are taken apart, and put together, as words of two numbers: torch's
loops are vectorised on words, and not on every second element.  A bf16 number is the upper half of the fp32 number that
it widens to, and a pair of fp32 numbers is a complex one.
"""

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.op import acc_dtype
from .activation import ACTIVATIONS, GATED, Activation

RUN = 1 << 16  # elements of act(z); most functions of torch give at most two threads a share of so many
VECTORS = 2 * 32  # elements: whole vectors of all instructions in each share of one thread or two
_LITTLE = sys.byteorder == "little"  # a pair's first number is its word's lower half


def write_value(z: Tensor, activation: str, y: Tensor) -> None:
    """z [M, N] (gated [M, 2N]) -> act(z) in y [M, N], which is contiguous."""
    act = _entry(activation)
    for (z_run,), (y_run,) in _runs([z], [y], y.numel()):
        if activation in GATED:
            gate, up = apart(z_run)
            value = _value(act, gate).mul_(up)
        else:
            value = _value(act, _widened(z_run))
        y_run.copy_(value[: len(y_run)])


def write_gradient(dy: Tensor, z: Tensor, activation: str, *, dz: Tensor, y: Tensor | None) -> None:
    """dy [M, N], z [M, N] (gated [M, 2N]) -> dy act'(z) in dz, which is like z, and act(z) with forward's bits in y
    unless that is None; both are contiguous."""
    act = _entry(activation)
    for (dy_run, z_run), (dz_run, *y_run) in _runs([dy, z], [dz] if y is None else [dz, y], dy.numel()):
        dy_run = _widened(dy_run)
        if activation in GATED:
            gate, up = apart(z_run)
            dgate, value = _gradient(act, dy_run * up, gate, keep=True)
            gradient = together(dgate, value * dy_run)
            value.mul_(up)
        else:
            gradient, value = _gradient(act, dy_run, _widened(z_run), keep=y is not None)
        dz_run.copy_(gradient[: len(dz_run)])
        for place in y_run:
            place.copy_(value[: len(place)])


def _entry(activation: str) -> Activation:
    return ACTIVATIONS[GATED.get(activation, activation)]


def _value(act: Activation, z: Tensor) -> Tensor:
    return act.forward(z) if act.runs is None else act.runs.forward(z)


def _gradient(act: Activation, dy: Tensor, z: Tensor, *, keep: bool) -> tuple[Tensor, Tensor]:
    """-> dy act'(z), act(z) (empty unless ``keep``)."""
    if act.runs is not None:
        return act.runs.backward(dy, z)
    return act.backward(dy, z), act.forward(z) if keep else z.new_empty(0)


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
    words = _LITTLE and z.storage_offset() % 2 == 0
    if words and z.dtype == torch.bfloat16:
        pairs = z.view(torch.int32)
        return (pairs << 16).view(torch.float32), (pairs & -(1 << 16)).view(torch.float32)
    if words and z.dtype == torch.float32:
        pairs = z.view(torch.int64)
        return pairs.to(torch.int32).view(torch.float32), (pairs >> 32).to(torch.int32).view(torch.float32)
    gate, up = _widened(z).view(-1, 2).unbind(1)
    return gate.contiguous(), up.contiguous()


def together(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [n] of fp32 or fp64 -> [2n], new and contiguous."""
    return torch.view_as_real(torch.complex(gate, up)).view(-1)
