"""The choice of an op's form: a function of sizes and of measured rates, the same on every rank.

    hidden = min(bytes / link, flops / rate)        cost = messages x message + flops / rate x 1 %
    messages overlap if hidden > cost

``measured`` reads link, rate and message by arch, dtype and ranks from tuned.json ("overlap", written by
bench.overlap).  The link measured is within one machine: over a slower one more is hidden at the same cost.  On CPUs
of one machine "auto" hides nothing: messages are copies by the cores that multiply (bench.overlap, unshaped: a step
takes 0.94 of off's time with two ranks, with four on two cores 1.06).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attn.options import Options, scores_left
from ..kernels.runtime.launch import target
from ..kernels.runtime.leaves import check_device
from ..kernels.runtime.tuning import tuned
from ..parallel import TensorParallel
from .flight import pieces
from .forms import Form, overlapped, plain, replicated
from .forms.leafwise import Leafwise

_RANKS = tuple(1 << i for i in range(1, 8))  # tuned.json's buckets
_PIECES = 0.01  # of the GEMMs' time; pieces make GEMMs up to 1.5 % slower on a CPU; wgrads, a third of them, are whole


class Hidden(NamedTuple):
    """The overlap of one op, forward and backward: the number of messages in pieces (``cut``) and in one (``uncut``),
    each of m D elements to each peer, and of GEMMs of M N K."""

    cut: int
    uncut: int
    gemms: int


SEQUENCE = dict(
    gather_linear=Hidden(2, 1, 3),
    linear_exchange=Hidden(2, 0, 3),
    gather_mlp_exchange=Hidden(4, 1, 6),
    gather_attention_exchange=Hidden(4, 1, 3),  # with the columns of both projections; attention itself is not counted
    embedding=Hidden(0, 2, 0),
)
REPLICATED = dict(
    gather_linear=Hidden(0, 2, 1),
    linear_exchange=Hidden(0, 0, 0),
    gather_mlp_exchange=Hidden(0, 2, 2),
    embedding=Hidden(0, 2, 0),
)


class Measured(NamedTuple):
    rate: float  # of GEMMs, flop/s
    link: float  # bytes/s
    message: float  # seconds each


class OverlapSizes(NamedTuple):
    """One op's overlap on one rank: bytes, messages and flops, and the measured rates if there are any."""

    bytes: int
    messages: int
    flops: int
    measured: Measured | None = None
    copied: bool = False  # by the cores that multiply

    @property
    def seconds(self) -> tuple[float, float, float]:
        """The seconds of communication, of computation, and of the cost of overlapping them; grads ``measured``."""
        assert self.measured is not None
        rate, link, message = self.measured
        return self.bytes / link, self.flops / rate, self.messages * message + _PIECES * self.flops / rate

    @property
    def wins(self) -> bool:
        if self.measured is None or self.messages == 0 or self.copied:
            return False
        communication, computation, cost = self.seconds
        return min(communication, computation) > cost


def measured(device: torch.device, dtype: torch.dtype, ranks: int) -> Measured | None:
    """Returns the measured rates for these, or None if nothing was measured."""
    for most, numbers in _measured(device, dtype):
        if most // 2 < ranks <= most:
            return numbers
    return None


def _measured(device: torch.device, dtype: torch.dtype) -> list[tuple[int, Measured]]:
    """Returns (largest number of ranks, rates) of every measurement.  Its arguments are never dynamic."""
    arch = device.type if device.type != "cuda" else target(device).arch
    rows = ((ranks, tuned("overlap", arch, dtype, (ranks,), default={})) for ranks in _RANKS)
    return [
        (ranks, Measured(row["gflops"] * 1e9, row["gbit"] * 1e9 / 8, row["message_us"] * 1e-6))
        for ranks, row in rows
        if row
    ]


# torch.compiler.assume_constant_result does no more, but imports the compiler for it, with every import of ours.
_measured._dynamo_marked_constant = True  # type: ignore[attr-defined]


def hidden(op: str, tp: TensorParallel) -> Hidden:
    return (SEQUENCE if tp.sequence_parallel else REPLICATED)[op]


def sizes(
    op: str, rows: int, weight: tuple[int, int], *, dtype: torch.dtype, device: torch.device, tp: TensorParallel
) -> OverlapSizes:
    """Returns the sizes of ``op`` on M ``rows`` with this rank's ``weight`` [N, D] (linear_exchange: [D, N])."""
    cut, uncut, gemms = hidden(op, tp)
    width = weight[0] if op == "linear_exchange" else weight[1]
    m = -(-rows // tp.size)
    return OverlapSizes(
        bytes=(cut + uncut) * (tp.size - 1) * m * width * dtype.itemsize,
        messages=(tp.size - 1) * (cut * len(pieces(m)) + uncut),
        flops=gemms * 2 * rows * weight[0] * weight[1],
        measured=measured(device, dtype, tp.size),
        copied=tp.one_machine and device.type == "cpu",
    )


def form_of(
    op: str, rows: int, weight: tuple[int, int], *, dtype: torch.dtype, device: torch.device, tp: TensorParallel
) -> Form:
    if tp.bitwise is not None and op != "embedding":  # which adds one row and zeros
        return Leafwise(-(-weight[0] // tp.leaves))
    if tp.size == 1 or tp.overlap == "off" or hidden(op, tp).gemms == 0:
        return plain
    if tp.overlap == "auto" and not sizes(op, rows, weight, dtype=dtype, device=device, tp=tp).wins:
        return plain
    return overlapped if tp.sequence_parallel else replicated


_ROUNDS = 4  # of attention, of whose messages a quarter is exposed; more are more messages


def most_rounds(groups: int, cp: TensorParallel) -> int:
    """Returns the number of rounds of a rank's ``groups`` of heads if their messages travel under attention.

    It is the largest up to _ROUNDS that divides them; where there is none each group is a round.
    """
    if cp.overlap == "off":
        return 1
    return max([n for n in range(2, _ROUNDS + 1) if groups % n == 0] or [groups])


def rounds_of_heads(qkv: Tensor, options: Options, cp: TensorParallel) -> int:
    """Returns in how many parts of its kv heads a rank attends, with the messages of others on their way; 1 where they
    do not overlap.  ``qkv`` [m, G, Q + 2, E] are a piece's heads before they are exchanged."""
    m, G, slots, E = qkv.shape
    most = most_rounds(G // cp.size, cp)
    if most == 1:
        return 1
    scored = scores_left(qkv, options)
    sent = OverlapSizes(
        bytes=4 * m * G * (slots - 1) * E * qkv.element_size() * (cp.size - 1) // cp.size,
        messages=4 * most * (cp.size - 1),
        flops=14 * E * scored // cp.size,  # two products forward, five backward
        measured=measured(qkv.device, qkv.dtype, cp.size),
        copied=cp.one_machine and qkv.is_cpu,
    )
    return most if cp.overlap == "pairwise" or sent.wins else 1


def choose(op: str, x: Tensor, weight: Tensor, *, tp: TensorParallel, columns: int | None = None) -> Form:
    """Returns the form of this call: x [M, K] or [.., m, D]; ``columns`` in place of the weight's N if ranks have
    different ones."""
    if tp.bitwise is not None:
        check_device(op, x)
    elif tp.size == 1:
        return plain
    rows = x.shape[0] if x.dim() == 2 else x.shape[0] * x.shape[1]
    shape = columns or weight.shape[0], weight.shape[1]
    return form_of(op, rows, shape, dtype=x.dtype, device=x.device, tp=tp)
