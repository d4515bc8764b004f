"""How close to the limit: flops that a model needs, and the share of the peak that a measured step reaches.

    model flops     forward + backward of all GEMMs and of attention's two products (all keys, causal or not), whatever is recomputed
    hardware flops  with what is computed again: "full" a whole forward once more; "selective" attention's products, which Korthikanti et
                    al. count with their backward (s / 3h in place of s / 6h; the forward alone would be a third of what that adds)

For a GPT, 72 B s L h^2 (1 + s / 6h + V / 12 L h) and its kin: Narayanan et al. 2021 (arXiv:2104.04473), Korthikanti et al. 2022
(arXiv:2205.05198).  MFU and HFU are these over seconds, devices and peak.
"""

import time
from collections import deque
from typing import NamedTuple

from ..models.config import GPTConfig, ModelConfig
from .shapes import Shape
from .text import quantity

RECOMPUTE = "none", "selective", "full"
PEAK = {  # dense 16-bit matrix flops a second, by what is in the device's name
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "MI300X": 1307e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
}


def known_peak(device_name: str) -> float | None:
    """Dense 16-bit flops a second of a device, or None."""
    return next((peak for name, peak in PEAK.items() if name in device_name), None)


def forward_flops(config: ModelConfig, seq: int, batch: int) -> tuple[int, int, int]:
    """(GEMMs of the layers, attention's products, logits) of one forward."""
    s = Shape.of(config)
    tokens = batch * seq
    return 2 * tokens * s.L * s.weights, 4 * tokens * seq * s.L * s.H * s.E, 2 * tokens * s.D * s.V


def model_flops(config: ModelConfig, seq: int, batch: int) -> int:
    """Of one step over ``batch`` sequences of ``seq``: backward is twice forward."""
    return 3 * sum(forward_flops(config, seq, batch))


def hardware_flops(config: ModelConfig, seq: int, batch: int, recompute: str = "none") -> int:
    """What runs, recomputation included.  ``recompute``: "none", "selective" (attention) or "full" (every layer)."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"hardware_flops: recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
    gemm, attention, _ = forward_flops(config, seq, batch)
    again = {"none": 0, "selective": 3 * attention, "full": gemm + attention}[recompute]
    return model_flops(config, seq, batch) + again


class Utilization(NamedTuple):
    """Per device: flops a second, and % of the peak (model and hardware flops)."""

    model_rate: float
    mfu: float
    hfu: float


def utilization(
    config: ModelConfig, *, seq: int, batch: int, seconds: float, devices: int, peak: float, recompute: str = "none"
) -> Utilization:
    """Of a step over ``batch`` sequences that took ``seconds`` on ``devices`` of ``peak`` flops a second."""
    for name, value in (("seq", seq), ("batch", batch), ("seconds", seconds), ("devices", devices), ("peak", peak)):
        if not value > 0:
            raise ValueError(f"utilization: {name} must be positive, got {value}")
    share = 1 / (seconds * devices)
    model, hardware = model_flops(config, seq, batch) * share, hardware_flops(config, seq, batch, recompute) * share
    return Utilization(model, 100 * model / peak, 100 * hardware / peak)


class Published(NamedTuple):
    """A row of the table of Korthikanti et al. 2022: seconds an iteration are what was measured, MFU and HFU (%) what it says of them."""

    name: str
    heads: int
    width: int
    layers: int
    tp: int
    pp: int
    devices: int
    batch: int
    full_seconds: float
    seconds: float
    mfu: float
    hfu: float

    @property
    def config(self) -> GPTConfig:
        sizes = dict(hidden_size=self.width, num_layers=self.layers, num_heads=self.heads)
        return GPTConfig(vocab_size=51200, max_positions=2048, **sizes)

    def recomputed(self) -> Utilization:
        run = dict(seq=2048, batch=self.batch, devices=self.devices, peak=PEAK["A100"])
        return utilization(self.config, seconds=self.seconds, recompute="selective", **run)


PUBLISHED = [
    Published("22b", 64, 6144, 48, 8, 1, 8, 4, 1.42, 1.10, 41.5, 43.7),
    Published("175b", 96, 12288, 96, 8, 8, 64, 64, 18.13, 13.75, 51.4, 52.8),
    Published("530b", 128, 20480, 105, 8, 35, 280, 280, 49.05, 37.83, 56.0, 57.0),
    Published("1t", 160, 25600, 128, 8, 64, 512, 512, 94.42, 71.49, 56.3, 57.0),
]


class ThroughputMeter:
    """Tokens a second, model flops a second and device, and MFU where the peak is known, over the last ``window`` steps.

        meter = ThroughputMeter(config, seq=2048, batch=64, devices=8, device_name=torch.cuda.get_device_name())
        for step in ...:
            meter.start()
            ...
            meter.stop()     # after something that waits for the device: the loss as a number
            print(meter)     # 123,456 tokens/s, 182 TFLOP/s a device, MFU 58.3 %

    ``batch``: sequences a step over all devices.  What lies between stop and start (a checkpoint) is not counted.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seq: int,
        batch: int,
        devices: int = 1,
        peak: float | None = None,
        device_name: str = "",
        window: int = 20,
    ):
        self.tokens, self.devices = batch * seq, devices
        self.flops_a_token = model_flops(config, seq, batch) / self.tokens
        self.peak = known_peak(device_name) if peak is None else peak
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)  # seconds, tokens
        self._began: float | None = None

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self, tokens: int | None = None) -> None:
        """``tokens``: of this step, where not batch x seq."""
        if self._began is None:
            raise ValueError("ThroughputMeter: stop() without start()")
        self._steps.append((time.perf_counter() - self._began, self.tokens if tokens is None else tokens))
        self._began = None

    @property
    def seconds(self) -> float | None:
        """A step's, the mean of the window; None before the first."""
        return sum(seconds for seconds, _ in self._steps) / len(self._steps) if self._steps else None

    @property
    def tokens_per_s(self) -> float | None:
        return sum(tokens for _, tokens in self._steps) / sum(seconds for seconds, _ in self._steps) if self._steps else None

    @property
    def last_tokens_per_s(self) -> float | None:
        """Of the last step alone."""
        return self._steps[-1][1] / self._steps[-1][0] if self._steps else None

    @property
    def flops_per_s(self) -> float | None:
        """Model flops a second and device."""
        return self.flops_a_token * self.tokens_per_s / self.devices if self._steps else None

    @property
    def mfu(self) -> float | None:
        """%; None where the peak is not known"""
        return None if self.peak is None or not self._steps else 100 * self.flops_per_s / self.peak

    def __str__(self) -> str:
        if not self._steps:
            return "- tokens/s"
        known = "" if self.mfu is None else f", MFU {self.mfu:.1f} %"
        rate = quantity(self.flops_per_s, "FLOP/s")
        return f"{self.tokens_per_s:,.0f} tokens/s, {rate} a device{known}"
