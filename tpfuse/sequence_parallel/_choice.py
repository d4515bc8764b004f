"""Whether an op's messages hide behind its GEMMs: a function of sizes and of what was measured, the same on every rank.

    hidden = min(bytes / link, flops / rate)         cost = messages x message + flops / rate x 1 %         pairwise where hidden > cost

``measured`` reads link, rate and message by arch, dtype and ranks from tuned.json ("overlap", written by bench.overlap).  The link measured
is within one machine: over a slower one more is hidden at the same cost.  On CPUs of one machine "auto" hides nothing: messages are copies
by the cores that multiply (bench.overlap, unshaped: a step takes 0.94 of off's time with two ranks, with four on two cores 1.06).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels._launch import target
from ..kernels._tuning import tuned
from ..parallel import TensorParallel
from ._flight import pieces

_RANKS = tuple(1 << i for i in range(1, 8))  # tuned.json's buckets
_PIECES = 0.01  # pieces make GEMMs up to 1.5 % slower on a CPU; wgrads, a third of them, are whole


class Form(NamedTuple):
    """What overlaps of one op, forward and backward: messages in pieces and whole, each of m D elements to each peer, GEMMs of M N K."""

    cut: int
    whole: int
    gemms: int


SEQUENCE = dict(
    gather_linear=Form(2, 1, 3),
    linear_exchange=Form(2, 0, 3),
    gather_mlp_exchange=Form(4, 1, 6),
    gather_attention_exchange=Form(4, 1, 3),  # with the columns of both projections; attention itself is not counted
    embedding=Form(0, 2, 0),
)
REPLICATED = dict(gather_linear=Form(0, 2, 1), linear_exchange=Form(0, 0, 0), gather_mlp_exchange=Form(0, 2, 2), embedding=Form(0, 2, 0))


class Sizes(NamedTuple):
    """One op's overlap on one rank, and the seconds of it where they were measured."""

    bytes: int
    messages: int
    flops: int
    measured: "tuple[float, float, float] | None" = None
    copied: bool = False  # by the cores that multiply

    @property
    def seconds(self) -> tuple[float, float, float]:
        """communication, computation, cost of overlapping them"""
        rate, link, message = self.measured
        return self.bytes / link, self.flops / rate, self.messages * message + _PIECES * self.flops / rate

    @property
    def wins(self) -> bool:
        if self.measured is None or self.messages == 0 or self.copied:
            return False
        communication, computation, cost = self.seconds
        return min(communication, computation) > cost


def measured(device: torch.device, dtype: torch.dtype, ranks: int) -> tuple[float, float, float] | None:
    """(GEMM flop/s, link bytes/s, seconds a message), or None where nobody measured."""
    for most, numbers in _measured(device, dtype):
        if most // 2 < ranks <= most:
            return numbers
    return None


@torch.compiler.assume_constant_result  # of what is never dynamic
def _measured(device: torch.device, dtype: torch.dtype) -> list[tuple[int, tuple[float, float, float]]]:
    arch = device.type if device.type != "cuda" else target(device).arch
    found = ((ranks, tuned("overlap", arch, dtype, (ranks,), {})) for ranks in _RANKS)
    return [(ranks, (f["gflops"] * 1e9, f["gbit"] * 1e9 / 8, f["message_us"] * 1e-6)) for ranks, f in found if f]


def sizes(op: str, rows: int, weight: tuple[int, int], dtype: torch.dtype, device: torch.device, tp: TensorParallel) -> Sizes:
    """Of ``op`` on M ``rows`` with this rank's ``weight`` [N, D] (linear_exchange: [D, N])."""
    form = (SEQUENCE if tp.sequence_parallel else REPLICATED)[op]
    width = weight[0] if op == "linear_exchange" else weight[1]
    m = -(-rows // tp.size)
    sent = (form.cut + form.whole) * (tp.size - 1) * m * width * dtype.itemsize
    messages = (tp.size - 1) * (form.cut * len(pieces(m)) + form.whole)
    copied = tp.one_machine and device.type == "cpu"
    return Sizes(sent, messages, form.gemms * 2 * rows * weight[0] * weight[1], measured(device, dtype, tp.size), copied)


def pairwise(op: str, x: Tensor, weight: Tensor, tp: TensorParallel, columns: int | None = None) -> bool:
    """Whether this call overlaps.  x [M, K] or [.., m, D]; ``columns`` in place of the weight's N where ranks have different ones."""
    if tp.size == 1 or tp.overlap != "auto":
        return tp.size > 1 and tp.overlap == "pairwise"
    rows = len(x) if x.dim() == 2 else x.shape[0] * x.shape[1]
    return sizes(op, rows, (columns or weight.shape[0], weight.shape[1]), x.dtype, x.device, tp).wins
