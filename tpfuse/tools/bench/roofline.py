"""This card's two ceilings, copy bandwidth and matrix rate: measured in the run that they judge, and by data sheet."""

import functools
from dataclasses import dataclass

import torch

from ...kernels.runtime.processor import model_name
from ..ledger.mfu import known_peak
from .measure import FILL, cache_bytes, once, side_stream

MEMORY_GBS = {  # by what is in the device's name; NVIDIA's data sheets "H100 Tensor Core GPU", "H200 Tensor Core GPU"
    "NVIDIA H200": 4800.0,
    "NVIDIA H100 PCIe": 2000.0,
    "NVIDIA H100 80GB HBM3": 3350.0,
}


@dataclass(frozen=True)
class Card:
    """A device's measured ceilings."""

    name: str
    copy_gbs: float  # GB read and written a second
    matrix_tflops: dict[str, float]  # by dtype

    def floor(self, dtype: str, moved: int, flops: int) -> float:
        """Returns the seconds below which nothing that moves and computes this much can go."""
        return max(self.seconds(dtype, moved, flops))

    def seconds(self, dtype: str, moved: int, flops: int) -> tuple[float, float]:
        """Returns the seconds that the bytes take, and those that the flops take."""
        return moved / (self.copy_gbs * 1e9), flops / (self.matrix_tflops[dtype] * 1e12)


@dataclass(frozen=True)
class Sheet:
    """The maker's numbers: MFU divides by its dense bf16 rate, which is 989 TFLOP/s of an H100 SXM and of an H200."""

    matrix_tflops: float
    memory_gbs: float


def data_sheet(name: str) -> Sheet | None:
    """Returns None for a card that is not in the table: shares are then of what was measured."""
    peak, memory = known_peak(name), next((gbs for key, gbs in MEMORY_GBS.items() if key in name), None)
    return None if peak is None or memory is None else Sheet(peak / 1e12, memory)


def card_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{model_name()}, {threads} thread{'s' * (threads > 1)}"


def measure_card(
    device: torch.device, dtypes: dict[str, torch.dtype], *, copy_mib: int | None = None, side: int | None = None
) -> Card:
    """Times a copy of a buffer much larger than the cache, and a square product of random matrices in each dtype."""
    gpu = device.type == "cuda"
    if copy_mib is None:  # of the source, and as much of the target
        copy_mib = 2048 if gpu else max(128, FILL * cache_bytes(device) >> 21)
    side = side or (8192 if gpu else 1024)
    with side_stream(device):
        source = torch.empty(copy_mib << 18, dtype=torch.float32, device=device).normal_()
        target = torch.empty_like(source)
        seconds = once(lambda: target.copy_(source), device)
        rates = {}
        for name, dtype in dtypes.items():
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            product = torch.empty_like(a)
            rates[name] = 2 * side**3 / once(functools.partial(torch.mm, a, b, out=product), device) / 1e12
    return Card(card_name(device), 2 * source.nbytes / seconds / 1e9, rates)
