"""Seconds of an op on a device: a roofline of data-sheet rates and stated shares, or this machine as calibrated.

A call takes the longer of its flops and its bytes (Williams, Waterman & Patterson 2009, the roofline), and its launch:

    seconds = launch + max(flops / (share x peak x filled), bytes / (share x bandwidth))

A GEMM's size has two effects.  Its launch: a product of f flops reaches share f / (f + f_half) of the peak, f_half =
launch x share x peak, Hockney's saturating line (Hockney & Jesshope 1981, r_inf and n_1/2).  And its waves: a result is
made in tiles of TILE x TILE, one for each multiprocessor at a time, and the last wave takes as long as a full one: t
tiles on m multiprocessors fill t / (m ceil(t / m)) of them (NVIDIA's "Matrix Multiplication Background", wave
quantization).  ``python -m bench.plan.published`` compares this with a published table of cuBLAS's rates.  The parts of
a sum over K that libraries make by themselves where tiles are few are not modelled.

Peaks, bandwidths and memory are the makers' data sheets, dense rates without sparsity.  Shares are stated, not fitted:

    a100-80gb   GEMM 75 % of the peak, memory 80 %: the shares of the published checks
    v100        GEMM 50 %, memory 75 %: an assumption
    the others  A100's shares: an assumption, as are 50 % for fused attention and 3 us for a launch everywhere

No GPU has measured tpfuse's own kernels (docs/measured.md).
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import one_of, quoted
from ..ledger.aten import ATTENTION, COMMUNICATION
from ..ledger.machine import Machine, key
from ..ledger.recorder import Entry
from ..nearest import proposal


class Device(NamedTuple):
    """A device by its rates.

    ``peak``: flop/s by dtype ("bfloat16").  ``bandwidth``, ``memory``: bytes/s and bytes of its memory.  ``gemm``,
    ``attention``: share of the peak that they reach; ``reached``: share of the bandwidth.  ``launch``: seconds of a
    call.  ``arch``: the architecture whose launch parameters, and so bytes, tpfuse's kernels have; None: a CPU's.
    ``multiprocessors``: those that make a GEMM's tiles; 0: waves are not modelled.
    """

    name: str
    peak: Mapping[str, float]
    bandwidth: float
    memory: float
    gemm: float = 0.75
    attention: float = 0.5
    reached: float = 0.8
    launch: float = 3e-6
    arch: str | None = None
    multiprocessors: int = 0

    def seconds(self, entry: Entry, dtype: torch.dtype) -> float:
        """Returns the seconds of a call with operands of ``dtype``, without its messages.  ValueError for a dtype
        without a peak."""
        if entry.kind == COMMUNICATION:
            return 0.0
        share = self.attention if entry.kind == ATTENTION else self.gemm * self.filled(entry.tiles)
        computed = entry.flops / (share * self.peak_of(dtype)) if entry.flops else 0.0
        return self.launch + max(computed, entry.moved / (self.reached * self.bandwidth))

    def filled(self, tiles: int) -> float:
        """Returns the share of the multiprocessors that are busy in the waves of so many tiles; 1 where it is not
        known."""
        if not (tiles and self.multiprocessors):
            return 1.0
        return tiles / (-(-tiles // self.multiprocessors) * self.multiprocessors)

    def peak_of(self, dtype: torch.dtype) -> float:
        """Returns the flop/s at a dtype; ValueError for one without a peak."""
        name = str(dtype).removeprefix("torch.")
        check(name in self.peak, f"plan: {self.name} has no peak for {name}, only for {', '.join(self.peak)}")
        return self.peak[name]


class LocalCPU(NamedTuple):
    """This machine's CPUs as ``python -m tpfuse calibrate`` measured them, shared by ``ranks`` that run at once.

    ``memory``: bytes of each rank.
    """

    machine: Machine
    ranks: int
    memory: float
    name: str = "here"
    arch: None = None

    def seconds(self, entry: Entry, dtype: torch.dtype) -> float:
        """Returns the seconds of a call; ValueError for a dtype or an op that was not calibrated."""
        if entry.kind == COMMUNICATION:
            return 0.0
        speeds, shared = self.machine.table(dtype, self.ranks)
        line = speeds.ops.get(key(entry)) or speeds.ops.get(entry.kind)
        check(line is not None, f"plan: {quoted(entry.op)} was not calibrated; run python -m tpfuse calibrate")
        assert line is not None
        return shared * (speeds.overhead + line.seconds(entry.flops, entry.moved, entry.scores))


def local_cpu(machine: Machine, ranks: int) -> LocalCPU:
    """Returns this machine's CPUs, its memory shared by ``ranks``."""
    return LocalCPU(machine, ranks, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks)


AnyDevice = Device | LocalCPU


def _peak(half: float, single: float, *, bf16: bool = True) -> Mapping[str, float]:
    """Returns TFLOP/s of 16-bit matrix products and of fp32 as flop/s by dtype."""
    names = ("bfloat16", "float16") if bf16 else ("float16",)
    return MappingProxyType({name: half * 1e12 for name in names} | {"float32": single * 1e12})


# NVIDIA "Tesla V100" (SXM2, 32 GB), "A100 80GB" (SXM), "H100" (SXM), "H200" (SXM), an eighth of "DGX B200"; AMD
# "Instinct MI300X", whose compute units are counted.  V100 has the launch parameters of A100, and B200 those of H100:
# there are none for it.
_DEVICES = (
    Device(
        "v100", _peak(125, 15.7, bf16=False), 0.9e12, 32e9, gemm=0.5, reached=0.75, arch="sm_80", multiprocessors=80
    ),
    Device("a100-80gb", _peak(312, 19.5), 2.039e12, 80e9, arch="sm_80", multiprocessors=108),
    Device("h100", _peak(989.4, 66.9), 3.35e12, 80e9, arch="sm_90", multiprocessors=132),
    Device("h200", _peak(989.4, 66.9), 4.8e12, 141e9, arch="sm_90", multiprocessors=132),
    Device("b200", _peak(2250, 75), 8e12, 180e9, arch="sm_90", multiprocessors=148),
    Device("mi300x", _peak(1307.4, 163.4), 5.3e12, 192e9, arch="gfx942", multiprocessors=304),
)
DEVICES: Mapping[str, Device] = MappingProxyType({d.name: d for d in _DEVICES})


def device(name: str) -> Device:
    """Returns a preset; ValueError for an unknown name."""
    check(
        one_of(DEVICES)(name) is None,
        f"plan: device must be one of {', '.join(DEVICES)}, got {quoted(name)}{proposal(name, DEVICES)}; a TOML file"
        " describes any other, python -m tpfuse plan --cluster FILE",
    )
    return DEVICES[name]
