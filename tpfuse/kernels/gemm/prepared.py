"""Linear maps on a CPU by weights that stay as they are for many calls, without a gradient: each is made once, as a
closure over what its GEMM reads.

A form says how a weight is kept.  oneDNN's GEMM adds, multiplies or applies an activation in its epilogue.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime import matmul
from ..runtime.processor import instructions, multiplies, multiplies_tiles
from .activation import ACTIVATIONS, GATED

Map = Callable[[Tensor], Tensor]  # x [M, K] -> y [M, N]
Join = Callable[[Tensor, Tensor], Tensor]  # x [M, K], y [M, N] -> [M, N]; y may be written
_IN_PLACE: dict[str, Map] = {"silu": partial(F.silu, inplace=True), "relu": torch.relu_}  # new memory is slow
_EPILOGUES = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}


FEW = 4  # rows up to which one product with gate and up in turns is faster than one with each


class Plain:
    """torch's linear on the weight as it is: any dtype and layout, no second copy."""

    any_rows = False  # whether it is a good form for other numbers of rows too
    multiplies_in_turns = True  # whether few rows are multiplied by gate and up at once
    pays: int | None = None  # products of one weight from which its second copy is worth its making; None: it has none

    def map(self, weight: Tensor, bias: Tensor | None) -> Map:
        """Returns x -> x W' + b."""
        return lambda x: (matmul.row if len(x) == 1 else matmul.linear)(x, weight, bias)

    def partial(self, weight: Tensor) -> Map:
        """Returns x -> x W', of which a sum over ranks is made."""
        return self.map(weight, None)

    def add(self, weight: Tensor, bias: Tensor | None) -> Join:
        """Returns (x, y) -> y + x W' + b."""
        multiply = self.map(weight, bias)
        return lambda x, y: multiply(x).add_(y)

    def times(self, weight: Tensor, bias: Tensor | None) -> Join:
        """Returns (x, y) -> y (x W' + b)."""
        multiply = self.map(weight, bias)
        return lambda x, y: y.mul_(multiply(x))

    def activated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Map:
        """Returns x -> act(x W' + b)."""
        multiply, act = self.map(weight, bias), _IN_PLACE.get(activation, ACTIVATIONS[activation].forward)
        return lambda x: act(multiply(x))

    def mlp(self, weight: Tensor, bias: Tensor | None, activation: str) -> Map:
        """Returns the first map of an MLP, plain or gated: act(x G' + a) (x U' + b) for weight [F, 2, K] of G and U.

        Each half is a GEMM of its own: torch multiplies columns that lie apart by act(gate) in a fifth of the time that
        it takes for columns side by side.  Of few rows that is little, and one product reads the weight as it lies.
        """
        if activation not in GATED:
            return self.activated(weight, bias, activation)
        (gate, up), biases = weight.unbind(1), (None, None) if bias is None else bias.unbind(1)
        activate, multiply = self.activated(gate, biases[0], GATED[activation]), self.times(up, biases[1])
        if not self.multiplies_in_turns:
            return lambda x: multiply(x, activate(x))
        in_turns = self.map(weight.flatten(0, 1), None if bias is None else bias.flatten())
        act = ACTIVATIONS[GATED[activation]].forward

        def run(x: Tensor) -> Tensor:
            if len(x) > FEW:
                return multiply(x, activate(x))
            gate, up = in_turns(x).unflatten(1, (-1, 2)).unbind(2)
            return act(gate).mul_(up)

        return run


class Transposed(Plain):
    """A second copy [K, N], for one row: that product reads whole rows of it."""

    multiplies_in_turns = False
    pays = 32

    def map(self, weight: Tensor, bias: Tensor | None) -> Map:
        w = weight.t().contiguous()
        return (lambda x: torch.mm(x, w)) if bias is None else lambda x: torch.addmm(bias, x, w)


class Packed(Plain):
    """A second copy in the order in which oneDNN reads it for ``rows`` rows."""

    multiplies_in_turns = False
    pays: int | None = 12

    def __init__(self, rows: int, any_rows: bool = True):
        self.rows, self.any_rows = rows, any_rows

    def prepare(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.rows)

    def map(self, weight: Tensor, bias: Tensor | None) -> Map:
        return self._map(weight, bias, "none", "")

    def add(self, weight: Tensor, bias: Tensor | None) -> Join:
        return self._join(weight, bias, "add")

    def times(self, weight: Tensor, bias: Tensor | None) -> Join:
        return self._join(weight, bias, "mul")

    def activated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Map:
        if activation not in _EPILOGUES:
            return super().activated(weight, bias, activation)
        return self._map(weight, bias, *_EPILOGUES[activation])

    def _map(self, weight: Tensor, bias: Tensor | None, epilogue: str, kind: str) -> Map:
        prepared, b, run = self.prepare(weight), _dense(bias), torch.ops.mkldnn._linear_pointwise.default
        return lambda x: run(x, prepared, b, attr=epilogue, scalars=[], algorithm=kind)

    def _join(self, weight: Tensor, bias: Tensor | None, attribute: str) -> Join:
        prepared, b, run = self.prepare(weight), _dense(bias), torch.ops.mkldnn._linear_pointwise.binary
        return lambda x, y: run(x, y, prepared, b, attr=attribute)


class Dense(Packed):
    """oneDNN's GEMM on the weight as it is, made contiguous: of a strided one oneDNN runs its reference, hundreds of
    times slower."""

    pays = None

    def __init__(self) -> None:
        super().__init__(rows=0, any_rows=False)

    def prepare(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def mlp(self, weight: Tensor, bias: Tensor | None, activation: str) -> Map:
        if activation not in GATED:
            return super().mlp(weight, bias, activation)
        make: Any = super().mlp  # the halves are put together in each call: no second copy of every layer's
        return lambda x: make(weight.transpose(0, 1).contiguous().transpose(0, 1), bias, activation)(x)


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


# ---- which form ----

MANY = 64  # rows from which oneDNN's fp32 GEMM is worth its setup


def form_for(dtype: torch.dtype, *, rows: int, times: int) -> Plain:
    """Returns the form for so many products of so many rows each.

    On AVX2 alone oneDNN's fp32 GEMM of many rows is slower than torch's, which is MKL's: a gated MLP of width 512 takes
    1.3 times as long at 256 and 2,048 rows (``python -m bench.kernels.cpu --only forms``).
    """
    is_fp32 = dtype == torch.float32
    slow = is_fp32 and instructions()[0] == "AVX2"
    if not _has_onednn(dtype) or (slow and rows >= MANY):
        return Plain()
    copied = _copied(is_fp32, rows, any_rows=not slow)
    if copied.pays is not None and times >= copied.pays:
        return copied
    return Dense() if is_fp32 and rows >= MANY else Plain()


def _copied(is_fp32: bool, rows: int, any_rows: bool) -> Plain:
    """Returns the form with the fastest second copy; Plain where none is worth its making.

    On Intel's processors, which have AMX or no instructions of 16 bits beyond AVX-512, MKL reads an fp32 weight for up
    to three rows as fast as memory gives it.  Without these instructions oneDNN widens bf16 in any form; with AMX it
    reads a bf16 weight for one row as fast in any form (``python -m bench.kernels.copies``).
    """
    has_no_halves = instructions() == ("AVX512",)
    if is_fp32 and rows <= 3 and (has_no_halves or "amx_bf16" in instructions()):
        return Plain()
    if not is_fp32 and rows == 1 and multiplies_tiles():
        return Plain()
    if not is_fp32 and has_no_halves:
        return Transposed() if rows == 1 else Plain()
    return Transposed() if is_fp32 and rows == 1 else Packed(max(rows, 8), any_rows)


def _has_onednn(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN multiplies this dtype at full speed here, through ops that this torch has."""
    backend = torch.backends.mkldnn
    if not (backend.is_available() and backend.enabled and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies(dtype))
