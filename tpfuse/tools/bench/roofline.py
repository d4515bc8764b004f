"""This card's two ceilings, copy bandwidth and matrix rate: measured in the run that they judge."""

import functools
from dataclasses import dataclass

import torch

from ...kernels.runtime.processor import model_name
from .measure import FILL, cache_bytes, once, side_stream


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
